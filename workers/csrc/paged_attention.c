/* Attention over KV pages on a CPU, for any mixture of prompt chunks and single tokens in one step.

   Nothing is gathered. Each key and value is read in place: in a decode step once for up to eight query rows, and in a
   prompt once for MAX_PROMPT_ROWS (eight over codes). The softmax is computed online (online_softmax.h). The query
   heads that share a key head are further query rows of it. On processors with AMX, tiled_attention.c computes prompts.

   The layout of the pages is the one that the multiplications read: tiles of sixteen tokens of one head,

       keys    [num_blocks, num_kv_heads, tiles, key_dim / PACK, 16 tokens, PACK]
       values  [num_blocks, num_kv_heads, tiles, 16 / PACK tokens, value_dim, PACK]

   A vector of keys is multiplied by one number (bfloat16: one pair) of a query, and a vector of values by one weight
   (one pair). So sums stay in their lanes, and no instruction adds across lanes. Dimensions are padded to sixteen, and
   cells that were never written are zero. A block of fewer than sixteen tokens has one tile that is partly used.

   Pages of one byte per number (kv_codes.h) have tiles of another layout: sixteen scales, one for each token, and then
   lines of 64 codes. A line is what four multiplications of pairs read, two of keys or two of values,

       keys    scales [16 tokens], codes [key_dim / 4 lines, 2 pairs of dimensions x 16 tokens]
       values  scales [16 tokens], codes [value_dim / 16, 16 / 4 lines, 2 pairs of tokens x 16 dimensions]

   so a tile is read from its first byte to its last. Codes are decoded once for all rows of a query group. A key's scale
   multiplies its scores, and a value's scale its weights: one vector for each row and tile.

   This is plain C with OpenMP and, where the processor has them, a few intrinsics. It includes no header of torch, so
   it compiles in seconds. */

#include <omp.h>
#include <stddef.h>

#include "kernels.h"
#include "kv_codes.h"
#include "online_softmax.h"
#include "products.h"
#include "query_group.h"

/* A prompt's rows are computed PROMPT_ROWS at a time, so that all sums stay in registers; with SCORES_STRIPS, for all
   tiles of a strip together. MAX_PROMPT_ROWS rows read a strip while it is in the first-level cache. */
#ifdef __AVX512F__
enum { PROMPT_ROWS = 6, SCORES_STRIPS = 1 };
#else
enum { PROMPT_ROWS = MAX_ROWS, SCORES_STRIPS = 0 };
#endif
enum { MAX_PROMPT_ROWS = 4 * PROMPT_ROWS };
enum { MAX_DECODE_QUERIES = 16 }; /* a token and its drafts; more of them are a prompt chunk */

/* How many vectors of values are multiplied at once by the weights of num_rows rows. Without AVX-512, GCC keeps the
   sums of more than one in memory, which takes four times as long. */
static inline int value_vectors(int num_rows) { return !SCORES_STRIPS ? 1 : num_rows <= 6 ? 4 : 2; }

static inline floats multiply_add(floats sum, const scalar *values, packed value) {
    return add_products(sum, load_ints(values), value);
}

/* -- storing ----------------------------------------------------------------------------------------------------- */

static void store_scalars(const attention_params *params, scalar *keys, scalar *values, int64_t lane, const scalar *key,
                          const scalar *value) {
    scalar packs[MAX_HEAD_DIM];
    const int64_t num_packs = (params->key_dim + PACK - 1) / PACK;
    packs[num_packs * PACK - 1] = 0;
    for (int64_t d = 0; d < params->key_dim; d++) packs[d] = finite_or_zero(key[d]);
    for (int64_t p = 0; p < num_packs; p++) ((packed *)keys)[p * LANES + lane] = ((const packed *)packs)[p];
    const int64_t width = round_up_to_lanes(params->value_dim);
    values += lane / PACK * width * PACK + lane % PACK;
    for (int64_t d = 0; d < params->value_dim; d++) values[d * PACK] = finite_or_zero(value[d]);
}

static void store_codes(const attention_params *params, uint8_t *keys, uint8_t *values, int64_t head, int64_t lane,
                        const scalar *key, const scalar *value) {
    const int is_float8 = params->page_format == FLOAT8_PAGES;
    uint8_t codes[MAX_HEAD_DIM];
    const float key_scale = params->key_scales ? params->key_scales[head] : 0.0f;
    ((float *)keys)[lane] = encode_vector(codes, key, params->key_dim, key_scale, is_float8);
    keys += SCALES_BYTES;
    for (int64_t d = 0; d < params->key_dim; d++)
        keys[d / 4 * LINE_BYTES + place_in_line(d / 2 % 2, lane, d % 2)] = codes[d];
    const float value_scale = params->value_scales ? params->value_scales[head] : 0.0f;
    ((float *)values)[lane] = encode_vector(codes, value, params->value_dim, value_scale, is_float8);
    values += SCALES_BYTES + lane / 4 * LINE_BYTES;
    for (int64_t d = 0; d < params->value_dim; d++)
        values[d / LANES * VECTOR_BYTES + place_in_line(lane / 2 % 2, d % LANES, lane % 2)] = codes[d];
}

/* Store one token's key and value of one head in `slot`. A negative slot is ignored. Numbers that are not finite are
   stored as zero: attention multiplies masked cells by zero, and zero times infinity is NaN. */
static void store_head(const layer_pages *pages, int64_t head, int64_t slot, const scalar *key, const scalar *value) {
    if (slot < 0) return;
    const attention_params *params = pages->params;
    const int64_t tiles = round_up_to_lanes(params->block_size) / LANES;
    const int64_t block = slot / params->block_size, offset = slot % params->block_size, lane = offset % LANES;
    const int64_t tile = (block * params->num_kv_heads + head) * tiles + offset / LANES;
    uint8_t *keys = pages->keys + tile * tile_bytes(params, params->key_dim);
    uint8_t *values = pages->values + tile * tile_bytes(params, params->value_dim);
    if (params->page_format == PLAIN_PAGES) store_scalars(params, (scalar *)keys, (scalar *)values, lane, key, value);
    else store_codes(params, keys, values, head, lane, key, value);
}

/* Store the keys and values of a step. Each stride is from token to token. */
static void store_step(const layer_pages *pages, const attention_metadata *metadata, const scalar *keys,
                       int64_t key_stride, const scalar *values, int64_t value_stride) {
    const attention_params *params = pages->params;
#pragma omp parallel for if (metadata->num_tokens > 16)
    for (int64_t token = 0; token < metadata->num_tokens; token++)
        for (int64_t head = 0; head < params->num_kv_heads; head++)
            store_head(pages, head, metadata->slot_mapping[token], keys + token * key_stride + head * params->key_dim,
                       values + token * value_stride + head * params->value_dim);
}

/* 1 / rms of `size` numbers. */
static float norm_factor(const scalar *numbers, int64_t size, float epsilon) {
    float squares = 0.0f;
    for (int64_t i = 0; i < size; i++) squares += to_float(numbers[i]) * to_float(numbers[i]);
    return 1.0f / sqrtf(squares / (float)size + epsilon);
}

/* Multiply one head by `factor` and `weight` in place, if that is not NULL, and rotate the two halves of its first
   rotary_dim dimensions against each other, in the layout of transformers (Su et al., 2021, "RoFormer: Enhanced
   Transformer with Rotary Position Embedding"). */
static void norm_and_rotate(scalar *head, int64_t dim, const scalar *cosines, const scalar *sines, int64_t rotary_dim,
                            const float *weight, float factor) {
    float values[MAX_HEAD_DIM];
    for (int64_t d = 0; d < dim; d++) values[d] = to_float(head[d]);
    if (weight) {
        for (int64_t d = 0; d < dim; d++) values[d] *= factor * weight[d];
        for (int64_t d = rotary_dim; d < dim; d++) head[d] = from_float(values[d]);
    }
    for (int64_t low = 0, high = rotary_dim / 2; high < rotary_dim; low++, high++) {
        head[low] = from_float(values[low] * to_float(cosines[low]) - values[high] * to_float(sines[low]));
        head[high] = from_float(values[high] * to_float(cosines[high]) + values[low] * to_float(sines[high]));
    }
}

/* The same for all query heads, or all key heads, of token number `token`. weight: NULL without norms. */
static void norm_and_rotate_heads(scalar *heads, int64_t num_heads, int64_t dim, const rotation *rotation,
                                  int64_t token, const head_norms *norms, const float *weight) {
    const int64_t rotary_dim = rotation->dim;
    const scalar *cosines = rotation->cosines + token * rotary_dim, *sines = rotation->sines + token * rotary_dim;
    float factor = 1.0f;
    if (weight && norms->spans_heads) factor = norm_factor(heads, num_heads * dim, norms->epsilon);
    for (int64_t i = 0; i < num_heads; i++, heads += dim) {
        if (weight && !norms->spans_heads) factor = norm_factor(heads, dim, norms->epsilon);
        norm_and_rotate(heads, dim, cosines, sines, rotary_dim, weight, factor);
        if (weight && norms->spans_heads) weight += dim;
    }
}

/* Everything between the QKV product and attention in one pass: rotate the query and key heads of qkv
   [num_tokens, stride], and store keys and values. */
static void rotate_and_store(const layer_pages *pages, const attention_metadata *metadata, scalar *qkv, int64_t stride,
                             const rotation *rotation, const head_norms *norms) {
    const attention_params *params = pages->params;
    const int64_t dim = params->key_dim, num_kv_heads = params->num_kv_heads;
#pragma omp parallel for if (metadata->num_tokens > 3)
    for (int64_t token = 0; token < metadata->num_tokens; token++) {
        scalar *queries = qkv + token * stride, *keys = queries + params->num_heads * dim;
        const scalar *values = keys + num_kv_heads * dim;
        norm_and_rotate_heads(queries, params->num_heads, dim, rotation, token, norms, norms->query);
        norm_and_rotate_heads(keys, num_kv_heads, dim, rotation, token, norms, norms->key);
        for (int64_t i = 0; i < num_kv_heads; i++)
            store_head(pages, i, metadata->slot_mapping[token], keys + i * dim, values + i * dim);
    }
}

/* -- attention ---------------------------------------------------------------------------------------------------- */

/* Tiles are too short and too scattered for the hardware prefetcher. So while one tile is read, the next one is
   prefetched, cache line by cache line: if all lines were requested at once, the requests would queue, and the loads
   behind them would stall. Into the second-level cache, because the first is small. */
static inline void prefetch(const void *line) { __builtin_prefetch(line, 0, 1); }

/* Scores of `num_rows` queries against one tile of keys.

   num_rows is a constant wherever this is inlined, so that the sums stay in registers. There are two chains of sums,
   because each sum waits for the one before it. */
static inline __attribute__((always_inline)) void score_tile(floats *scores, const int num_rows, const uint8_t *tile,
                                                             const uint8_t *next_tile, const packed *queries,
                                                             int64_t num_packed) {
    const scalar *keys = (const scalar *)tile, *next_keys = (const scalar *)next_tile;
    floats even[MAX_ROWS], odd[MAX_ROWS];
    for (int r = 0; r < num_rows; r++) even[r] = odd[r] = (floats){};
    for (int64_t p = 0; p < num_packed; p += 2, keys += 2 * LANES * PACK, next_keys += 2 * LANES * PACK) {
        prefetch(next_keys);
        prefetch(next_keys + LANES * PACK);
        for (int r = 0; r < num_rows; r++) even[r] = multiply_add(even[r], keys, queries[r * num_packed + p]);
        for (int r = 0; r < num_rows; r++)
            odd[r] = multiply_add(odd[r], keys + LANES * PACK, queries[r * num_packed + p + 1]);
    }
    for (int r = 0; r < num_rows; r++) scores[r] = even[r] + odd[r];
}

/* The same for a tile of codes. queries: [num_rows, dim]. */
static inline __attribute__((always_inline)) void score_codes(floats *scores, const int num_rows,
                                                              const uint8_t *tile, const uint8_t *next_tile,
                                                              const scalar *queries, int64_t dim,
                                                              const decoder *decoder) {
    floats even[num_rows], odd[num_rows];
    for (int r = 0; r < num_rows; r++) even[r] = odd[r] = (floats){};
    const floats scales = *(const floats *)tile;
    prefetch(next_tile);
    for (int64_t d = 0; d < dim; d += 4) {
        tile += LINE_BYTES;
        next_tile += LINE_BYTES;
        prefetch(next_tile);
        decoded_pairs pairs[2];
        decode_line(pairs, tile, decoder);
        for (int r = 0; r < num_rows; r++) even[r] = multiply_add_pairs(even[r], pairs[0], queries + r * dim + d);
        for (int r = 0; r < num_rows; r++) odd[r] = multiply_add_pairs(odd[r], pairs[1], queries + r * dim + d + 2);
    }
    for (int r = 0; r < num_rows; r++) scores[r] = (even[r] + odd[r]) * scales;
}

/* Add `num_tiles` tiles of values times their weights to `width` vectors of each row's sum. The vectors begin at
   scalar `from` of a value's dimensions; `stride` is from one pack of tokens to the next. */
static inline __attribute__((always_inline)) void accumulate_values(
    floats *sums, int64_t sums_stride, const int num_rows, const int prefetches, const int width,
    const uint8_t *const *tiles, const uint8_t *const *next_tiles, int num_tiles, int64_t from, int64_t stride,
    const tile_weights (*weights)[STRIP_TILES]) {
    floats sum[MAX_ROWS][4];
    for (int r = 0; r < num_rows; r++)
        for (int w = 0; w < width; w++) sum[r][w] = sums[r * sums_stride + w];
    for (int t = 0; t < num_tiles; t++) {
        const scalar *values = (const scalar *)tiles[t] + from, *next_values = (const scalar *)next_tiles[t] + from;
        for (int p = 0; p < LANES / PACK; p++, values += stride, next_values += stride)
            for (int w = 0; w < width; w++) {
                if (prefetches) prefetch(next_values + w * LANES * PACK);
                for (int r = 0; r < num_rows; r++)
                    sum[r][w] = multiply_add(sum[r][w], values + w * LANES * PACK, weights[r][t][p]);
            }
    }
    for (int r = 0; r < num_rows; r++)
        for (int w = 0; w < width; w++) sums[r * sums_stride + w] = sum[r][w];
}

/* Add `num_tiles` tiles of values times their weights to one vector of each row's sum: to vector `w` of a value's
   dimensions. The weights include the scales of the values. */
static inline __attribute__((always_inline)) void accumulate_codes(
    floats *sums, int64_t sums_stride, const int num_rows, const uint8_t *const *tiles,
    const uint8_t *const *next_tiles, int num_tiles, int64_t w, const tile_weights (*weights)[STRIP_TILES],
    const decoder *decoder) {
    floats even[num_rows], odd[num_rows];
    for (int r = 0; r < num_rows; r++) {
        even[r] = sums[r * sums_stride];
        odd[r] = (floats){};
    }
    for (int t = 0; t < num_tiles; t++) {
        const uint8_t *codes = tiles[t] + SCALES_BYTES + w * VECTOR_BYTES;
        const uint8_t *next_codes = next_tiles[t] + SCALES_BYTES + w * VECTOR_BYTES;
        if (w == 0) prefetch(next_tiles[t]);
        for (int token = 0; token < LANES; token += 4, codes += LINE_BYTES, next_codes += LINE_BYTES) {
            prefetch(next_codes);
            decoded_pairs pairs[2];
            decode_line(pairs, codes, decoder);
            for (int r = 0; r < num_rows; r++) {
                const scalar *of_tokens = (const scalar *)weights[r][t] + token;
                even[r] = multiply_add_pairs(even[r], pairs[0], of_tokens);
                odd[r] = multiply_add_pairs(odd[r], pairs[1], of_tokens + 2);
            }
        }
    }
    for (int r = 0; r < num_rows; r++) sums[r * sums_stride] = even[r] + odd[r];
}

/* Attention of one query group: of a decode step, or of any step if the pages hold codes. `next` is the group that this
   thread computes afterwards, or NULL: its first keys and values are prefetched while the last ones of this group are
   read. num_rows: see score_tile. has_codes is a constant, too: whether the pages hold codes, and not scalars. */
static inline __attribute__((always_inline)) void attend_rows(const query_group *group, const query_group *next,
                                                              const int num_rows, const int has_codes) {
    const attention_params *params = group->params;
    const decoder decoder = make_decoder(params->page_format == FLOAT8_PAGES);
    const int64_t key_dim = round_up_to_lanes(params->key_dim), value_dim = round_up_to_lanes(params->value_dim);
    const int64_t num_packed = key_dim / PACK, width = value_dim / LANES;
    const float to_power = to_power_of(params);
    packed queries[num_rows * num_packed];
    floats sums[num_rows * width];
    row_softmax softmax[num_rows];
    for (int r = 0; r < num_rows; r++) {
        copy_query((scalar *)(queries + r * num_packed), group->query[r], params->key_dim);
        for (int64_t w = 0; w < width; w++) sums[r * width + w] = (floats){};
        softmax[r] = begin_softmax(params, group->sink[r]);
    }
    for (int r = 0; next && r < num_rows; r++) /* queries are far apart, so each one would be waited for */
        for (int64_t d = 0; d < params->key_dim; d += 64 / (int64_t)sizeof(scalar)) prefetch(next->query[r] + d);
    int64_t position = group->begin;
    place at = place_of(group, position);
    while (position < group->end) {
        floats scores[STRIP_TILES][MAX_ROWS];
        const uint8_t *keys[STRIP_TILES], *values[STRIP_TILES], *next_keys[STRIP_TILES], *next_values[STRIP_TILES];
        const int num_tiles = find_strip(group, position, at, keys, values);
        const int64_t next_position = position + STRIP_TILES * LANES;
        int num_next = 0;
        if (next_position < group->end)
            num_next = find_strip(group, next_position, place_of(group, next_position), next_keys, next_values);
        else if (next)
            num_next = find_strip(next, next->begin, place_of(next, next->begin), next_keys, next_values);
        for (; num_next < num_tiles; num_next++) { /* nothing left to prefetch: repeat what is in the cache already */
            next_keys[num_next] = keys[num_next];
            next_values[num_next] = values[num_next];
        }
        for (int t = 0; t < num_tiles; t++) {
            const int64_t num_tokens = tokens_of_tile(group, at);
            if (has_codes)
                score_codes(scores[t], num_rows, keys[t], next_keys[t], (const scalar *)queries, key_dim, &decoder);
            else score_tile(scores[t], num_rows, keys[t], next_keys[t], queries, num_packed);
            cap_and_mask(scores[t], num_rows, params, position, num_tokens, group->position);
            position += num_tokens;
            at = next_tile(group, at);
        }
        tile_weights weights[num_rows][STRIP_TILES];
        for (int r = 0; r < num_rows; r++)
            weigh(weights[r], softmax + r, sums + r * width, width, scores[0] + r, MAX_ROWS, num_tiles, to_power,
                  has_codes ? values : NULL);
        if (has_codes) {
            for (int64_t w = 0; w < width; w++)
                accumulate_codes(sums + w, width, num_rows, values, next_values, num_tiles, w, weights, &decoder);
            continue;
        }
        int64_t w = 0;
        const int wide = value_vectors(num_rows);
        for (; w + wide <= width; w += wide)
            accumulate_values(sums + w, width, num_rows, 1, wide, values, next_values, num_tiles,
                              w * LANES * PACK, value_dim * PACK, weights);
        for (; w < width; w++)
            accumulate_values(sums + w, width, num_rows, 1, 1, values, next_values, num_tiles,
                              w * LANES * PACK, value_dim * PACK, weights);
    }
    for (int r = 0; r < num_rows; r++)
        finish_row(group->output[r], sums + r * width, softmax[r].total, params->value_dim);
}

/* Make the number of rows a constant. Eight rows may be a decode step, with drafts or with a group of eight heads, or a
   part of a prompt chunk over codes. Over codes, five to seven rows are computed as eight: the last one several times. Each
   variant takes the compiler half a second. */
static inline __attribute__((always_inline)) void attend_group_over(const query_group *group, const query_group *next,
                                                                    const int has_codes) {
    switch (has_codes && group->num_rows > 4 ? MAX_ROWS : group->num_rows) {
        case 1: attend_rows(group, next, 1, has_codes); break;
        case 2: attend_rows(group, next, 2, has_codes); break;
        case 3: attend_rows(group, next, 3, has_codes); break;
        case 4: attend_rows(group, next, 4, has_codes); break;
        case 5: if (!has_codes) attend_rows(group, next, 5, 0); break;
        case 6: if (!has_codes) attend_rows(group, next, 6, 0); break;
        case 7: if (!has_codes) attend_rows(group, next, 7, 0); break;
        default:
            attend_rows(group, next, MAX_ROWS, has_codes);
    }
}

/* Scores of PROMPT_ROWS queries against num_tiles tiles, a constant. A pair of a query is loaded once for all tiles: a
   processor that starts two multiplications in a cycle does not load a pair for each of them. Each score has one chain
   of sums, whatever the number of tiles: that depends on where the chunk ends, and the scores must not. */
INLINE void score_tiles(floats (*scores)[MAX_ROWS], const int num_tiles, const uint8_t *const *tiles,
                        const packed *queries, int64_t num_packed) {
    floats sum[PROMPT_ROWS][STRIP_TILES];
#pragma GCC unroll 8
    for (int r = 0; r < PROMPT_ROWS; r++)
#pragma GCC unroll 4
        for (int t = 0; t < num_tiles; t++) sum[r][t] = (floats){};
    for (int64_t p = 0; p < num_packed; p++) {
        ints keys[STRIP_TILES];
#pragma GCC unroll 4
        for (int t = 0; t < num_tiles; t++) keys[t] = load_ints((const scalar *)tiles[t] + p * LANES * PACK);
#pragma GCC unroll 8
        for (int r = 0; r < PROMPT_ROWS; r++)
#pragma GCC unroll 4
            for (int t = 0; t < num_tiles; t++)
                sum[r][t] = add_products(sum[r][t], keys[t], queries[r * num_packed + p]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < PROMPT_ROWS; r++)
#pragma GCC unroll 4
        for (int t = 0; t < num_tiles; t++) scores[t][r] = sum[r][t];
}

/* Not inlined, like the two functions below: in a large function GCC does not keep all sums in registers. */
#define SCORE_TILES(num_tiles)                                                                                         \
    static __attribute__((noinline)) void score_##num_tiles(floats (*scores)[MAX_ROWS], const uint8_t *const *tiles,   \
                                                            const packed *queries, int64_t num_packed) {               \
        score_tiles(scores, num_tiles, tiles, queries, num_packed);                                                    \
    }
SCORE_TILES(1)
SCORE_TILES(2)
SCORE_TILES(3)
SCORE_TILES(4)

static void score_strip(floats (*scores)[MAX_ROWS], int num_tiles, const uint8_t *const *tiles, const packed *queries,
                        int64_t num_packed) {
    if (!SCORES_STRIPS) for (int t = 0; t < num_tiles; t++) score_1(scores + t, tiles + t, queries, num_packed);
    else if (num_tiles == 4) score_4(scores, tiles, queries, num_packed);
    else if (num_tiles == 3) score_3(scores, tiles, queries, num_packed);
    else if (num_tiles == 2) score_2(scores, tiles, queries, num_packed);
    else score_1(scores, tiles, queries, num_packed);
}

static __attribute__((noinline)) void weigh_strip(tile_weights (*weights)[STRIP_TILES], row_softmax *softmax,
                                                  floats *sums, int64_t width, const floats (*scores)[MAX_ROWS],
                                                  int num_tiles, float to_power) {
    if (num_tiles == STRIP_TILES) /* most strips are whole: their loop is unrolled */
        for (int r = 0; r < PROMPT_ROWS; r++)
            weigh(weights[r], softmax + r, sums + r * width, width, scores[0] + r, MAX_ROWS, STRIP_TILES, to_power,
                  NULL);
    else
        for (int r = 0; r < PROMPT_ROWS; r++)
            weigh(weights[r], softmax + r, sums + r * width, width, scores[0] + r, MAX_ROWS, num_tiles, to_power,
                  NULL);
}

static __attribute__((noinline)) void add_values(floats *sums, int64_t width, const uint8_t *const *values,
                                                 int num_tiles, const tile_weights (*weights)[STRIP_TILES]) {
    const int64_t stride = width * LANES * PACK;
    const int wide = value_vectors(PROMPT_ROWS);
    int64_t w = 0;
    for (; w + wide <= width; w += wide)
        accumulate_values(sums + w, width, PROMPT_ROWS, 0, wide, values, values, num_tiles, w * LANES * PACK, stride,
                          weights);
    for (; w < width; w++)
        accumulate_values(sums + w, width, PROMPT_ROWS, 0, 1, values, values, num_tiles, w * LANES * PACK, stride,
                          weights);
}

/* Attention of a query group of a prompt chunk. All rows read a strip of keys and values, PROMPT_ROWS at a time, before
   any row reads the next strip. So only the first rows read a strip that is not in the first-level cache. */
static void attend_prompt(const query_group *group) {
    const attention_params *params = group->params;
    const int64_t num_packed = round_up_to_lanes(params->key_dim) / PACK;
    const int64_t width = round_up_to_lanes(params->value_dim) / LANES;
    const float to_power = to_power_of(params);
    const int num_rows = (group->num_rows + PROMPT_ROWS - 1) / PROMPT_ROWS * PROMPT_ROWS;
    packed queries[num_rows * num_packed];
    floats sums[num_rows * width];
    row_softmax softmax[num_rows];
    for (int r = 0; r < num_rows; r++) {
        copy_query((scalar *)(queries + r * num_packed), group->query[r], params->key_dim);
        for (int64_t w = 0; w < width; w++) sums[r * width + w] = (floats){};
        softmax[r] = begin_softmax(params, group->sink[r]);
    }
    place at = place_of(group, group->begin);
    for (int64_t position = group->begin; position < group->end;) {
        const uint8_t *keys[STRIP_TILES], *values[STRIP_TILES];
        int64_t starts[STRIP_TILES], num_tokens[STRIP_TILES];
        const int num_tiles = find_strip(group, position, at, keys, values);
        for (int t = 0; t < num_tiles; t++, at = next_tile(group, at)) {
            starts[t] = position;
            position += num_tokens[t] = tokens_of_tile(group, at);
        }
        for (int first = 0; first < num_rows; first += PROMPT_ROWS) {
            const int64_t *positions = group->position + first;
            if (positions[PROMPT_ROWS - 1] < starts[0]) continue; /* they see none of these keys */
            floats scores[STRIP_TILES][MAX_ROWS];
            tile_weights weights[PROMPT_ROWS][STRIP_TILES];
            score_strip(scores, num_tiles, keys, queries + first * num_packed, num_packed);
            for (int t = 0; t < num_tiles; t++)
                cap_and_mask(scores[t], PROMPT_ROWS, params, starts[t], num_tokens[t], positions);
            weigh_strip(weights, softmax + first, sums + first * width, width, scores, num_tiles, to_power);
            add_values(sums + first * width, width, values, num_tiles, weights);
        }
    }
    for (int r = 0; r < group->num_rows; r++)
        finish_row(group->output[r], sums + r * width, softmax[r].total, params->value_dim);
}

static void attend_group(const query_group *group, const query_group *next) {
    const int is_plain = group->params->page_format == PLAIN_PAGES;
    if (is_plain && !group->is_decode && attention_uses_tiles(group->params)) attend_by_tiles(group);
    else if (is_plain && !group->is_decode) attend_prompt(group);
    else if (is_plain) attend_group_over(group, next, 0);
    else attend_group_over(group, next, 1);
}

/* One layer's attention in one step. */
typedef struct {
    const layer_pages *pages;
    const attention_metadata *metadata;
    const scalar *queries;
    int64_t query_stride;
    scalar *output;
    const int64_t *first_group; /* [num_sequences + 1] the number of each sequence's first query group */
} attention_step;

/* The rows of a query group, at most. */
static inline int64_t max_rows_of_group(const attention_params *params, int64_t num_queries) {
    if (num_queries <= MAX_DECODE_QUERIES || params->page_format != PLAIN_PAGES) return MAX_ROWS;
    return attention_uses_tiles(params) ? MAX_GROUP_ROWS : MAX_PROMPT_ROWS;
}

static void make_group(query_group *group, const attention_step *step, int64_t number) {
    const attention_params *params = step->pages->params;
    const attention_metadata *metadata = step->metadata;
    const int64_t group_size = params->num_heads / params->num_kv_heads;
    int64_t sequence = 0, above = metadata->num_sequences; /* binary search for the sequence of this group */
    while (above - sequence > 1) {
        const int64_t middle = (sequence + above) / 2;
        if (step->first_group[middle] <= number) sequence = middle;
        else above = middle;
    }
    const int64_t start = metadata->query_starts[sequence];
    const int64_t num_queries = metadata->query_starts[sequence + 1] - start;
    const int64_t within = number - step->first_group[sequence];
    group->params = params, group->keys = step->pages->keys, group->values = step->pages->values;
    group->is_decode = num_queries <= MAX_DECODE_QUERIES;
    /* The groups of a prompt that have the same rows follow each other, because they take equally long. Those of a decode
       step that have the same keys do: the second one finds some of them in a cache. */
    const int64_t max_rows = max_rows_of_group(params, num_queries);
    const int64_t num_parts = (num_queries * group_size + max_rows - 1) / max_rows;
    group->kv_head = group->is_decode ? within / num_parts : within % params->num_kv_heads;
    const int64_t first_row = max_rows * (group->is_decode ? within % num_parts : within / params->num_kv_heads);
    const int64_t left = num_queries * group_size - first_row;
    group->block_table = metadata->block_table + sequence * metadata->table_width;
    group->num_rows = (int)(left < max_rows ? left : max_rows);
    for (int i = 0; i < max_rows; i++) { /* rows that do not exist are the last one again */
        const int64_t row = first_row + (i < group->num_rows ? i : group->num_rows - 1);
        const int64_t query = row / group_size, head = group->kv_head * group_size + row % group_size;
        group->query[i] = step->queries + (start + query) * step->query_stride + head * params->key_dim;
        group->output[i] = step->output + ((start + query) * params->num_heads + head) * params->value_dim;
        group->sink[i] = params->sinks ? params->sinks[head] : -INFINITY;
        group->position[i] = metadata->lengths[sequence] - num_queries + query;
    }
    group->end = group->position[group->num_rows - 1] + 1;
    const int is_windowed = params->window && group->position[0] >= params->window;
    group->begin = is_windowed ? group->position[0] - params->window + 1 : 0;
    group->begin -= group->begin % params->block_size % LANES;
}

static void attend(const layer_pages *pages, const attention_metadata *metadata, const scalar *queries,
                   int64_t query_stride, scalar *output) {
    const attention_params *params = pages->params;
    const int64_t group_size = params->num_heads / params->num_kv_heads, num_sequences = metadata->num_sequences;
    int64_t first_group[num_sequences + 1];
    first_group[0] = 0;
    for (int64_t s = 0; s < num_sequences; s++) {
        const int64_t num_queries = metadata->query_starts[s + 1] - metadata->query_starts[s];
        const int64_t max_rows = max_rows_of_group(params, num_queries);
        const int64_t num_parts = (num_queries * group_size + max_rows - 1) / max_rows;
        first_group[s + 1] = first_group[s] + num_parts * params->num_kv_heads;
    }
    const attention_step step = {pages, metadata, queries, query_stride, output, first_group};
    /* A thread takes several groups at a time, so that one can prefetch what the next one reads; but few enough that
       every thread gets its share. */
    const int64_t num_groups = first_group[num_sequences], share = num_groups / omp_get_max_threads() / 4;
    const int64_t batch = share < 1 ? 1 : share < params->num_kv_heads ? share : params->num_kv_heads;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t end = num_groups; end > 0; end -= batch) { /* backwards: the end of a prompt sees most keys */
        query_group groups[2]; /* in turn this one and the next one */
        make_group(groups, &step, end - 1);
        for (int64_t number = end - 1, turn = 0; number >= 0 && number >= end - batch; number--, turn = 1 - turn) {
            const int is_last = number == 0 || number == end - batch;
            if (!is_last) make_group(groups + 1 - turn, &step, number - 1);
            attend_group(groups + turn, is_last ? NULL : groups + 1 - turn);
        }
    }
}

/* -- exported functions ------------------------------------------------------------------------------------------- */

void store_and_attend(const layer_pages *pages, const attention_metadata *metadata, const scalar *queries,
                      int64_t query_stride, const scalar *keys, int64_t key_stride, const scalar *values,
                      int64_t value_stride, scalar *output) {
    store_step(pages, metadata, keys, key_stride, values, value_stride);
    attend(pages, metadata, queries, query_stride, output);
}

void rotate_store_and_attend(const layer_pages *pages, const attention_metadata *metadata, scalar *qkv,
                             const rotation *rotation, const head_norms *norms, scalar *output) {
    const attention_params *params = pages->params;
    const int64_t stride = (params->num_heads + 2 * params->num_kv_heads) * params->key_dim;
    rotate_and_store(pages, metadata, qkv, stride, rotation, norms);
    attend(pages, metadata, qkv, stride, output);
}
