/* How KV pages of one byte per number hold vectors: a code for each number, and a float scale for each vector. A number
   is its code's value times the scale.

   A code is a sign and a magnitude of seven bits. The magnitude is an integer up to 127 (int8), or a float8 e4m3 without
   its sign. Each of these values is exact in bfloat16, so a code can be decoded to bfloat16 or to float without error.

   Codes are stored and decoded by lines of 64, which are two vectors of sixteen lanes with two codes in each lane. */

#ifndef SERVEKIT_KV_CODES_H
#define SERVEKIT_KV_CODES_H

#include "kernels.h"

#if defined(__AVX512VBMI__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

/* A line of codes; the scales of a tile; sixteen dimensions of a tile of values. */
enum { LINE_BYTES = 64, SCALES_BYTES = 4 * LANES, VECTOR_BYTES = LANES * LANES };

typedef uint8_t sixteen_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint16_t sixteen_pairs __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline int64_t round_up_to_lanes(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

/* -- encoding ----------------------------------------------------------------------------------------------------- */

/* Below this, a scale would not have a finite reciprocal. A vector that needs a smaller one is stored as zeros. */
#define SMALLEST_SCALE 1e-30f

/* The nearest integers to numbers from 0 to 2^22, ties to even. */
static inline ints round_to_integers(floats numbers) { return (ints)(numbers + 8388608.0f) - 0x4b000000; }

/* The magnitudes of float8 nearest to numbers from 0 to 448, ties to even. */
static inline ints round_to_float8(floats numbers) {
    const ints bits = (ints)numbers;
    const ints normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3); /* 120: from one bias to the other */
    const ints subnormal = round_to_integers(numbers * 0x1p9f); /* below 2^-6, numbers are multiples of 2^-9 */
    const ints is_subnormal = numbers < 0x1p-6f;
    return (is_subnormal & subnormal) | (~is_subnormal & normal);
}

/* Encode `dim` numbers as `codes` [round_up_to_lanes(dim)], and return their scale: `scale` if it is not zero, else the
   one that makes the largest magnitude the largest code. Numbers that are not finite become zero. */
static inline float encode_vector(uint8_t *codes, const scalar *vector, int64_t dim, float scale, int is_float8) {
    const float largest_code = is_float8 ? 448.0f : 127.0f;
    const int64_t padded_dim = round_up_to_lanes(dim);
    scalar numbers[MAX_HEAD_DIM];
    for (int64_t d = 0; d < dim; d++) numbers[d] = finite_or_zero(vector[d]);
    for (int64_t d = dim; d < padded_dim; d++) numbers[d] = 0;
    if (scale == 0.0f) {
        floats top = {};
        for (int64_t d = 0; d < padded_dim; d += LANES) {
            const floats sizes = absolute(load(numbers + d));
            top = select_lanes(sizes > top, sizes, top);
        }
        scale = max_of_lanes(top) / largest_code;
        if (scale < SMALLEST_SCALE) scale = SMALLEST_SCALE;
    }
    const float reciprocal = 1.0f / scale;
    for (int64_t d = 0; d < padded_dim; d += LANES) {
        const floats exact = load(numbers + d);
        floats sizes = absolute(exact) * reciprocal;
        sizes = select_lanes(sizes < largest_code, sizes, (floats){} + largest_code);
        const ints magnitudes = is_float8 ? round_to_float8(sizes) : round_to_integers(sizes);
        const ints signs = ((ints)exact >> 24) & 0x80;
        *(sixteen_bytes *)(codes + d) = __builtin_convertvector(magnitudes | signs, sixteen_bytes);
    }
    return scale;
}

/* -- decoding ----------------------------------------------------------------------------------------------------- */

#ifdef __AVX512VBMI__
/* One instruction looks 64 bytes up in a table of 128, so codes are decoded to bfloat16 by a table of lower bytes and
   one of upper bytes. Lower and upper bytes are then interleaved in groups of four lanes. Hence the order in a line. */
enum { LANES_PER_GROUP = 4 };
typedef ints decoded_pairs; /* sixteen pairs of bfloat16, the first one in the lower half */
typedef struct { __m512i lower[2], upper[2]; } decoder;

#define LOG2(m) ((m) >= 64 ? 6 : (m) >= 32 ? 5 : (m) >= 16 ? 4 : (m) >= 8 ? 3 : (m) >= 4 ? 2 : (m) >= 2 ? 1 : 0)
#define INTEGER(m) ((m) == 0 ? 0 : ((127 + LOG2(m)) << 7) + ((m) << (7 - LOG2(m))) - (1 << 7))
#define FLOAT8(m) ((m) == 0 ? 0 : (m) < 8 ? INTEGER(m) - (9 << 7) : ((m) << 4) + (120 << 7))
#define FOUR(f, m) f(m), f((m) + 1), f((m) + 2), f((m) + 3)
#define SIXTEEN(f, m) FOUR(f, m), FOUR(f, (m) + 4), FOUR(f, (m) + 8), FOUR(f, (m) + 12)
#define SIXTY_FOUR(f, m) SIXTEEN(f, m), SIXTEEN(f, (m) + 16), SIXTEEN(f, (m) + 32), SIXTEEN(f, (m) + 48)

/* The bits of each magnitude's value in bfloat16: of int8, of float8. */
static const uint16_t values_of_magnitudes[2][128] = {
    {SIXTY_FOUR(INTEGER, 0), SIXTY_FOUR(INTEGER, 64)},
    {SIXTY_FOUR(FLOAT8, 0), SIXTY_FOUR(FLOAT8, 64)},
};

static inline __m512i lower_bytes(__m512i first, __m512i second) {
    const __m512i lower = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(first));
    return _mm512_inserti64x4(lower, _mm512_cvtepi16_epi8(second), 1);
}

static inline decoder make_decoder(int is_float8) {
    decoder made;
    for (int half = 0; half < 2; half++) {
        const uint16_t *values = values_of_magnitudes[is_float8] + 64 * half;
        const __m512i first = _mm512_loadu_si512(values), second = _mm512_loadu_si512(values + 32);
        made.lower[half] = lower_bytes(first, second);
        made.upper[half] = lower_bytes(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
    }
    return made;
}

static inline void decode_line(decoded_pairs *pairs, const uint8_t *line, const decoder *decoder) {
    const __m512i codes = _mm512_loadu_si512(line);
    const __m512i lower = _mm512_permutex2var_epi8(decoder->lower[0], codes, decoder->lower[1]);
    __m512i upper = _mm512_permutex2var_epi8(decoder->upper[0], codes, decoder->upper[1]);
    /* 0xf8 is the truth table of a | (b & c): the sign is added. */
    upper = _mm512_ternarylogic_epi32(upper, codes, _mm512_set1_epi8((char)0x80), 0xf8);
    pairs[0] = (ints)_mm512_unpacklo_epi8(lower, upper);
    pairs[1] = (ints)_mm512_unpackhi_epi8(lower, upper);
}

/* sum + the first numbers of all pairs * numbers[0] + the second ones * numbers[1]. */
static inline floats multiply_add_pairs(floats sum, decoded_pairs pairs, const scalar *numbers) {
#if defined(BFLOAT16) && defined(__AVX512BF16__)
    uint32_t both;
    memcpy(&both, numbers, 4);
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int)both));
#else
    sum += (floats)(pairs << 16) * to_float(numbers[0]);
    return sum + (floats)(pairs & (int32_t)0xffff0000) * to_float(numbers[1]);
#endif
}
#else
enum { LANES_PER_GROUP = LANES };
typedef struct { floats first, second; } decoded_pairs;
typedef struct { int is_float8; } decoder;

static inline decoder make_decoder(int is_float8) { return (decoder){is_float8}; }

/* Decode the lower byte of each lane. */
static inline floats decode_lanes(ints codes, int is_float8) {
    const ints magnitudes = codes & 0x7f;
    floats sizes = __builtin_convertvector(magnitudes, floats);
    if (is_float8)
        sizes = select_lanes(magnitudes < 8, sizes * 0x1p-9f, (floats)((magnitudes << 20) + (120 << 23)));
    return (floats)((ints)sizes | ((codes << 24) & (int32_t)0x80000000));
}

static inline void decode_line(decoded_pairs *pairs, const uint8_t *line, const decoder *decoder) {
    for (int vector = 0; vector < 2; vector++) {
        const ints codes = __builtin_convertvector(((const sixteen_pairs *)line)[vector], ints);
        pairs[vector].first = decode_lanes(codes, decoder->is_float8);
        pairs[vector].second = decode_lanes(codes >> 8, decoder->is_float8);
    }
}

static inline floats multiply_add_pairs(floats sum, decoded_pairs pairs, const scalar *numbers) {
    sum += pairs.first * to_float(numbers[0]);
    return sum + pairs.second * to_float(numbers[1]);
}
#endif

/* The place in a line of one of the two codes in a lane of one of the two vectors. */
static inline int64_t place_in_line(int64_t vector, int64_t lane, int64_t code) {
    return lane / LANES_PER_GROUP * 4 * LANES_PER_GROUP + vector * 2 * LANES_PER_GROUP + lane % LANES_PER_GROUP * 2 + code;
}

#endif
