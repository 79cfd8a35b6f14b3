/* All layers of a decoder of the Llama family, with weights of any kind.

   They run in one call. Between two calls, Python takes longer than an OpenMP thread spins before it sleeps (some
   microseconds), and to wake a thread takes longer than to multiply. */

#include <stddef.h>

#include "kernels.h"

void decode_layers(const decoder_layer *layers, const layer_pages *pages, int64_t num_layers,
                   const attention_metadata *metadata, const scalar *cosines, const scalar *sines, scalar *x,
                   scalar *workspace, void *gemm_workspace) {
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
        rotate_store_and_attend(pages + i, metadata, qkv, cosines, sines, layer->query_norm, layer->key_norm,
                                layer->head_epsilon, attended);
        to_output->multiply(to_output, attended, x, x, num_tokens, gemm_workspace);
        rms_norm(x, layer->mlp_norm, normed, num_tokens, hidden_size, layer->mlp_epsilon);
        to_gate_up->multiply(to_gate_up, normed, NULL, gate_up, num_tokens, gemm_workspace);
        swiglu(gate_up, activated, num_tokens, inner_size);
        down->multiply(down, activated, x, x, num_tokens, gemm_workspace);
    }
}
