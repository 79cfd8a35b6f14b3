/* The operations of a decoder layer between its matrix products. Each one makes a single pass over its numbers, where
   torch makes several. */

#include "kernels.h"

enum { MIN_PARALLEL_NUMBERS = 16384 }; /* below this, one thread: to wake another one costs some microseconds */

void rms_norm(const scalar *x, const scalar *weight, scalar *output, int64_t num_rows, int64_t size, float epsilon) {
#pragma omp parallel for if (num_rows * size > MIN_PARALLEL_NUMBERS)
    for (int64_t row = 0; row < num_rows; row++) {
        const scalar *values = x + row * size;
        floats squares = {};
        for (int64_t i = 0; i < size; i += LANES) squares += load(values + i) * load(values + i);
        const float factor = 1.0f / sqrtf(sum_of_lanes(squares) / (float)size + epsilon);
        for (int64_t i = 0; i < size; i += LANES)
            store(output + row * size + i, load(values + i) * factor * load(weight + i));
    }
}

void swiglu(const scalar *gate_up, scalar *output, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > MIN_PARALLEL_NUMBERS)
    for (int64_t row = 0; row < num_rows; row++) {
        const scalar *gates = gate_up + row * 2 * size, *ups = gates + size;
        for (int64_t i = 0; i < size; i += LANES) {
            /* sigmoid(g) = e^min(g, 0) / (1 + e^-|g|), so that only non-positive powers are needed */
            const floats gate = load(gates + i), power = exp_nonpositive(-absolute(gate));
            const floats sigmoid = select_lanes(gate < 0.0f, power, (floats){} + 1.0f) / (1.0f + power);
            store(output + row * size + i, gate * sigmoid * load(ups + i));
        }
    }
}
