/* What a decoder layer does between its multiplications, each in one pass over its numbers. */

#include "vectors.h"

enum { WORTH_A_THREAD = 16384 }; /* numbers: waking another thread costs some microseconds */

/* x / rms(x) * weight (Zhang and Sennrich, 2019, "Root Mean Square Layer Normalization") for x [num_rows, size], dense;
   size is a multiple of LANES. */
void norm(const scalar *x, const scalar *weight, scalar *output, int64_t num_rows, int64_t size, float epsilon) {
#pragma omp parallel for if (num_rows * size > WORTH_A_THREAD)
    for (int64_t row = 0; row < num_rows; row++) {
        const scalar *values = x + row * size;
        floats squares = {};
        for (int64_t i = 0; i < size; i += LANES) squares += load(values + i) * load(values + i);
        const float factor = 1.0f / sqrtf(total_of(squares) / (float)size + epsilon);
        for (int64_t i = 0; i < size; i += LANES)
            store(output + row * size + i, load(values + i) * factor * load(weight + i));
    }
}

/* gate_up [num_rows, 2 * size], gates first -> silu(gate) * up [num_rows, size] (Shazeer, 2020, "GLU Variants Improve
   Transformer"); size is a multiple of LANES. */
void swiglu(const scalar *gate_up, scalar *output, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > WORTH_A_THREAD)
    for (int64_t row = 0; row < num_rows; row++) {
        const scalar *gates = gate_up + row * 2 * size, *ups = gates + size;
        for (int64_t i = 0; i < size; i += LANES) {
            const floats gate = load(gates + i), power = exp_of_negative(-absolute(gate));
            const floats open = chosen(gate < 0.0f, power, (floats){} + 1.0f) / (1.0f + power);
            store(output + row * size + i, gate * open * load(ups + i));
        }
    }
}
