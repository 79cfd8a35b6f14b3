/* Attention of prompts by AMX tiles (tiles.h) in bfloat16. Pages are read in place.

   Tiles can be loaded from the layout of pages (paged_attention.c). 32 dimensions of the keys of 16 tokens are 16 rows
   of 64 bytes. So are 16 dimensions of the values of 32 tokens, if the two tiles of these tokens follow each other in
   memory. If they do not, values are copied, once for all rows of a query group. Products of 16 tokens would need no
   copy, but they would need tiles of another shape, and twice as many instructions.

   ROWS rows are multiplied together, by two tiles of keys or of values: each tile that is loaded is used twice, and no
   sum waits for the one before it. Sums of values stay in memory, where the softmax rescales them. */

#include "kernels.h"
#include "query_group.h"
#include "tiles.h"

#if defined(BFLOAT16) && defined(HAS_TILES)
enum { ROWS = 2 * TILE };
enum { INPUTS = 2 * TILE }; /* that a row of a tile holds: dimensions of a query, or tokens of a row of weights */
enum { ROW_BYTES = 64 };    /* of a tile */
#define ALIGNED __attribute__((aligned(ROW_BYTES)))

static int64_t is_allowed = 1;

void let_attention_use_tiles(int64_t may_use) { is_allowed = may_use; }

int64_t attention_uses_tiles(const attention_params *params) {
    const int has_whole_tiles = params->key_dim % INPUTS == 0 && params->value_dim % INPUTS == 0;
    return is_allowed && params->page_format == PLAIN_PAGES && has_whole_tiles && may_use_tiles();
}

/* Scores of ROWS queries [ROWS, dim] against the tiles of a strip. num_tiles is even, here and below. */
static __attribute__((noinline)) void score_strip(floats (*scores)[ROWS], int num_tiles, const uint8_t *const *keys,
                                                  const scalar *queries, int64_t dim) {
    const long query_bytes = dim * (long)sizeof(scalar), score_bytes = sizeof(floats);
    finish_writing(queries);
    for (int t = 0; t < num_tiles; t += 2) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < dim; d += INPUTS) {
            const int64_t offset = d * LANES * (int64_t)sizeof(scalar);
            _tile_loadd(4, queries + d, query_bytes);
            _tile_loadd(6, keys[t] + offset, ROW_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, keys[t + 1] + offset, ROW_BYTES);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, queries + TILE * dim + d, query_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, scores[t], score_bytes);
        _tile_stored(1, scores[t + 1], score_bytes);
        _tile_stored(2, scores[t] + TILE, score_bytes);
        _tile_stored(3, scores[t + 1] + TILE, score_bytes);
    }
}

static __attribute__((noinline)) void weigh_strip(tile_weights (*weights)[STRIP_TILES], row_softmax *softmax,
                                                  floats *sums, int64_t width, const floats (*scores)[ROWS],
                                                  int num_rows, int num_tiles, float to_power) {
    if (num_tiles == STRIP_TILES) /* most strips are whole: their loop is unrolled */
        for (int r = 0; r < num_rows; r++)
            weigh(weights[r], softmax + r, sums + r * width, width, scores[0] + r, ROWS, STRIP_TILES, to_power, NULL);
    else
        for (int r = 0; r < num_rows; r++)
            weigh(weights[r], softmax + r, sums + r * width, width, scores[0] + r, ROWS, num_tiles, to_power, NULL);
}

/* For each pair of tiles of a strip, find where their values follow each other in memory: in the pages, or otherwise in
   `copies`, to which they are then copied. Each tile has num_bytes bytes. */
static void pair_values(const uint8_t **pairs, uint8_t *copies, const uint8_t *const *values, int num_tiles,
                        int64_t num_bytes) {
    for (int t = 0; t < num_tiles; t += 2, copies += 2 * num_bytes) {
        const int is_pair = values[t + 1] == values[t] + num_bytes;
        pairs[t / 2] = is_pair ? values[t] : copies;
        if (is_pair) continue;
        memcpy(copies, values[t], (size_t)num_bytes);
        memcpy(copies + num_bytes, values[t + 1], (size_t)num_bytes);
    }
}

/* Add the values of a strip, times their weights, to the sums of ROWS rows. */
static __attribute__((noinline)) void add_values(floats *sums, int64_t width, const uint8_t *const *pairs,
                                                 int num_tiles, const tile_weights (*weights)[STRIP_TILES]) {
    const long sums_bytes = width * (long)sizeof(floats), values_bytes = width * ROW_BYTES;
    const long weights_bytes = sizeof weights[0];
    finish_writing(weights);
    for (int64_t w = 0; w < width; w += 2) {
        floats *const first = sums + w, *const second = first + TILE * width;
        _tile_loadd(0, first, sums_bytes);
        _tile_loadd(1, first + 1, sums_bytes);
        _tile_loadd(2, second, sums_bytes);
        _tile_loadd(3, second + 1, sums_bytes);
        for (int t = 0; t < num_tiles; t += 2) {
            const uint8_t *const values = pairs[t / 2] + w * ROW_BYTES;
            _tile_loadd(4, weights[0][t], weights_bytes);
            _tile_loadd(6, values, values_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, values + ROW_BYTES, values_bytes);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, weights[TILE][t], weights_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, first, sums_bytes);
        _tile_stored(1, first + 1, sums_bytes);
        _tile_stored(2, second, sums_bytes);
        _tile_stored(3, second + 1, sums_bytes);
    }
}

void attend_by_tiles(const query_group *group) {
    const attention_params *params = group->params;
    const int64_t dim = params->key_dim, width = params->value_dim / LANES;
    const int64_t value_bytes = tile_bytes(params, params->value_dim);
    const float to_power = to_power_of(params);
    const int num_rows = (group->num_rows + ROWS - 1) / ROWS * ROWS;
    scalar queries[num_rows * dim] ALIGNED;
    floats sums[num_rows * width] ALIGNED;
    uint8_t copies[STRIP_TILES * value_bytes] ALIGNED;
    row_softmax softmax[num_rows];
    floats scores[STRIP_TILES][ROWS] ALIGNED;
    tile_weights weights[ROWS][STRIP_TILES] ALIGNED;
    memset(weights, 0, sizeof weights); /* for rows after the group's last one, whose sums are not read */
    for (int r = 0; r < num_rows; r++) {
        copy_query(queries + r * dim, group->query[r], dim);
        for (int64_t w = 0; w < width; w++) sums[r * width + w] = (floats){};
        softmax[r] = begin_softmax(params, group->sink[r]);
    }
    shape_tiles(ROWS, TILE);
    place at = place_of(group, group->begin);
    for (int64_t position = group->begin; position < group->end;) {
        const uint8_t *keys[STRIP_TILES], *values[STRIP_TILES], *pairs[STRIP_TILES / 2];
        int64_t starts[STRIP_TILES], num_tokens[STRIP_TILES];
        int num_tiles = find_strip(group, position, at, keys, values);
        for (int t = 0; t < num_tiles; t++, at = next_tile(group, at)) {
            starts[t] = position;
            position += num_tokens[t] = tokens_of_tile(group, at);
        }
        if (num_tiles % 2) { /* the last tile once more, without tokens */
            keys[num_tiles] = keys[num_tiles - 1], values[num_tiles] = values[num_tiles - 1];
            starts[num_tiles] = position, num_tokens[num_tiles] = 0;
            num_tiles++;
        }
        pair_values(pairs, copies, values, num_tiles, value_bytes);
        for (int first = 0; first < group->num_rows; first += ROWS) {
            const int left = group->num_rows - first, count = left < ROWS ? left : ROWS;
            const int64_t *positions = group->position + first;
            if (positions[count - 1] < starts[0]) continue; /* they see none of these keys */
            score_strip(scores, num_tiles, keys, queries + first * dim, dim);
            for (int t = 0; t < num_tiles; t++)
                cap_and_mask(scores[t], count, params, starts[t], num_tokens[t], positions);
            weigh_strip(weights, softmax + first, sums + first * width, width, scores, count, num_tiles, to_power);
            add_values(sums + first * width, width, pairs, num_tiles, weights);
        }
    }
    _tile_release();
    for (int r = 0; r < group->num_rows; r++)
        finish_row(group->output[r], sums + r * width, softmax[r].total, params->value_dim);
}

#else
void let_attention_use_tiles(int64_t may_use) { (void)may_use; }
int64_t attention_uses_tiles(const attention_params *params) { return (void)params, 0; }
void attend_by_tiles(const query_group *group) { (void)group; }
#endif
