/* A whole model: from the tokens of a slot table to logits, and to the likeliest tokens, in one call.

   Between two operations, Python takes some ten microseconds, and its code and data have left the caches while the
   weights were read. A small draft model computes a token in as long as that. */

#include "kernels.h"
#include "team.h"

/* A token that is computed: its id, and its position in the sequence of a span. */
typedef struct { int64_t token_id, position, span; } step_token;

/* Copy the cosines and sines of a position to those of token number t. */
static void rotate_position(const language_model *model, int64_t position, int64_t t) {
    const int64_t dim = model->rotary_dim;
    memcpy(model->cosines + t * dim, model->all_cosines + position * dim, dim * sizeof(scalar));
    memcpy(model->sines + t * dim, model->all_sines + position * dim, dim * sizeof(scalar));
}

/* The first of the largest logits, as torch's argmax finds it. */
static int64_t position_of_largest(const scalar *logits, int64_t num_logits) {
    const int64_t num_in_vectors = num_logits / LANES * LANES;
    floats largest_in_lanes = (floats){} - INFINITY;
    for (int64_t i = 0; i < num_in_vectors; i += LANES) largest_in_lanes = larger(load(logits + i), largest_in_lanes);
    float largest = max_of_lanes(largest_in_lanes);
    for (int64_t i = num_in_vectors; i < num_logits; i++)
        if (to_float(logits[i]) > largest) largest = to_float(logits[i]);
    for (int64_t i = 0; i < num_logits; i++)
        if (to_float(logits[i]) == largest) return i;
    return 0; /* only where a logit is not a number */
}

/* Lay out the tokens of all spans one after the other. Returns how many tokens there are. */
static int64_t lay_out(const slot_table *table, const token_span *spans, int64_t num_spans, step_token *tokens) {
    int64_t num_tokens = 0;
    for (int64_t s = 0; s < num_spans; s++) {
        const int32_t *token_ids = table->token_ids + spans[s].slot * table->row_length;
        for (int64_t position = spans[s].start; position < spans[s].stop; position++)
            tokens[num_tokens++] = (step_token){token_ids[position], position, s};
    }
    return num_tokens;
}

/* Compute the keys and values of some tokens, and leave what the last layer gives in model->states. The tokens of a span
   follow each other, and spans are in their order. */
static void compute(const language_model *model, const slot_table *table, const token_span *spans,
                    const lora_step *adapters, const step_token *tokens, int64_t num_tokens) {
    int64_t slot_mapping[MAX_STEP_TOKENS], num_sequences = 0, width = 0;
    int32_t query_starts[MAX_STEP_TOKENS + 1], lengths[MAX_STEP_TOKENS];
    for (int64_t t = 0; t < num_tokens; t++)
        if (tokens[t].position / table->block_size >= width) width = tokens[t].position / table->block_size + 1;
    for (int64_t t = 0; t < num_tokens; t++) {
        const int64_t position = tokens[t].position, token_id = tokens[t].token_id;
        const int32_t *blocks = table->block_tables + spans[tokens[t].span].slot * table->width;
        const int64_t known_id = token_id < model->num_embeddings ? token_id : model->num_embeddings - 1;
        memcpy(model->states + t * model->hidden_size, model->embeddings + known_id * model->hidden_size,
               model->hidden_size * sizeof(scalar));
        rotate_position(model, position, t);
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
    const rotation rotation = {model->cosines, model->sines, model->rotary_dim};
    decode_layers(model->layers, model->pages, model->num_layers, &metadata, adapters, &rotation, model->states,
                  model->workspace, model->gemm_workspace);
}

/* Compute the logits of these rows of model->states. */
static void compute_logits(const language_model *model, const int64_t *rows, int64_t num_rows) {
    scalar *const normed = model->workspace;
    for (int64_t i = 0; i < num_rows; i++)
        rms_norm(model->states + rows[i] * model->hidden_size, model->last_norm, NULL, normed + i * model->hidden_size,
                 1, model->hidden_size, model->last_norm_epsilon);
    model->head->multiply(model->head, normed, NULL, model->logits, num_rows, model->gemm_workspace);
}

/* Choose the likeliest token of each of the first rows of model->logits. */
static void choose(const language_model *model, int64_t num_rows, int64_t *chosen) {
    for (int64_t i = 0; i < num_rows; i++)
        chosen[i] = position_of_largest(model->logits + i * model->head->num_outputs, model->num_choices);
}

void compute_step(const language_model *model, const slot_table *table, const lora_step *adapters, const token_span *spans,
                  int64_t num_spans, int64_t *chosen) {
    step_token tokens[MAX_STEP_TOKENS];
    int64_t rows[MAX_STEP_TOKENS], num_rows = 0;
    const int64_t num_tokens = lay_out(table, spans, num_spans, tokens);
    compute(model, table, spans, adapters, tokens, num_tokens);
    for (int64_t t = 0; t < num_tokens; t++) {
        const token_span *span = spans + tokens[t].span;
        if (tokens[t].position >= span->stop - span->num_chosen) rows[num_rows++] = t;
    }
    if (num_rows) compute_logits(model, rows, num_rows);
    if (!chosen) return;
    choose(model, num_rows, chosen);
    for (int64_t i = 0; i < num_rows; i++) {
        const step_token *token = tokens + rows[i];
        table->token_ids[spans[token->span].slot * table->row_length + token->position + 1] = (int32_t)chosen[i];
    }
}

void continue_greedily(const language_model *model, const slot_table *table, const token_span *spans, int64_t num_spans,
                       int64_t *drafts, int64_t drafts_width) {
    step_token tokens[MAX_STEP_TOKENS];
    int64_t rows[MAX_STEP_TOKENS], chosen[MAX_STEP_TOKENS], num_drafting = 0;
    const int is_small = model->largest_weight < MIN_WEIGHT_FOR_THREADS;
    if (is_small) pause_team();
    const int64_t num_tokens = lay_out(table, spans, num_spans, tokens);
    compute(model, table, spans, NULL, tokens, num_tokens);
    for (int64_t t = 0; t < num_tokens; t++) {
        const token_span *span = spans + tokens[t].span;
        if (span->num_chosen && tokens[t].position == span->stop - 1) rows[num_drafting++] = t;
    }
    for (int64_t round = 0; num_drafting; round++) { /* the spans that choose most tokens come first */
        compute_logits(model, rows, num_drafting);
        choose(model, num_drafting, chosen);
        for (int64_t s = 0; s < num_drafting; s++) drafts[s * drafts_width + round] = chosen[s];
        while (num_drafting && spans[num_drafting - 1].num_chosen <= round + 1) num_drafting--;
        for (int64_t s = 0; s < num_drafting; s++) {
            tokens[s] = (step_token){chosen[s], spans[s].stop + round, s};
            rows[s] = s;
        }
        if (num_drafting) compute(model, table, spans, NULL, tokens, num_drafting);
    }
    if (is_small) resume_team();
}
