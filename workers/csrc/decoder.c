/* All layers of a decoder, with weights of any kind.

   They run in one call. Between two calls, Python takes longer than an OpenMP thread spins before it sleeps (some
   microseconds), and to wake a thread takes longer than to multiply. */

#include <stddef.h>

#include "kernels.h"

void multiply_side_by_side(const prepared_weight *weight, const scalar *x, const scalar *residual, scalar *output,
                           int64_t num_rows, void *workspace) {
    (void)residual;
    const side_by_side_weight *whole = (const side_by_side_weight *)weight;
    const int64_t num_outputs = weight->num_outputs;
    scalar *const product = workspace, *const rest = product + num_rows * num_outputs;
    for (int64_t i = 0, first = 0; i < whole->num_parts; i++) {
        const prepared_weight *part = whole->parts[i];
        part->multiply(part, x, NULL, product, num_rows, rest);
        for (int64_t row = 0; row < num_rows; row++)
            memcpy(output + row * num_outputs + first, product + row * part->num_outputs,
                   part->num_outputs * sizeof *output);
        first += part->num_outputs;
    }
}

/* The input of attention or of an MLP: x, or its norm in `normed`. */
static const scalar *norm_input(const norm *norm, const scalar *x, scalar *normed, int64_t num_rows, int64_t size) {
    if (!norm->weight) return x;
    rms_norm(x, norm->weight, NULL, normed, num_rows, size, norm->epsilon);
    return normed;
}

/* x += norm(input W' + b). Without the norm, the product is added to x at once. */
static void add_product(const prepared_weight *weight, const lora_weight *lora, const lora_step *adapters,
                        const norm *norm, const scalar *input, scalar *x, scalar *product, int64_t num_rows,
                        void *gemm_workspace) {
    scalar *const sum = norm->weight ? product : x;
    weight->multiply(weight, input, norm->weight ? NULL : x, sum, num_rows, gemm_workspace);
    if (adapters) add_lora(lora, adapters, input, sum);
    if (norm->weight) rms_norm(product, norm->weight, x, x, num_rows, weight->num_outputs, norm->epsilon);
}

static void add_mlp(const decoder_layer *layer, const lora_step *adapters, const scalar *input, scalar *x,
                    scalar *product, int64_t num_rows, scalar *workspace, void *gemm_workspace) {
    const prepared_weight *to_gate_up = layer->gate_up, *down = layer->down;
    const int64_t inner_size = down->num_inputs;
    scalar *gate_up = workspace, *activated = gate_up + num_rows * 2 * inner_size;
    to_gate_up->multiply(to_gate_up, input, NULL, gate_up, num_rows, gemm_workspace);
    if (adapters) add_lora(layer->gate_up_lora, adapters, input, gate_up);
    layer->gate(gate_up, activated, num_rows, inner_size);
    add_product(down, layer->down_lora, adapters, &layer->mlp_output_norm, activated, x, product, num_rows,
                gemm_workspace);
}

void decode_layers(const decoder_layer *layers, const layer_pages *pages, int64_t num_layers,
                   const attention_metadata *metadata, const lora_step *adapters, const rotation *rotations, scalar *x,
                   scalar *workspace, void *gemm_workspace) {
    const int64_t num_tokens = metadata->num_tokens;
    for (int64_t i = 0; i < num_layers; i++) {
        const decoder_layer *layer = layers + i;
        const prepared_weight *to_qkv = layer->qkv, *to_output = layer->output;
        const int64_t hidden_size = to_qkv->num_inputs;
        scalar *normed = workspace;
        scalar *qkv = normed + num_tokens * hidden_size;
        scalar *attended = qkv + num_tokens * to_qkv->num_outputs;
        scalar *of_mlp = qkv; /* in place of attention's results, which it does not need */
        const scalar *input = norm_input(&layer->attention_norm, x, normed, num_tokens, hidden_size);
        to_qkv->multiply(to_qkv, input, NULL, qkv, num_tokens, gemm_workspace);
        if (adapters) add_lora(layer->qkv_lora, adapters, input, qkv);
        rotate_store_and_attend(pages + i, metadata, qkv, rotations + layer->rotation, &layer->head_norms, attended);
        add_product(to_output, layer->output_lora, adapters, &layer->attention_output_norm, attended, x, normed,
                    num_tokens, gemm_workspace);
        input = norm_input(&layer->mlp_norm, x, normed, num_tokens, hidden_size);
        if (layer->experts) add_experts(layer->experts, input, x, num_tokens, of_mlp, gemm_workspace);
        else add_mlp(layer, adapters, input, x, normed, num_tokens, of_mlp, gemm_workspace);
    }
}
