/* Vectors of sixteen floats, and the element type of KV pages, weights and activations.

   Plain C: the vector extensions of GCC and Clang work on every processor. `scalar` is bfloat16 with -DBFLOAT16, and
   float otherwise. Sums are float in both cases. */

#ifndef SERVEKIT_VECTORS_H
#define SERVEKIT_VECTORS_H

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error "this compiler is too old: the C kernels need GCC 12 or newer, or Clang; older GCCs lack __builtin_shufflevector"
#endif

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

enum { LANES = 16 }; /* LANES in workers/csrc/build.py is the same number */
typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#ifdef BFLOAT16
typedef uint16_t scalar; /* the upper half of a float */
typedef uint16_t scalars __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* With AVX-512, compilers widen and narrow vectors in several instructions where the processor has one. */
static inline floats load(const scalar *from) {
#ifdef __AVX512F__
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    return (floats)(__builtin_convertvector(*(const scalars *)from, ints) << 16);
#endif
}

/* Round to nearest, ties to even. The result is in the upper halves. Inputs must be finite. */
static inline ints round_to_upper_half(floats values) {
    ints bits = (ints)values;
    return bits + 0x7fff + ((bits >> 16) & 1);
}

static inline void store(scalar *to, floats values) {
    const ints upper_halves = round_to_upper_half(values) >> 16;
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)upper_halves));
#else
    *(scalars *)to = __builtin_convertvector(upper_halves, scalars);
#endif
}

static inline float to_float(scalar value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

static inline scalar from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (scalar)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* NaN and infinity become zero. */
static inline scalar finite_or_zero(scalar value) { return (value & 0x7f80) == 0x7f80 ? 0 : value; }
#else
typedef float scalar;

static inline floats load(const scalar *from) { return *(const floats *)from; }
static inline void store(scalar *to, floats values) { *(floats *)to = values; }
static inline float to_float(scalar value) { return value; }
static inline scalar from_float(float value) { return value; }

/* NaN and infinity become zero. Tested by bits, so that no compiler flag can assume the test away. */
static inline scalar finite_or_zero(scalar value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits & 0x7f800000) == 0x7f800000 ? 0.0f : value;
}
#endif

/* mask ? yes : no, lane by lane. The bits of a mask's lane are all ones or all zeros. */
static inline floats select_lanes(ints mask, floats yes, floats no) {
    return (floats)((mask & (ints)yes) | (~mask & (ints)no));
}

/* The larger ones, lane by lane; those of y where one is NaN. */
static inline floats larger(floats x, floats y) {
#ifdef __AVX512F__
    return (floats)_mm512_max_ps((__m512)x, (__m512)y); /* compilers take four instructions for what follows */
#else
    return select_lanes(x > y, x, y);
#endif
}

/* 2^x for x <= 0, or above by no more than a rounding. A polynomial gives the power of the part of x between whole
   numbers, with a relative error below 1e-7; in bfloat16, which has eight bits, below 3e-6. Below 2^-126 the result is
   exactly 0. Masked keys need that: any other weight, times a large value, would contribute to the sum. */
static inline floats exp2_nonpositive(floats x) {
#ifdef __AVX512F__
    const floats whole = (floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    x = larger((floats){} - 127.0f, x); /* the exponent's bits of 2^-127 are 0 */
    const ints nearest = __builtin_convertvector(x - 0.5f, ints); /* rounds towards zero */
    const floats whole = __builtin_convertvector(nearest, floats);
#endif
    const floats part = x - whole;
#ifdef BFLOAT16
    floats power = part * 9.582853e-3f + 5.5906425e-2f;
    power = power * part + 2.4024099e-1f;
    power = power * part + 6.9312419e-1f;
#else
    floats power = part * 1.3264727e-3f + 9.6715127e-3f;
    power = power * part + 5.5507337e-2f;
    power = power * part + 2.4022242e-1f;
    power = power * part + 6.9314698e-1f;
#endif
    power = power * part + 1.0f;
#ifdef __AVX512F__
    const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    return (floats)_mm512_maskz_scalef_ps(is_normal, (__m512)power, (__m512)whole);
#else
    return power * (floats)((nearest + 127) << 23);
#endif
}

static const float LOG2_E = 1.44269504f;

/* e^x for x <= 0. */
static inline floats exp_nonpositive(floats x) { return exp2_nonpositive(x * LOG2_E); }

static inline floats absolute(floats x) { return (floats)((ints)x & 0x7fffffff); }

#define PERMUTE(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#define SWAP_EIGHTS 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7
#define SWAP_FOURS 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11
#define SWAP_TWOS 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13

static inline float max_of_lanes(floats x) {
    x = larger(x, PERMUTE(x, SWAP_EIGHTS));
    x = larger(x, PERMUTE(x, SWAP_FOURS));
    x = larger(x, PERMUTE(x, SWAP_TWOS));
    return x[0] > x[1] ? x[0] : x[1];
}

/* Whether any lane is above `limit`. */
static inline int any_above(floats x, float limit) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
    return max_of_lanes(x) > limit;
#endif
}

static inline float sum_of_lanes(floats x) {
    x += PERMUTE(x, SWAP_EIGHTS);
    x += PERMUTE(x, SWAP_FOURS);
    x += PERMUTE(x, SWAP_TWOS);
    return x[0] + x[1];
}

#endif
