/* All layers of a decoder of the Llama family, with weights of any kind.

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

void decode_layers(const decoder_layer *layers, const layer_pages *pages, int64_t num_layers,
                   const attention_metadata *metadata, const lora_step *adapters, const scalar *cosines,
                   const scalar *sines, scalar *x, scalar *workspace, void *gemm_workspace) {
    const int64_t num_tokens = metadata->num_tokens;
    for (int64_t i = 0; i < num_layers; i++) {
        const decoder_layer *layer = layers + i;
        const prepared_weight *to_qkv = layer->qkv, *to_output = layer->output;
        const prepared_weight *to_gate_up = layer->gate_up, *down = layer->down;
        const int64_t hidden_size = to_qkv->num_inputs, inner_size = down->num_inputs;
        scalar *normed = workspace;
        scalar *qkv = normed + num_tokens * hidden_size;
        scalar *attended = qkv + num_tokens * to_qkv->num_outputs;
        scalar *gate_up = attended + num_tokens * to_output->num_inputs;
        scalar *activated = gate_up + num_tokens * 2 * inner_size;
        rms_norm(x, layer->attention_norm, normed, num_tokens, hidden_size, layer->attention_epsilon);
        to_qkv->multiply(to_qkv, normed, NULL, qkv, num_tokens, gemm_workspace);
        if (adapters) add_lora(layer->qkv_lora, adapters, normed, qkv);
        rotate_store_and_attend(pages + i, metadata, qkv, cosines, sines, layer->query_norm, layer->key_norm,
                                layer->head_epsilon, attended);
        to_output->multiply(to_output, attended, x, x, num_tokens, gemm_workspace);
        if (adapters) add_lora(layer->output_lora, adapters, attended, x);
        rms_norm(x, layer->mlp_norm, normed, num_tokens, hidden_size, layer->mlp_epsilon);
        to_gate_up->multiply(to_gate_up, normed, NULL, gate_up, num_tokens, gemm_workspace);
        if (adapters) add_lora(layer->gate_up_lora, adapters, normed, gate_up);
        swiglu(gate_up, activated, num_tokens, inner_size);
        down->multiply(down, activated, x, x, num_tokens, gemm_workspace);
        if (adapters) add_lora(layer->down_lora, adapters, activated, x);
    }
}
