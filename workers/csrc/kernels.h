/* Every function that workers/ calls through ctypes, and the structs that it passes.

   bindings.py repeats these structs and prototypes for ctypes: change both together. All C files include this header, so
   the compiler checks that calls, prototypes and definitions agree.

   Arrays are dense and row-major unless a stride is given. Strides count scalars. */

#ifndef SERVEKIT_KERNELS_H
#define SERVEKIT_KERNELS_H

#include "vectors.h"

/* -- attention over KV pages (paged_attention.c, tiled_attention.c) --------------------------------------------- */

enum { MAX_HEAD_DIM = 512 }; /* MAX_HEAD_DIM in bindings.py is the same number */

/* What pages hold: scalars, or codes (kv_codes.h). bindings.py has the same numbers. */
enum { PLAIN_PAGES = 0, INT8_PAGES = 1, FLOAT8_PAGES = 2 };

/* How one layer attends. It is the same for all steps. */
typedef struct {
    int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size;
    int64_t window;       /* the number of keys a query sees, itself included; 0: all of them */
    const float *sinks;   /* [num_heads] scores that take probability and have no value; NULL: none */
    float scale, softcap; /* softcap 0: none */
    int64_t page_format;
    const float *key_scales, *value_scales; /* [num_kv_heads] scales of codes; NULL: each vector has its own */
} attention_params;

/* The pages of one layer. paged_attention.c describes their layout. */
typedef struct {
    const attention_params *params;
    uint8_t *keys, *values;
} layer_pages;

/* The sequences of one step. It is the same for all layers. Sequence s owns the tokens from query_starts[s] to
   query_starts[s + 1]. Its last query sees lengths[s] keys, itself included, in the blocks block_table[s, :]. */
typedef struct {
    int64_t num_tokens;
    const int64_t *slot_mapping; /* [num_tokens] where to store each token's key and value; negative: nowhere */
    int64_t num_sequences;
    const int32_t *query_starts; /* [num_sequences + 1] */
    const int32_t *lengths;      /* [num_sequences] */
    const int32_t *block_table;  /* [num_sequences, table_width] */
    int64_t table_width;
} attention_metadata;

/* Store keys [num_tokens, num_kv_heads, key_dim] and values [num_tokens, num_kv_heads, value_dim] in the pages, then
   attend with queries [num_tokens, num_heads, key_dim]. Each stride is from token to token; the heads of a token are
   dense. output: [num_tokens, num_heads, value_dim]. */
void store_and_attend(const layer_pages *pages, const attention_metadata *metadata, const scalar *queries,
                      int64_t query_stride, const scalar *keys, int64_t key_stride, const scalar *values,
                      int64_t value_stride, scalar *output);

/* By how much heads are rotated. The first `dim` dimensions of each head are; the others stay as they are. */
typedef struct {
    const scalar *cosines, *sines; /* [num_tokens, dim], both halves alike */
    int64_t dim;
} rotation;

/* RMS norms of queries and keys before they are rotated. */
typedef struct {
    const float *query, *key; /* [key_dim], or [heads, key_dim] if spans_heads; NULL: none */
    float epsilon;
    int64_t spans_heads; /* all heads of a token have one norm together (OLMo 2), and not one each */
} head_norms;

/* The same for qkv [num_tokens, num_heads + 2 * num_kv_heads, key_dim]. Queries and keys are first normalised and
   rotated. Overwrites the queries and keys in qkv. */
void rotate_store_and_attend(const layer_pages *pages, const attention_metadata *metadata, scalar *qkv,
                             const rotation *rotation, const head_norms *norms, scalar *output);

/* Whether AMX tiles compute attention of prompts in such a layer. The first call asks Linux for permission. */
int64_t attention_uses_tiles(const attention_params *params);

/* Say whether attention may use tiles, in all layers of the process. It may until this is called. */
void let_attention_use_tiles(int64_t may_use);

/* -- elementwise layers (layers.c) -------------------------------------------------------------------------------- */

/* x / rms(x) * weight + residual for x [num_rows, size]; size is a multiple of LANES. residual may be NULL or `output`.
   Zhang and Sennrich, 2019, "Root Mean Square Layer Normalization". */
void rms_norm(const scalar *x, const float *weight, const scalar *residual, scalar *output, int64_t num_rows,
              int64_t size, float epsilon);

/* silu(gate) * up [num_rows, size] for gate_up [num_rows, 2 * size], which holds the gates first; size is a multiple of
   LANES. Shazeer, 2020, "GLU Variants Improve Transformer". */
void swiglu(const scalar *gate_up, scalar *output, int64_t num_rows, int64_t size);

/* The same with gelu in place of silu, approximated by tanh. Hendrycks and Gimpel, 2016, "Gaussian Error Linear Units". */
void geglu(const scalar *gate_up, scalar *output, int64_t num_rows, int64_t size);

/* gate * sigmoid(1.702 gate) * (up + 1), as gpt-oss has it: gates are 7 at most, and ups between -7 and 7. */
void clamped_swiglu(const scalar *gate_up, scalar *output, int64_t num_rows, int64_t size);

/* -- weights ------------------------------------------------------------------------------------------------------ */

/* Outputs are multiplied in strips: two vectors, or one row of AMX tiles. */
enum { STRIP = 2 * LANES };

/* A weight [num_outputs, num_inputs], in a layout that `multiply` reads. The struct of every kind of weight begins with
   this one. The strips of a thread follow each other in `data`, each strip_bytes long. */
typedef struct prepared_weight {
    /* output [num_rows, num_outputs] = x [num_rows, num_inputs] W' + bias + residual. residual may be NULL or `output`.
       workspace is for intermediate results, see the functions below. */
    void (*multiply)(const struct prepared_weight *weight, const scalar *x, const scalar *residual, scalar *output,
                     int64_t num_rows, void *workspace);
    const uint8_t *data;
    const scalar *bias; /* [num_outputs]; NULL: none */
    int64_t num_inputs, num_outputs, strip_bytes;
    const struct prepared_weight *next; /* the weight that is multiplied after this one, to be prefetched; NULL: none */
} prepared_weight;

/* -- skinny GEMM (skinny_gemm.c) ---------------------------------------------------------------------------------- */

/* A weight in oneDNN's layout, see skinny_gemm.c. */
typedef struct {
    prepared_weight base;
    int64_t block_width;
} packed_weight;

/* The largest number of rows that skinny_gemm takes on this processor; 0: none, and the functions below do not exist.
   The first call asks Linux for the right to use AMX tiles. */
int64_t skinny_gemm_max_rows(void);

/* The width of the blocks of weights that skinny_gemm multiplies by any number of rows, by blocked_gemm; 0: none. Call
   skinny_gemm_max_rows first. */
int64_t blocked_gemm_block_width(void);

/* The width of the blocks in which `packed` (num_bytes long) holds weight [num_outputs, num_inputs]; 0 if its layout is
   one that skinny_gemm cannot read. */
int64_t packed_block_width(const scalar *weight, const scalar *packed, int64_t num_outputs, int64_t num_inputs,
                           int64_t num_bytes);

/* `multiply` of a packed_weight. It uses no workspace. */
void skinny_gemm(const prepared_weight *weight, const scalar *x, const scalar *residual, scalar *output,
                 int64_t num_rows, void *workspace);

/* The same for any number of rows of bfloat16, by vectors, if the weight's blocks are BLOCKED_GEMM_WIDTH wide
   (blocked_gemm.c). */
enum { BLOCKED_GEMM_WIDTH = 4 * LANES };
void blocked_gemm(const prepared_weight *weight, const scalar *x, const scalar *residual, scalar *output,
                  int64_t num_rows, void *workspace);

/* -- compact weights (compact_panels.c) ---------------------------------------------------------------------------- */

/* Write weight [num_outputs, num_inputs] into `data` as compact panels, BLOCKED_GEMM_WIDTH outputs each, which begin every
   panel_bytes; a multiple of 64. num_inputs is even. Returns the bytes that the largest panel takes; 0 if that is more
   than panel_bytes, if there is no memory for it, or if this processor has no use for it. Call skinny_gemm_max_rows first. */
int64_t write_compact_panels(const scalar *weight, int64_t num_outputs, int64_t num_inputs, int64_t panel_bytes,
                             uint8_t *data);

/* `multiply` of a prepared_weight that is compact, for any number of rows (blocked_gemm.c). Its strips are half a panel. */
void compact_gemm(const prepared_weight *weight, const scalar *x, const scalar *residual, scalar *output,
                  int64_t num_rows, void *workspace);

/* -- quantized GEMM (quantized_gemm.c) ---------------------------------------------------------------------------- */

/* How a weight's codes are multiplied. Codes of weights that are multiplied by int8, and those of five and six bits,
   stand for code - zero_point. Those of four bits that are multiplied by floats stand for levels[code]. KERNELS in
   quantized_gemm.py has the same order. */
enum { INT4_BY_INT8, INT8_BY_INT8, INT4_BY_FLOAT, INT8_BY_FLOAT, FLOAT8_BY_FLOAT, INT5_BY_FLOAT, INT6_BY_FLOAT };

/* How scales and offsets are stored: as numbers; as the exponents of powers of two, one byte each; as multiples of the
   scale, one signed byte each; as signed bytes that are multiples of a float16 for super_block_groups groups; or one
   number for all outputs of a strip. NUMBER_TYPES in quantized_gemm.py has the same order. */
enum { NO_NUMBERS, AS_FLOAT32, AS_FLOAT16, AS_BFLOAT16, AS_EXPONENTS, AS_MULTIPLES, AS_PRODUCTS, AS_ONE_FLOAT32 };

/* A quantized weight; its layout: see quantized_gemm.c. group_size is a multiple of LANES. */
typedef struct {
    prepared_weight base;
    int64_t kernel, group_size, scale_type, offset_type, super_block_groups, zero_point;
    const float *levels;        /* [16] */
    const int32_t *input_order; /* [num_inputs] the input of each column; NULL: their own order */
} quantized_weight;

/* The bytes of workspace that quantized_gemm needs for each row, up to 128 rows; more rows share it. */
int64_t quantized_gemm_workspace_bytes(const quantized_weight *weight);

/* `multiply` of a quantized_weight, for any number of rows. */
void quantized_gemm(const prepared_weight *weight, const scalar *x, const scalar *residual, scalar *output,
                    int64_t num_rows, void *workspace);

/* -- LoRA (lora.c) ------------------------------------------------------------------------------------------------ */

enum { LORA_RUN_ROWS = 16 }; /* LORA_RUN_ROWS in bindings.py is the same number */

/* What one adapter adds to some outputs of a weight, in the layout that lora.c describes. num_outputs is a multiple of
   LANES. */
typedef struct {
    const scalar *a; /* [rank, num_inputs] in strips */
    const scalar *b; /* [num_outputs, rank] in strips, with the adapter's scale */
    int64_t rank;    /* a multiple of LANES; 0: nothing */
    int64_t first_output, num_outputs;
} lora_part;

/* What all adapters add to a weight. num_inputs is a multiple of LANES. The parts' outputs follow each other. */
typedef struct {
    int64_t num_inputs, num_outputs, num_parts;
    const lora_part *parts; /* [num_places, num_parts] */
} lora_weight;

/* Some rows, up to LORA_RUN_ROWS, that have the adapter in `place`. */
typedef struct {
    int64_t first, num_rows, place; /* first: in the `rows` of a lora_step */
} lora_run;

/* The rows of one step that have adapters. */
typedef struct {
    const int64_t *rows;  /* [num_rows] their indices in the step, in order of their places */
    const lora_run *runs; /* [num_runs] all of these rows, in the same order */
    int64_t num_runs, max_rank; /* max_rank: a multiple of LANES */
    scalar *hidden; /* [num_rows, num_parts of the weight that has most, max_rank] for intermediate results */
} lora_step;

/* Add what the adapters of a step's rows give for x [num_rows, num_inputs] to output [num_rows, num_outputs]. */
void add_lora(const lora_weight *weight, const lora_step *step, const scalar *x, scalar *output);

/* -- a whole decoder (decoder.c) ---------------------------------------------------------------------------------- */

/* Weights with the same input, whose outputs are side by side. `data` and `strip_bytes` are not used: the parts prefetch
   each other. */
typedef struct {
    prepared_weight base;
    int64_t num_parts;
    const prepared_weight *const *parts; /* [num_parts] */
} side_by_side_weight;

/* `multiply` of a side_by_side_weight, without a residual. The workspace is that of the part that needs most, and the
   outputs in addition. */
void multiply_side_by_side(const prepared_weight *weight, const scalar *x, const scalar *residual, scalar *output,
                           int64_t num_rows, void *workspace);

/* A gated linear unit between two multiplications: swiglu or another with the same arguments. */
typedef void (*gate_function)(const scalar *gate_up, scalar *output, int64_t num_rows, int64_t size);

/* The experts of a layer, and the router that chooses num_chosen of them for each token, of which each gets a share by the
   softmax of the scores. */
typedef struct {
    const float *router, *router_bias; /* [num_experts, hidden_size] and [num_experts]; the bias may be NULL */
    const prepared_weight *const *gate_up, *const *down; /* [num_experts] */
    int64_t num_experts, num_chosen;
    int64_t normalizes; /* the shares of a token's experts are one together, and not those of all experts */
    int64_t max_rows;   /* that all weights multiply at once */
    gate_function gate;
    const prepared_weight *shared_gate_up, *shared_down; /* an expert of all tokens; NULL: there is none */
    const float *shared_router; /* [hidden_size]: of that expert, a token gets the sigmoid of its score */
    int64_t workspace_bytes;    /* for each row */
} experts;

/* output [num_rows, hidden_size] += experts(x [num_rows, hidden_size]). */
void add_experts(const experts *experts, const scalar *x, scalar *output, int64_t num_rows, void *workspace,
                 void *gemm_workspace);

/* An RMS norm. */
typedef struct {
    const float *weight; /* [hidden_size]; NULL: nothing is normalised */
    float epsilon;
} norm;

/* One layer: x += attention(x), then x += mlp(x). Each of the two may have a norm of its input, and one of what it adds. */
typedef struct {
    const prepared_weight *qkv, *output, *gate_up, *down; /* the last two are NULL in layers with experts */
    norm attention_norm, attention_output_norm, mlp_norm, mlp_output_norm;
    head_norms head_norms;
    int64_t rotation; /* its number among those of the step */
    gate_function gate;
    const experts *experts; /* in place of an MLP of all tokens; NULL: there are none */
    const lora_weight *qkv_lora, *output_lora, *gate_up_lora, *down_lora; /* NULL: no adapter has a place */
} decoder_layer;

/* Run num_layers layers on x [num_tokens, hidden_size], in place. rotations are those that any layer has. adapters is
   NULL if no row has one; if some row has one, every layer has the four lora_weights. workspace holds num_tokens times
   the scalars that the input of attention or of an MLP takes, and the other results of either, whichever are more, in the
   largest layer; gemm_workspace holds what the weights' multiplications need. */
void decode_layers(const decoder_layer *layers, const layer_pages *pages, int64_t num_layers,
                   const attention_metadata *metadata, const lora_step *adapters, const rotation *rotations, scalar *x,
                   scalar *workspace, void *gemm_workspace);

/* -- a whole model (language_model.c) ------------------------------------------------------------------------------ */

enum { MAX_STEP_TOKENS = 32 }; /* MAX_STEP_TOKENS in bindings.py is the same number */

/* A model of the Llama family with its pages, and memory for the intermediate results of MAX_STEP_TOKENS tokens. */
typedef struct {
    const decoder_layer *layers;
    const layer_pages *pages;
    int64_t num_layers, hidden_size, rotary_dim;
    const scalar *embeddings; /* [num_embeddings, hidden_size]; larger ids are read as the last one */
    int64_t num_embeddings;
    const scalar *all_cosines, *all_sines; /* [number of positions, rotary_dim], both halves alike */
    const float *last_norm;
    const prepared_weight *head;
    int64_t num_choices; /* the first so many outputs of the head are tokens that may be chosen */
    int64_t largest_weight; /* how many numbers it has */
    scalar *states;          /* [MAX_STEP_TOKENS, hidden_size] */
    scalar *cosines, *sines; /* [MAX_STEP_TOKENS, rotary_dim] */
    scalar *logits;          /* [MAX_STEP_TOKENS, num_outputs of the head] */
    int32_t *block_table;    /* [MAX_STEP_TOKENS, width of the slot table] */
    scalar *workspace;       /* as of decode_layers, and at least as large as states */
    void *gemm_workspace;    /* as of decode_layers, and what the head's multiplication needs */
    float last_norm_epsilon;
} language_model;

/* The tokens and blocks of all slots. */
typedef struct {
    int32_t *token_ids;          /* [num_slots, row_length] */
    const int32_t *block_tables; /* [num_slots, width] */
    int64_t row_length, width, block_size;
} slot_table;

/* Positions [start, stop) of a slot's sequence, and how many tokens are chosen. */
typedef struct {
    int64_t slot, start, stop, num_chosen;
} token_span;

/* Compute the spans, which together have at most MAX_STEP_TOKENS tokens. model->logits gets those of the last num_chosen
   tokens of each span. adapters: as for decode_layers. chosen: NULL, or as many numbers: they get the likeliest token
   after each of these tokens. The table gets it, too, at the position after that token. */
void compute_step(const language_model *model, const slot_table *table, const lora_step *adapters, const token_span *spans,
                  int64_t num_spans, int64_t *chosen);

/* Compute the spans, which together have at most MAX_STEP_TOKENS tokens and are in descending order of num_chosen.
   Then choose the likeliest token after each, compute it, and so on. All but the last of the chosen tokens have keys and
   values afterwards. drafts: [num_spans, drafts_width], the first num_chosen of each row are written. */
void continue_greedily(const language_model *model, const slot_table *table, const token_span *spans, int64_t num_spans,
                       int64_t *drafts, int64_t drafts_width);

/* -- threads (team.c) --------------------------------------------------------------------------------------------- */

/* Call this before a step that decode_layers does not run: all threads compute until its next multiplication. See team.c. */
void use_all_threads(void);

#endif
