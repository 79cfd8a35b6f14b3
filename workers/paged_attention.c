/* Attention over KV pages on a CPU: whatever mixture of prompt chunks and single tokens a step has.

   Nothing is gathered: each key and value is read where it lies, once for up to eight query rows, and the softmax is
   computed as it goes (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax"). The query heads that
   share a key head are further query rows of it.

   Pages lie as the multiplications read them, in tiles of sixteen tokens and one head:

       keys    [num_blocks, num_kv_heads, tiles, key_dim / PACK, 16 tokens, PACK]
       values  [num_blocks, num_kv_heads, tiles, 16 / PACK tokens, value_dim, PACK]

   so that a vector of keys meets one number (bfloat16: one pair) of a query, and a vector of values one weight (one
   pair): sums stay in lanes, and nothing is ever added across. Dimensions are rounded up to sixteen, and what was never
   written is zero. A block of fewer than sixteen tokens has one tile that is not full.

   Plain C, OpenMP, and one instruction by name where the processor has it; no headers of torch, so that it compiles in
   seconds. */

#include <omp.h>
#include <stddef.h>

#include "vectors.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

enum { STRIP = 4, MOST_ROWS = 8, MOST_DIM = 512 };

#ifdef BFLOAT16
enum { PACK = 2 };
typedef uint32_t packed __attribute__((may_alias)); /* two scalars, the first one in the lower half */

static inline floats multiplied(floats sum, const scalar *pairs, packed pair) {
#ifdef __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(pairs),
                                    (__m512bh)_mm512_set1_epi32((int)pair));
#else
    ints both = *(const ints *)pairs;
    return sum + (floats)(both << 16) * widened((scalar)pair) +
           (floats)(both & (int32_t)0xffff0000) * widened((scalar)(pair >> 16));
#endif
}
#else
enum { PACK = 1 };
typedef float packed;

static inline floats multiplied(floats sum, const scalar *values, packed value) {
    return sum + *(const floats *)values * value;
}
#endif

typedef struct {
    int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size;
    int64_t window;       /* how many keys a query sees, itself included; 0 is all */
    const float *sinks;   /* [num_heads] scores that take probability and give nothing; NULL is none */
    float scale, softcap; /* softcap 0 is none */
} layer;

static inline int64_t rounded_up(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

/* -- writing ----------------------------------------------------------------------------------------------------- */

/* One token's key and value of one head into its cell, if it has one; what is not finite becomes zero. */
static void write_cell(const layer *of, scalar *key_pages, scalar *value_pages, int64_t head, int64_t cell,
                       const scalar *key, const scalar *value) {
    if (cell < 0) return;
    const int64_t tiles = rounded_up(of->block_size) / LANES;
    const int64_t block = cell / of->block_size, place = cell % of->block_size, lane = place % LANES;
    const int64_t tile = (block * of->num_kv_heads + head) * tiles + place / LANES;
    scalar *keys = key_pages + tile * LANES * rounded_up(of->key_dim) + lane * PACK;
    for (int64_t d = 0; d < of->key_dim; d++) keys[d / PACK * LANES * PACK + d % PACK] = or_zero(key[d]);
    const int64_t width = rounded_up(of->value_dim);
    scalar *values = value_pages + tile * LANES * width + lane / PACK * width * PACK + lane % PACK;
    for (int64_t d = 0; d < of->value_dim; d++) values[d * PACK] = or_zero(value[d]);
}

/* keys [num_tokens, num_kv_heads, key_dim], values alike, with `key_stride` and `value_stride` scalars from token to
   token; slot_mapping [num_tokens]. */
static void write_pages(const layer *of, scalar *key_pages, scalar *value_pages, const int64_t *slot_mapping,
                        int64_t num_tokens, const scalar *keys, int64_t key_stride, const scalar *values,
                        int64_t value_stride) {
#pragma omp parallel for if (num_tokens > 16)
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t head = 0; head < of->num_kv_heads; head++)
            write_cell(of, key_pages, value_pages, head, slot_mapping[token],
                       keys + token * key_stride + head * of->key_dim,
                       values + token * value_stride + head * of->value_dim);
}

/* One head, in place: normalised if there are weights for it, then its halves rotated against each other, as
   transformers lays it out (Su et al., 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding"). */
static void rotated(scalar *head, int64_t dim, const scalar *cosines, const scalar *sines, const scalar *weight,
                    float epsilon) {
    float values[MOST_DIM], factor = 1.0f;
    for (int64_t d = 0; d < dim; d++) values[d] = widened(head[d]);
    if (weight) {
        float squares = 0.0f;
        for (int64_t d = 0; d < dim; d++) squares += values[d] * values[d];
        factor = 1.0f / sqrtf(squares / (float)dim + epsilon);
        for (int64_t d = 0; d < dim; d++) values[d] *= factor * widened(weight[d]);
    }
    for (int64_t low = 0, high = dim / 2; high < dim; low++, high++) {
        head[low] = narrowed(values[low] * widened(cosines[low]) - values[high] * widened(sines[low]));
        head[high] = narrowed(values[high] * widened(cosines[high]) + values[low] * widened(sines[high]));
    }
}

/* What a decoder layer does between its first multiplication and attention, in one go: rotate the query and key heads of
   `qkv` [num_tokens, stride] by cosines and sines [num_tokens, key_dim], and write keys and values into their pages. */
static void rotate_and_write(const layer *of, scalar *key_pages, scalar *value_pages, const int64_t *slot_mapping,
                             int64_t num_tokens, scalar *qkv, int64_t stride, const scalar *cosines,
                             const scalar *sines, const scalar *query_norm, const scalar *key_norm, float epsilon) {
    const int64_t dim = of->key_dim;
#pragma omp parallel for if (num_tokens > 3)
    for (int64_t token = 0; token < num_tokens; token++) {
        const scalar *cosine = cosines + token * dim, *sine = sines + token * dim;
        scalar *head = qkv + token * stride;
        for (int64_t i = 0; i < of->num_heads; i++, head += dim) rotated(head, dim, cosine, sine, query_norm, epsilon);
        scalar *value = head + of->num_kv_heads * dim;
        for (int64_t i = 0; i < of->num_kv_heads; i++, head += dim, value += dim) {
            rotated(head, dim, cosine, sine, key_norm, epsilon);
            write_cell(of, key_pages, value_pages, i, slot_mapping[token], head, value);
        }
    }
}

/* -- reading ------------------------------------------------------------------------------------------------------ */

/* Up to eight query rows of one key head: row i is query head `i % group` of it, in the query `i / group`. */
typedef struct {
    const layer *of;
    const scalar *keys, *values; /* the layer's pages */
    const int32_t *block_table;
    int64_t head; /* of the keys */
    const scalar *query[MOST_ROWS];
    scalar *output[MOST_ROWS];
    float sink[MOST_ROWS];
    int64_t position[MOST_ROWS]; /* ascending */
    int64_t begin, end;          /* the positions that any of them sees, from the beginning of a tile on */
    int num;
} rows;

/* Where the tile with position `at` begins, in scalars for each dimension. */
static inline int64_t tile_of(const rows *these, int64_t at) {
    const layer *of = these->of;
    const int64_t page = these->block_table[at / of->block_size] * of->num_kv_heads + these->head;
    return (page * (rounded_up(of->block_size) / LANES) + at % of->block_size / LANES) * LANES;
}

/* The tiles of a strip, from position `at` on; returns how many there are. */
static inline int strip_of(const rows *these, int64_t at, const scalar **keys, const scalar **values) {
    int num = 0;
    for (; num < STRIP && at < these->end; num++) {
        const int64_t tile = tile_of(these, at);
        keys[num] = these->keys + tile * rounded_up(these->of->key_dim);
        values[num] = these->values + tile * rounded_up(these->of->value_dim);
        const int64_t left = these->of->block_size - at % these->of->block_size;
        at += left < LANES ? left : LANES;
    }
    return num;
}

/* Tiles are too short, and too far from each other, for the processor to guess which one comes next, so it is told: while
   a tile is read, `ahead` is asked for, line by line. Asked for all at once, they would wait for each other, and the
   processor for them. Into the second level, for the first is small. */
static inline void fetch(const scalar *ahead) { __builtin_prefetch(ahead, 0, 1); }

/* `num` is the number of rows, and a constant wherever this is inlined, so that their sums stay in registers; `fetches`
   another: a prompt chunk reads the same keys many times, and most often finds them in a cache. */
static inline __attribute__((always_inline)) void scores_of(floats *scores, const int num, const int fetches,
                                                            const scalar *keys, const scalar *ahead,
                                                            const packed *queries, int64_t num_packed) {
    floats sum[num], other[num]; /* two, for a sum waits for the one before it */
    for (int r = 0; r < num; r++) sum[r] = other[r] = (floats){};
    for (int64_t p = 0; p < num_packed; p += 2, keys += 2 * LANES * PACK, ahead += 2 * LANES * PACK) {
        if (fetches) fetch(ahead), fetch(ahead + LANES * PACK);
        for (int r = 0; r < num; r++) sum[r] = multiplied(sum[r], keys, queries[r * num_packed + p]);
        for (int r = 0; r < num; r++) other[r] = multiplied(other[r], keys + LANES * PACK, queries[r * num_packed + p + 1]);
    }
    for (int r = 0; r < num; r++) scores[r] = sum[r] + other[r];
}

/* Add `num_tiles` tiles of values, times their weights, to `width` vectors of each row's sum. */
static inline __attribute__((always_inline)) void weigh(floats *sums, int64_t sums_stride, const int num,
                                                        const int fetches, const int width, const scalar *const *tiles,
                                                        const scalar *const *ahead, int num_tiles, int64_t from,
                                                        int64_t stride, const packed (*weights)[STRIP][LANES / PACK]) {
    floats sum[num][width];
    for (int r = 0; r < num; r++)
        for (int w = 0; w < width; w++) sum[r][w] = sums[r * sums_stride + w];
    for (int t = 0; t < num_tiles; t++) {
        const scalar *values = tiles[t] + from, *next = ahead[t] + from;
        for (int p = 0; p < LANES / PACK; p++, values += stride, next += stride)
            for (int w = 0; w < width; w++) {
                if (fetches) fetch(next + w * LANES * PACK);
                for (int r = 0; r < num; r++)
                    sum[r][w] = multiplied(sum[r][w], values + w * LANES * PACK, weights[r][t][p]);
            }
    }
    for (int r = 0; r < num; r++)
        for (int w = 0; w < width; w++) sums[r * sums_stride + w] = sum[r][w];
}

static inline floats capped(floats scores, float cap) { /* cap * tanh(scores / cap) */
    floats power = exp_of_negative(absolute(scores) * (-2.0f / cap));
    floats size = cap * (1.0f - power) / (1.0f + power);
    return chosen(scores < 0.0f, -size, size);
}

static inline __attribute__((always_inline)) void attend_rows(const rows *these, const rows *next, const int num,
                                                              const int fetches) {
    const layer *of = these->of;
    const int64_t key_dim = rounded_up(of->key_dim), value_dim = rounded_up(of->value_dim);
    const int64_t num_packed = key_dim / PACK, width = value_dim / LANES;
    packed queries[num * num_packed];
    floats sums[num * width], total[num];
    float most[num];
    memset(queries, 0, sizeof queries);
    for (int r = 0; r < num; r++) {
        scalar *query = (scalar *)(queries + r * num_packed);
        for (int64_t d = 0; d < of->key_dim; d++) query[d] = these->query[r][d];
        for (int64_t w = 0; w < width; w++) sums[r * width + w] = (floats){};
        most[r] = these->sink[r];
        total[r] = (floats){of->sinks ? 1.0f : 0.0f};
    }
    const ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int64_t at = these->begin;
    while (at < these->end) {
        floats scores[STRIP][num];
        const scalar *keys[STRIP], *values[STRIP], *keys_ahead[STRIP], *values_ahead[STRIP];
        const int num_tiles = strip_of(these, at, keys, values);
        const int64_t after = at + STRIP * LANES;
        int num_ahead = 0;
        if (after < these->end) num_ahead = strip_of(these, after, keys_ahead, values_ahead);
        else if (next) num_ahead = strip_of(next, next->begin, keys_ahead, values_ahead);
        for (; num_ahead < num_tiles; num_ahead++) /* nothing: what is here already */
            keys_ahead[num_ahead] = keys[num_ahead], values_ahead[num_ahead] = values[num_ahead];
        for (int t = 0; t < num_tiles; t++) {
            const int64_t place = at % of->block_size;
            const int64_t full = of->block_size - place < LANES ? of->block_size - place : LANES;
            floats *score = scores[t];
            scores_of(score, num, fetches, keys[t], keys_ahead[t], queries, num_packed);
            for (int r = 0; r < num; r++) {
                score[r] *= of->scale;
                if (of->softcap != 0.0f) score[r] = capped(score[r], of->softcap);
                const int64_t last = these->position[r] - at; /* lanes up to this one are seen */
                const int64_t first = of->window ? last - of->window + 1 : 0;
                if (last < LANES - 1 || first > 0 || full < LANES) {
                    const int32_t upper = (int32_t)(last < full - 1 ? last : full - 1);
                    const int32_t lower = (int32_t)(first < 0 ? 0 : first > LANES ? LANES : first);
                    score[r] = chosen((lanes <= upper) & (lanes >= lower), score[r], (floats){} - INFINITY);
                }
            }
            at += full;
        }
        packed weights[num][STRIP][LANES / PACK];
        for (int r = 0; r < num; r++) {
            floats top = scores[0][r];
            for (int t = 1; t < num_tiles; t++) top = chosen(scores[t][r] > top, scores[t][r], top);
            const float highest = largest(top);
            if (highest > most[r]) {
                const floats fade = exp_of_negative((floats){} + (most[r] - highest));
                total[r] *= fade;
                for (int64_t w = 0; w < width; w++) sums[r * width + w] *= fade;
                most[r] = highest;
            }
            /* A row that has seen no key yet, because of its window: its weights do not matter, but must be numbers. */
            const float shift = most[r] == -INFINITY ? 0.0f : most[r];
            for (int t = 0; t < num_tiles; t++) {
                floats weight = exp_of_negative(scores[t][r] - shift);
                total[r] += weight;
                store((scalar *)weights[r][t], weight);
            }
        }
        int64_t w = 0;
        const int wide = num <= 6 ? 4 : 2; /* as many sums as registers hold */
        for (; w + wide <= width; w += wide)
            weigh(sums + w, width, num, fetches, wide, values, values_ahead, num_tiles, w * LANES * PACK, value_dim * PACK,
                  weights);
        for (; w < width; w++)
            weigh(sums + w, width, num, fetches, 1, values, values_ahead, num_tiles, w * LANES * PACK, value_dim * PACK,
                  weights);
    }
    for (int r = 0; r < num; r++) {
        const float share = 1.0f / total_of(total[r]);
        scalar result[MOST_DIM];
        for (int64_t w = 0; w < width; w++) store(result + w * LANES, sums[r * width + w] * share);
        memcpy(these->output[r], result, (size_t)of->value_dim * sizeof(scalar));
    }
}

static void attend_any(const rows *these, const rows *next) {
    switch (these->num) {
        case 1: attend_rows(these, next, 1, 1); break;
        case 2: attend_rows(these, next, 2, 1); break;
        case 3: attend_rows(these, next, 3, 1); break;
        case 4: attend_rows(these, next, 4, 1); break;
        case 5: attend_rows(these, next, 5, 1); break;
        case 6: attend_rows(these, next, 6, 1); break;
        case 7: attend_rows(these, next, 7, 1); break;
        default:
            if (these->position[0] == these->position[MOST_ROWS - 1]) attend_rows(these, next, MOST_ROWS, 1);
            else attend_rows(these, next, MOST_ROWS, 0);
    }
}

/* A step, as `attend` is told of it, and the units of its work: up to eight query rows of one key head each. */
typedef struct {
    const layer *of;
    const scalar *keys, *values, *queries;
    const int32_t *query_starts, *lengths, *block_tables;
    const int64_t *first_unit; /* [num_rows + 1] of each row */
    scalar *output;
    int64_t num_rows, table_width, stride;
} step;

static rows unit_of(const step *in, int64_t unit) {
    const layer *of = in->of;
    const int64_t group = of->num_heads / of->num_kv_heads;
    int64_t row = 0, above = in->num_rows;
    while (above - row > 1) {
        const int64_t middle = (row + above) / 2;
        if (in->first_unit[middle] <= unit) row = middle;
        else above = middle;
    }
    const int64_t start = in->query_starts[row], num_queries = in->query_starts[row + 1] - start;
    const int64_t of_row = unit - in->first_unit[row], first = of_row / of->num_kv_heads * MOST_ROWS;
    const int64_t left = num_queries * group - first;
    rows these = {.of = of, .keys = in->keys, .values = in->values, .head = of_row % of->num_kv_heads};
    these.block_table = in->block_tables + row * in->table_width;
    these.num = left < MOST_ROWS ? (int)left : MOST_ROWS;
    for (int i = 0; i < these.num; i++) {
        const int64_t query = (first + i) / group, head = these.head * group + (first + i) % group;
        these.query[i] = in->queries + (start + query) * in->stride + head * of->key_dim;
        these.output[i] = in->output + ((start + query) * of->num_heads + head) * of->value_dim;
        these.sink[i] = of->sinks ? of->sinks[head] : -INFINITY;
        these.position[i] = in->lengths[row] - num_queries + query;
    }
    these.end = these.position[these.num - 1] + 1;
    these.begin = of->window && these.position[0] >= of->window ? these.position[0] - of->window + 1 : 0;
    these.begin -= these.begin % of->block_size % LANES;
    return these;
}

static void attend(const layer *of, const step *given) {
    const int64_t group = of->num_heads / of->num_kv_heads, num_rows = given->num_rows;
    int64_t first_unit[num_rows + 1];
    first_unit[0] = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t num = (given->query_starts[r + 1] - given->query_starts[r]) * group;
        first_unit[r + 1] = first_unit[r] + (num + MOST_ROWS - 1) / MOST_ROWS * of->num_kv_heads;
    }
    step in = *given;
    in.first_unit = first_unit;
    /* Some at a time, so that one can ask for what the next one reads; few enough that every thread has its share. */
    const int64_t num_units = first_unit[num_rows], share = num_units / omp_get_max_threads() / 4;
    const int64_t at_a_time = share < 1 ? 1 : share < of->num_kv_heads ? share : of->num_kv_heads;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t last = num_units; last > 0; last -= at_a_time) { /* the end of a prompt sees most keys */
        rows these = unit_of(&in, last - 1);
        for (int64_t unit = last - 1; unit >= 0 && unit >= last - at_a_time; unit--) {
            const int is_last = unit == 0 || unit == last - at_a_time;
            const rows next = is_last ? these : unit_of(&in, unit - 1);
            attend_any(&these, is_last ? NULL : &next);
            these = next;
        }
    }
}

/* -- what is called ---------------------------------------------------------------------------------------------- */

/* A step's new keys and values go to the cells of slot_mapping [num_tokens]. Row r of it has the tokens from
   query_starts[r] to query_starts[r + 1], of which the last one sees lengths[r] keys, itself included, in the blocks that
   block_tables [num_rows, table_width] name. */
#define OF_LAYER const layer *of, scalar *key_pages, scalar *value_pages
#define OF_STEP                                                                                                   \
    int64_t num_tokens, const int64_t *slot_mapping, int64_t num_rows, const int32_t *query_starts,             \
        const int32_t *lengths, const int32_t *block_tables, int64_t table_width

/* queries [num_tokens, num_heads, key_dim], keys and values alike, each with a stride from token to token, in scalars;
   output [num_tokens, num_heads, value_dim], dense. */
void write_and_attend(OF_LAYER, OF_STEP, const scalar *queries, int64_t query_stride, const scalar *keys,
                      int64_t key_stride, const scalar *values, int64_t value_stride, scalar *output) {
    write_pages(of, key_pages, value_pages, slot_mapping, num_tokens, keys, key_stride, values, value_stride);
    const step in = {of, key_pages, value_pages, queries, query_starts, lengths, block_tables, NULL, output, num_rows,
                     table_width, query_stride};
    attend(of, &in);
}

/* qkv [num_tokens, num_heads + 2 * num_kv_heads, key_dim], dense, of which queries and keys are overwritten. */
void rotate_write_and_attend(OF_LAYER, OF_STEP, scalar *qkv, const scalar *cosines, const scalar *sines,
                             const scalar *query_norm, const scalar *key_norm, float epsilon, scalar *output) {
    const int64_t stride = (of->num_heads + 2 * of->num_kv_heads) * of->key_dim;
    rotate_and_write(of, key_pages, value_pages, slot_mapping, num_tokens, qkv, stride, cosines, sines, query_norm,
                     key_norm, epsilon);
    const step in = {of, key_pages, value_pages, qkv, query_starts, lengths, block_tables, NULL, output, num_rows,
                     table_width, stride};
    attend(of, &in);
}
