/* Compact panels: bfloat16 weights in some three quarters of their bytes, and not rounded.

   The upper byte of a bfloat16 holds its sign and seven of the eight bits of its exponent. The weights of a panel are of
   similar size, so nearly all of them have one of sixteen upper bytes. Each weight is stored as its lower byte and the
   four bits of a code, the number of its upper byte. To give the weights back takes eight instructions for 128 of them,
   which is less than the time in which memory delivers these bytes to one of two cores.

   All panels of a weight take the same number of bytes. A panel is

       upper bytes   [16] that codes stand for, four times
       is_plain      a bit for each pair of inputs, padded to 64 bytes
       records       one for each pair of inputs and the 64 outputs of the panel,

   and a record is

       compact       lower bytes of vectors 0 and 1 [64], of vectors 2 and 3 [64], codes [64]
       plain         vectors [4], for a record in which some upper byte has no code

   where vectors are those of blocked_gemm.c: sixteen outputs, of two inputs each. The lower bytes and the codes are in
   the order in which unpacking puts bytes side by side. The lower half of a code's byte is of vectors 0 and 1. */

#ifndef SERVEKIT_COMPACT_PANELS_H
#define SERVEKIT_COMPACT_PANELS_H

#include "kernels.h"

#if defined(BFLOAT16) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_COMPACT_PANELS

#include <immintrin.h>

enum { NUM_CODES = 16, COMPACT_RECORD_BYTES = 192, PLAIN_RECORD_BYTES = 256, PAIRS_OF_MASK = 64 };

/* The bytes of a panel before its records. */
static inline int64_t compact_header_bytes(int64_t num_inputs) {
    const int64_t num_masks = (num_inputs / 2 + PAIRS_OF_MASK - 1) / PAIRS_OF_MASK;
    return 64 + (num_masks * 8 + 63) / 64 * 64;
}

/* The four vectors of a compact record. */
static inline __attribute__((always_inline)) void read_compact_record(__m512bh *vectors, const uint8_t *record,
                                                                      __m512i upper_bytes) {
    const __m512i codes = _mm512_loadu_si512(record + 128), four_bits = _mm512_set1_epi8(15);
    for (int half = 0; half < 2; half++) {
        const __m512i lower = _mm512_loadu_si512(record + 64 * half);
        const __m512i of_half = _mm512_and_si512(half ? _mm512_srli_epi16(codes, 4) : codes, four_bits);
        const __m512i upper = _mm512_shuffle_epi8(upper_bytes, of_half);
        vectors[2 * half] = (__m512bh)_mm512_unpacklo_epi8(lower, upper);
        vectors[2 * half + 1] = (__m512bh)_mm512_unpackhi_epi8(lower, upper);
    }
}
#endif

#endif
