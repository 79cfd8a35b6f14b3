/* Mixtures of experts: each token is computed by a few of many small MLPs, which a router chooses.

   Tokens are grouped by expert, so that the weights of an expert are read once for all tokens of the step that have it, and
   those of experts that no token has are not read. */

#include <stddef.h>

#include "kernels.h"

enum { MIN_PARALLEL_PRODUCTS = 262144 }; /* below this, one thread: to wake another one costs some microseconds */

static float dot_product(const scalar *x, const float *weight, int64_t size) {
    floats sums = {};
    for (int64_t i = 0; i < size; i += LANES) sums += load(x + i) * *(const floats *)(weight + i);
    return sum_of_lanes(sums);
}

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* Choose the num_chosen experts of one token that the router scores highest, and their shares of its result. The scores
   are overwritten. If some of them are NaN or infinite, the shares are NaN. The experts are different ones still: no
   expert may get more rows than there are tokens. */
static void choose_experts(const experts *experts, float *scores, int32_t *chosen, float *shares) {
    float highest = scores[0], total = 0.0f;
    for (int64_t e = 1; e < experts->num_experts; e++) highest = scores[e] > highest ? scores[e] : highest;
    for (int64_t e = 0; e < experts->num_experts; e++) {
        const float power = expf(scores[e] - highest);
        total += power;
        scores[e] = power >= 0.0f ? power : 0.0f; /* NaN is not less than -1, and would be chosen again */
    }
    float total_chosen = 0.0f;
    for (int64_t i = 0; i < experts->num_chosen; i++) {
        int64_t best = 0;
        for (int64_t e = 1; e < experts->num_experts; e++) best = scores[e] > scores[best] ? e : best;
        chosen[i] = (int32_t)best;
        shares[i] = scores[best];
        total_chosen += scores[best];
        scores[best] = -1.0f; /* chosen: less than all others */
    }
    const float whole = experts->normalizes && !isnan(total) ? total_chosen : total;
    for (int64_t i = 0; i < experts->num_chosen; i++) shares[i] /= whole;
}

/* Compute the MLP of `gate_up` and `down` for up to max_rows rows of `input`, and add it to those rows of `sums`
   [num_tokens, hidden_size] that `rows` names, times their shares. */
static void add_mlp(const experts *experts, const prepared_weight *gate_up, const prepared_weight *down,
                    const scalar *input, const int32_t *rows, const float *shares, int64_t num_rows, float *sums,
                    scalar *workspace, void *gemm_workspace) {
    const int64_t hidden_size = gate_up->num_inputs, inner_size = down->num_inputs;
    scalar *gates = workspace, *activated = gates + num_rows * 2 * inner_size;
    scalar *product = activated + num_rows * inner_size;
    gate_up->multiply(gate_up, input, NULL, gates, num_rows, gemm_workspace);
    experts->gate(gates, activated, num_rows, inner_size);
    down->multiply(down, activated, NULL, product, num_rows, gemm_workspace);
    for (int64_t i = 0; i < num_rows; i++) {
        float *sum = sums + rows[i] * hidden_size;
        for (int64_t d = 0; d < hidden_size; d += LANES)
            *(floats *)(sum + d) += load(product + i * hidden_size + d) * shares[i];
    }
}

void add_experts(const experts *experts, const scalar *x, scalar *output, int64_t num_rows, void *workspace,
                 void *gemm_workspace) {
    const int64_t hidden_size = experts->gate_up[0]->num_inputs, num_experts = experts->num_experts;
    const int64_t num_chosen = experts->num_chosen;
    const int64_t max_rows = experts->max_rows < num_rows ? experts->max_rows : num_rows;
    float *sums = workspace, *scores = sums + num_rows * hidden_size;
    float *shares = scores + num_rows * num_experts, *group_shares = shares + num_rows * num_chosen;
    int32_t *chosen = (int32_t *)(group_shares + num_rows), *rows = chosen + num_rows * num_chosen;
    scalar *gathered = (scalar *)(rows + num_rows), *rest = gathered + max_rows * hidden_size;
    memset(sums, 0, (size_t)(num_rows * hidden_size) * sizeof *sums);
#pragma omp parallel for if (num_rows * num_experts * hidden_size > MIN_PARALLEL_PRODUCTS)
    for (int64_t i = 0; i < num_rows * num_experts; i++) {
        const int64_t row = i / num_experts, expert = i % num_experts;
        scores[i] = dot_product(x + row * hidden_size, experts->router + expert * hidden_size, hidden_size) +
                    (experts->router_bias ? experts->router_bias[expert] : 0.0f);
    }
    for (int64_t row = 0; row < num_rows; row++)
        choose_experts(experts, scores + row * num_experts, chosen + row * num_chosen, shares + row * num_chosen);
    for (int64_t expert = 0; expert < num_experts; expert++) {
        int64_t num_group = 0;
        for (int64_t i = 0; i < num_rows * num_chosen; i++) {
            if (chosen[i] != expert) continue;
            rows[num_group] = (int32_t)(i / num_chosen);
            group_shares[num_group++] = shares[i];
        }
        for (int64_t first = 0; first < num_group; first += max_rows) {
            const int64_t num_part = num_group - first < max_rows ? num_group - first : max_rows;
            for (int64_t i = 0; i < num_part; i++)
                memcpy(gathered + i * hidden_size, x + rows[first + i] * hidden_size,
                       (size_t)hidden_size * sizeof *gathered);
            add_mlp(experts, experts->gate_up[expert], experts->down[expert], gathered, rows + first,
                    group_shares + first, num_part, sums, rest, gemm_workspace);
        }
    }
    for (int64_t first = 0; experts->shared_gate_up && first < num_rows; first += max_rows) {
        const int64_t num_part = num_rows - first < max_rows ? num_rows - first : max_rows;
        for (int64_t i = 0; i < num_part; i++) {
            const float score = dot_product(x + (first + i) * hidden_size, experts->shared_router, hidden_size);
            rows[i] = (int32_t)(first + i);
            group_shares[i] = sigmoid(score);
        }
        add_mlp(experts, experts->shared_gate_up, experts->shared_down, x + first * hidden_size, rows, group_shares,
                num_part, sums, rest, gemm_workspace);
    }
    for (int64_t i = 0; i < num_rows * hidden_size; i += LANES)
        store(output + i, load(output + i) + *(const floats *)(sums + i));
}
