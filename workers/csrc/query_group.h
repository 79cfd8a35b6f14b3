/* A query group: query rows of attention that read the same keys and values, and where these are. */

#ifndef SERVEKIT_QUERY_GROUP_H
#define SERVEKIT_QUERY_GROUP_H

#include "kernels.h"
#include "kv_codes.h"
#include "online_softmax.h"

enum { MAX_GROUP_ROWS = 64 };

/* The bytes of a tile of keys, or of values, of `dim` dimensions. */
static inline int64_t tile_bytes(const attention_params *params, int64_t dim) {
    const int64_t num_numbers = LANES * round_up_to_lanes(dim);
    return params->page_format == PLAIN_PAGES ? num_numbers * (int64_t)sizeof(scalar) : SCALES_BYTES + num_numbers;
}

/* The unit of work: up to eight query rows of one key head, or up to MAX_GROUP_ROWS of a prompt. If g query heads
   share a key head, then row i is query head i % g of that key head, in query i / g. */
typedef struct {
    const attention_params *params;
    const uint8_t *keys, *values; /* the layer's pages */
    const int32_t *block_table;   /* of the sequence */
    int64_t kv_head;
    const scalar *query[MAX_GROUP_ROWS];
    scalar *output[MAX_GROUP_ROWS];
    float sink[MAX_GROUP_ROWS];
    int64_t position[MAX_GROUP_ROWS]; /* ascending */
    int64_t begin, end;         /* the positions that any row sees; begin is the first position of a tile */
    int num_rows;
    int is_decode; /* the sequence has so few queries that it finds few of its keys in a cache */
} query_group;

/* A place in a sequence: its block, and the token in that block. Counted on, because a division takes longer than a
   tile's products with two rows. */
typedef struct { int64_t block, token; } place;

static inline place place_of(const query_group *group, int64_t position) {
    return (place){position / group->params->block_size, position % group->params->block_size};
}

/* The tokens of the tile at a place. */
static inline int64_t tokens_of_tile(const query_group *group, place at) {
    const int64_t left = group->params->block_size - at.token;
    return left < LANES ? left : LANES;
}

static inline place next_tile(const query_group *group, place at) {
    at.token += LANES;
    return at.token < group->params->block_size ? at : (place){at.block + 1, 0};
}

/* Find the tiles of the strip that begins at `position`, which is `at`. Returns how many there are. */
static inline int find_strip(const query_group *group, int64_t position, place at, const uint8_t **keys,
                             const uint8_t **values) {
    const attention_params *params = group->params;
    const int64_t tiles = round_up_to_lanes(params->block_size) / LANES;
    const int64_t key_bytes = tile_bytes(params, params->key_dim), value_bytes = tile_bytes(params, params->value_dim);
    int num_tiles = 0;
    for (; num_tiles < STRIP_TILES && position < group->end; num_tiles++, at = next_tile(group, at)) {
        const int64_t page = group->block_table[at.block] * params->num_kv_heads + group->kv_head;
        const int64_t tile = page * tiles + at.token / LANES;
        keys[num_tiles] = group->keys + tile * key_bytes;
        values[num_tiles] = group->values + tile * value_bytes;
        position += tokens_of_tile(group, at);
    }
    return num_tiles;
}

/* Copy a query and fill it up with zeros. */
static inline void copy_query(scalar *to, const scalar *query, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) to[d] = query[d];
    for (int64_t d = dim; d < round_up_to_lanes(dim); d++) to[d] = 0;
}

static inline void finish_row(scalar *output, const floats *sums, floats total, int64_t value_dim) {
    const float share = 1.0f / sum_of_lanes(total);
    const int64_t left = value_dim % LANES, num_whole = value_dim / LANES;
    for (int64_t w = 0; w < num_whole; w++) store(output + w * LANES, sums[w] * share);
    if (left) {
        scalar rest[LANES];
        store(rest, sums[num_whole] * share);
        memcpy(output + num_whole * LANES, rest, (size_t)left * sizeof(scalar));
    }
}

/* Attention of a prompt's query group by AMX tiles (tiled_attention.c). Only if attention_uses_tiles. */
void attend_by_tiles(const query_group *group);

#endif
