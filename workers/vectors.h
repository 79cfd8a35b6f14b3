/* Sixteen floats at a time, in plain C: the vectors that GCC and Clang have for every processor, and what a page or a
   weight holds, which is bfloat16 with -DBFLOAT16 and float without. Sums are float either way. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16 };
typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#ifdef BFLOAT16
typedef uint16_t scalar; /* the upper half of a float */
typedef uint16_t scalars __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline floats load(const scalar *from) {
    return (floats)(__builtin_convertvector(*(const scalars *)from, ints) << 16);
}

static inline ints nearest(floats values) { /* ties to even; the upper halves are the answer. Values are finite */
    ints bits = (ints)values;
    return bits + 0x7fff + ((bits >> 16) & 1);
}

static inline void store(scalar *to, floats values) {
    *(scalars *)to = __builtin_convertvector(nearest(values) >> 16, scalars);
}

static inline float widened(scalar value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

static inline scalar narrowed(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (scalar)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline scalar or_zero(scalar value) { /* what is not finite is none */ return (value & 0x7f80) == 0x7f80 ? 0 : value; }
#else
typedef float scalar;

static inline floats load(const scalar *from) { return *(const floats *)from; }
static inline void store(scalar *to, floats values) { *(floats *)to = values; }
static inline float widened(scalar value) { return value; }
static inline scalar narrowed(float value) { return value; }

static inline scalar or_zero(scalar value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits & 0x7f800000) == 0x7f800000 ? 0.0f : value;
}
#endif

static inline floats chosen(ints mask, floats yes, floats no) { /* a lane of the mask is all bits, or none */
    return (floats)((mask & (ints)yes) | (~mask & (ints)no));
}

/* e^x for x <= 0, to 4e-6 of it (2e-7 near 0): 2^n by its bits, the rest as a polynomial. Below e^-87.3 it is 0, as it
   must be for keys that are not to be seen: anything else times a large value is a number. */
static inline floats exp_of_negative(floats x) {
    x *= 1.44269504f;
    x = chosen(x < -127.0f, (floats){} - 127.0f, x); /* whose exponent's bits are 0 */
    ints whole = __builtin_convertvector(x - 0.5f, ints); /* towards zero: the next whole number from x - 1/2 */
    floats part = x - __builtin_convertvector(whole, floats);
    floats value = part * 1.5403530e-4f + 1.3333558e-3f;
    value = value * part + 9.6181291e-3f;
    value = value * part + 5.5504109e-2f;
    value = value * part + 2.4022651e-1f;
    value = value * part + 6.9314718e-1f;
    value = value * part + 1.0f;
    return value * (floats)((whole + 127) << 23);
}

static inline floats absolute(floats x) { return (floats)((ints)x & 0x7fffffff); }

#define TURNED(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#define BY_EIGHT 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7
#define BY_FOUR 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11
#define BY_TWO 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13

static inline float largest(floats x) {
    floats y = TURNED(x, BY_EIGHT);
    x = chosen(x > y, x, y), y = TURNED(x, BY_FOUR);
    x = chosen(x > y, x, y), y = TURNED(x, BY_TWO);
    x = chosen(x > y, x, y);
    return x[0] > x[1] ? x[0] : x[1];
}

static inline float total_of(floats x) {
    x += TURNED(x, BY_EIGHT);
    x += TURNED(x, BY_FOUR);
    x += TURNED(x, BY_TWO);
    return x[0] + x[1];
}
