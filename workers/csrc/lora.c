/* What LoRA adapters add to a product of a weight: y += (x A') B', with the A and B of each row's adapter.

   A runs over all inputs and B over all outputs of the weight, but their rank is small, so the work is that of reading
   both once. Rows of one adapter follow each other and share what is read. */

#include "kernels.h"

enum { RANKS_AT_ONCE = 8, OUTPUTS_AT_ONCE = 16 * LANES };
enum { MIN_PARALLEL_PRODUCTS = 32768 }; /* below this, one thread: to wake another one costs some microseconds */

/* hidden [num_rows of the run, max_rank] of one part: the products with some rows of A. */
static void shrink(const lora_part *part, int64_t first_rank, const scalar *x, int64_t num_inputs, int64_t num_rows,
                   float *hidden, int64_t hidden_stride) {
    const int64_t stop_rank = first_rank + RANKS_AT_ONCE < part->rank ? first_rank + RANKS_AT_ONCE : part->rank;
    for (int64_t row = 0; row < num_rows; row++) {
        const scalar *values = x + row * num_inputs;
        int64_t rank = first_rank;
        for (; rank + 4 <= stop_rank; rank += 4) {
            const scalar *a = part->a + rank * num_inputs;
            floats sums[4] = {};
            for (int64_t i = 0; i < num_inputs; i += LANES) {
                const floats value = load(values + i);
                for (int k = 0; k < 4; k++) sums[k] += value * load(a + k * num_inputs + i);
            }
            for (int k = 0; k < 4; k++) hidden[row * hidden_stride + rank + k] = sum_of_lanes(sums[k]);
        }
        for (; rank < stop_rank; rank++) {
            floats sum = {};
            for (int64_t i = 0; i < num_inputs; i += LANES)
                sum += load(values + i) * load(part->a + rank * num_inputs + i);
            hidden[row * hidden_stride + rank] = sum_of_lanes(sum);
        }
    }
}

/* Add the products of hidden with some columns of B to the outputs. */
static void expand(const lora_part *part, int64_t first, const float *hidden, int64_t hidden_stride, int64_t num_rows,
                   scalar *output, int64_t output_stride) {
    const int64_t num_outputs = part->num_outputs;
    const int64_t stop = first + OUTPUTS_AT_ONCE < num_outputs ? first + OUTPUTS_AT_ONCE : num_outputs;
    for (int64_t row = 0; row < num_rows; row++) {
        const float *factors = hidden + row * hidden_stride;
        scalar *target = output + row * output_stride + part->first_output;
        int64_t i = first;
        for (; i + 4 * LANES <= stop; i += 4 * LANES) {
            floats sums[4];
            for (int k = 0; k < 4; k++) sums[k] = load(target + i + k * LANES);
            for (int64_t rank = 0; rank < part->rank; rank++) {
                const scalar *b = part->b + rank * num_outputs + i;
                for (int k = 0; k < 4; k++) sums[k] += factors[rank] * load(b + k * LANES);
            }
            for (int k = 0; k < 4; k++) store(target + i + k * LANES, sums[k]);
        }
        for (; i < stop; i += LANES) {
            floats sum = load(target + i);
            for (int64_t rank = 0; rank < part->rank; rank++)
                sum += factors[rank] * load(part->b + rank * num_outputs + i);
            store(target + i, sum);
        }
    }
}

void add_lora(const lora_weight *weight, const lora_step *step, const scalar *x, scalar *output) {
    const int64_t num_parts = weight->num_parts, max_rank = step->max_rank;
    const int64_t num_rank_blocks = (max_rank + RANKS_AT_ONCE - 1) / RANKS_AT_ONCE;
    const int64_t num_output_blocks = (weight->num_outputs + OUTPUTS_AT_ONCE - 1) / OUTPUTS_AT_ONCE;
    const int64_t num_pairs = step->num_runs * num_parts, hidden_stride = num_parts * max_rank;
#pragma omp parallel if (step->num_rows * max_rank * weight->num_inputs > MIN_PARALLEL_PRODUCTS)
    {
#pragma omp for schedule(static)
        for (int64_t item = 0; item < num_pairs * num_rank_blocks; item++) {
            const int64_t pair = item / num_rank_blocks, first_rank = item % num_rank_blocks * RANKS_AT_ONCE;
            const lora_run *run = step->runs + pair / num_parts;
            const lora_part *part = weight->parts + run->place * num_parts + pair % num_parts;
            if (first_rank < part->rank)
                shrink(part, first_rank, x + run->first_row * weight->num_inputs, weight->num_inputs, run->num_rows,
                       step->hidden + run->first_hidden * hidden_stride + pair % num_parts * max_rank, hidden_stride);
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < num_pairs * num_output_blocks; item++) {
            const int64_t pair = item / num_output_blocks, first = item % num_output_blocks * OUTPUTS_AT_ONCE;
            const lora_run *run = step->runs + pair / num_parts;
            const lora_part *part = weight->parts + run->place * num_parts + pair % num_parts;
            if (part->rank && first < part->num_outputs)
                expand(part, first, step->hidden + run->first_hidden * hidden_stride + pair % num_parts * max_rank,
                       hidden_stride, run->num_rows, output + run->first_row * weight->num_outputs,
                       weight->num_outputs);
        }
    }
}
