/* Greedy continuation: the likeliest next tokens of some sequences, one after the other, in one call.

   A small draft model computes a token in some ten microseconds. Between two tokens, Python takes several times as long. */

#include "kernels.h"
#include "team.h"

/* A token that is computed: its id, and its position in the sequence of a span. */
typedef struct { int64_t token_id, position, span; } step_token;

/* Write cosines and sines [head_dim] of a position, both halves alike, as transformers computes them. */
static void rotate_position(const language_model *model, int64_t position, scalar *cosines, scalar *sines) {
    const int64_t half = model->head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float angle = (float)position * model->frequencies[i];
        cosines[i] = cosines[half + i] = from_float(cosf(angle) * model->rotation_scale);
        sines[i] = sines[half + i] = from_float(sinf(angle) * model->rotation_scale);
    }
}

static int64_t position_of_largest(const scalar *logits, int64_t num_logits) {
    int64_t largest = 0;
    for (int64_t i = 1; i < num_logits; i++)
        if (to_float(logits[i]) > to_float(logits[largest])) largest = i;
    return largest;
}

/* Compute the keys and values of some tokens, and leave what the last layer gives in model->states. The tokens of a span
   follow each other, and spans are in their order. */
static void compute(const language_model *model, const slot_table *table, const token_span *spans,
                    const step_token *tokens, int64_t num_tokens) {
    int64_t slot_mapping[MAX_CONTINUED_TOKENS], num_sequences = 0, width = 0;
    int32_t query_starts[MAX_CONTINUED_TOKENS + 1], lengths[MAX_CONTINUED_TOKENS];
    for (int64_t t = 0; t < num_tokens; t++)
        if (tokens[t].position / table->block_size >= width) width = tokens[t].position / table->block_size + 1;
    for (int64_t t = 0; t < num_tokens; t++) {
        const int64_t position = tokens[t].position, token_id = tokens[t].token_id;
        const int32_t *blocks = table->block_tables + spans[tokens[t].span].slot * table->width;
        const int64_t known_id = token_id < model->num_embeddings ? token_id : model->num_embeddings - 1;
        memcpy(model->states + t * model->hidden_size, model->embeddings + known_id * model->hidden_size,
               model->hidden_size * sizeof(scalar));
        rotate_position(model, position, model->cosines + t * model->head_dim, model->sines + t * model->head_dim);
        slot_mapping[t] = blocks[position / table->block_size] * table->block_size + position % table->block_size;
        if (t == 0 || tokens[t].span != tokens[t - 1].span) {
            memcpy(model->block_table + num_sequences * width, blocks, width * sizeof *blocks);
            query_starts[num_sequences++] = (int32_t)t;
        }
        lengths[num_sequences - 1] = (int32_t)position + 1;
    }
    query_starts[num_sequences] = (int32_t)num_tokens;
    const attention_metadata metadata = {num_tokens, slot_mapping, num_sequences, query_starts, lengths,
                                         model->block_table, width};
    const rotation rotation = {model->cosines, model->sines, model->head_dim};
    decode_layers(model->layers, model->pages, model->num_layers, &metadata, NULL, &rotation, model->states,
                  model->workspace, model->gemm_workspace);
}

/* Choose the likeliest token after each of these rows of model->states. */
static void choose(const language_model *model, const int64_t *rows, int64_t num_rows, int64_t *chosen) {
    scalar *const normed = model->workspace;
    for (int64_t i = 0; i < num_rows; i++)
        rms_norm(model->states + rows[i] * model->hidden_size, model->last_norm, NULL, normed + i * model->hidden_size,
                 1, model->hidden_size, model->last_norm_epsilon);
    model->head->multiply(model->head, normed, NULL, model->logits, num_rows, model->gemm_workspace);
    for (int64_t i = 0; i < num_rows; i++)
        chosen[i] = position_of_largest(model->logits + i * model->head->num_outputs, model->num_choices);
}

void continue_greedily(const language_model *model, const slot_table *table, const token_span *spans, int64_t num_spans,
                       int64_t *drafts, int64_t drafts_width) {
    step_token tokens[MAX_CONTINUED_TOKENS] = {};
    int64_t rows[MAX_CONTINUED_TOKENS], chosen[MAX_CONTINUED_TOKENS], num_tokens = 0, num_drafting = 0;
    const int is_small = model->largest_weight < MIN_WEIGHT_FOR_THREADS;
    if (is_small) pause_team();
    for (int64_t s = 0; s < num_spans; s++) {
        const int32_t *token_ids = table->token_ids + spans[s].slot * table->row_length;
        for (int64_t position = spans[s].start; position < spans[s].stop; position++)
            tokens[num_tokens++] = (step_token){token_ids[position], position, s};
        if (spans[s].num_drafts) rows[num_drafting++] = num_tokens - 1; /* those with most drafts come first */
    }
    compute(model, table, spans, tokens, num_tokens);
    for (int64_t round = 0; num_drafting; round++) {
        choose(model, rows, num_drafting, chosen);
        for (int64_t s = 0; s < num_drafting; s++) drafts[s * drafts_width + round] = chosen[s];
        while (num_drafting && spans[num_drafting - 1].num_drafts <= round + 1) num_drafting--;
        for (int64_t s = 0; s < num_drafting; s++) {
            tokens[s] = (step_token){chosen[s], spans[s].stop + round, s};
            rows[s] = s;
        }
        if (num_drafting) compute(model, table, spans, tokens, num_drafting);
    }
    if (is_small) resume_team();
}
