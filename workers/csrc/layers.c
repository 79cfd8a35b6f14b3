/* The operations of a decoder layer between its matrix products. Each one makes a single pass over its numbers, where
   torch makes several. */

#include "kernels.h"

enum { MIN_PARALLEL_NUMBERS = 16384 }; /* below this, one thread: to wake another one costs some microseconds */

void rms_norm(const scalar *x, const float *weight, const scalar *residual, scalar *output, int64_t num_rows,
              int64_t size, float epsilon) {
#pragma omp parallel for if (num_rows * size > MIN_PARALLEL_NUMBERS)
    for (int64_t row = 0; row < num_rows; row++) {
        const scalar *values = x + row * size;
        floats squares = {};
        for (int64_t i = 0; i < size; i += LANES) squares += load(values + i) * load(values + i);
        const float factor = 1.0f / sqrtf(sum_of_lanes(squares) / (float)size + epsilon);
        for (int64_t i = 0; i < size; i += LANES) {
            floats normed = load(values + i) * factor * *(const floats *)(weight + i);
            if (residual) normed += load(residual + row * size + i);
            store(output + row * size + i, normed);
        }
    }
}

/* x * sigmoid(slope), where sigmoid(s) = e^min(s, 0) / (1 + e^-|s|), so that only non-positive powers are needed. */
static inline floats times_sigmoid(floats x, floats slope) {
    const floats power = exp_nonpositive(-absolute(slope));
    return x * select_lanes(slope < 0.0f, power, (floats){} + 1.0f) / (1.0f + power);
}

static inline floats silu(floats x) { return times_sigmoid(x, x); }

/* x (1 + tanh(t)) / 2 = x * sigmoid(2 t) with t = sqrt(2 / pi) (x + 0.044715 x^3). */
static inline floats gelu(floats x) { return times_sigmoid(x, x * (1.59576912f + 0.0713548163f * x * x)); }

static inline floats at_most(floats x, float limit) { return select_lanes(x > limit, (floats){} + limit, x); }

static inline floats clamped_silu(floats x) { return times_sigmoid(at_most(x, 7.0f), 1.702f * at_most(x, 7.0f)); }

/* Define a gated linear unit: `activated` is made of a vector of gates, `gate`, and one of ups, `up`. A macro, because
   compilers do not inline a function that is given to a parallel loop. */
#define GATED_LINEAR_UNIT(name, activated)                                                                             \
    void name(const scalar *gate_up, scalar *output, int64_t num_rows, int64_t size) {                                 \
        _Pragma("omp parallel for if (num_rows * size > MIN_PARALLEL_NUMBERS)")                                        \
        for (int64_t row = 0; row < num_rows; row++) {                                                                 \
            const scalar *gates = gate_up + row * 2 * size, *ups = gates + size;                                       \
            for (int64_t i = 0; i < size; i += LANES) {                                                                \
                const floats gate = load(gates + i), up = load(ups + i);                                               \
                store(output + row * size + i, activated);                                                             \
            }                                                                                                          \
        }                                                                                                              \
    }

GATED_LINEAR_UNIT(swiglu, silu(gate) * up)
GATED_LINEAR_UNIT(geglu, gelu(gate) * up)
GATED_LINEAR_UNIT(clamped_swiglu, clamped_silu(gate) * (-at_most(-at_most(up, 7.0f), 7.0f) + 1.0f))
