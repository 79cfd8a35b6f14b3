/* Products of a weight's numbers in a vector, and numbers of x: as many of a lane are multiplied together as the
   processor's instructions take. */

#ifndef SERVEKIT_PRODUCTS_H
#define SERVEKIT_PRODUCTS_H

#include "vectors.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 8")

INLINE ints load_ints(const void *from) { return *(const ints *)from; }

#ifdef BFLOAT16
enum { PACK = 2 }; /* the scalars of a lane */
typedef uint32_t packed __attribute__((may_alias)); /* two scalars, the first one in the lower half */

INLINE floats add_products(floats sums, ints pairs, packed x) {
#ifdef __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int)x));
#else
    return sums + (floats)(pairs << 16) * to_float((scalar)x) +
           (floats)(pairs & (int32_t)0xffff0000) * to_float((scalar)(x >> 16));
#endif
}
#else
enum { PACK = 1 };
typedef float packed;

INLINE floats add_products(floats sums, ints numbers, packed x) { return sums + (floats)numbers * x; }
#endif

#endif
