/* The softmax of query rows, computed strip by strip (Milakov and Gimelshein, 2018, "Online normalizer calculation for
   softmax"), and what happens to scores before it. A strip is up to STRIP_TILES tiles of sixteen tokens. */

#ifndef SERVEKIT_ONLINE_SOFTMAX_H
#define SERVEKIT_ONLINE_SOFTMAX_H

#include "kernels.h"
#include "products.h"

enum { STRIP_TILES = 4, MAX_ROWS = 8 };

typedef packed tile_weights[LANES / PACK]; /* the weights of one row and a tile */

/* Store weights, which are not negative; with AVX512-BF16 in one instruction, where `store` takes several. */
static inline void store_weights(packed *to, floats weights) {
#if defined(BFLOAT16) && defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)weights));
#else
    store((scalar *)to, weights);
#endif
}

/* The softmax of a row, as far as it is computed. The weight of a score is e^(score - ceiling). No score so far is
   above the ceiling. */
typedef struct {
    floats total; /* the sum of the weights, lane by lane */
    float ceiling;
} row_softmax;

/* When a score is above the ceiling, the new ceiling is above that score by this many powers of two. So few rows have
   to raise it again. Weights lose no precision by that, because they are floating-point numbers. */
static const float HEADROOM_BITS = 8.0f;

/* The factor that turns a score into the exponent of a power of two. */
static inline float to_power_of(const attention_params *params) {
    return LOG2_E * (params->softcap != 0.0f ? 1.0f : params->scale); /* capped scores have been scaled */
}

/* The softmax of a row that has seen no key yet. sink: -infinity if there is none. */
static inline row_softmax begin_softmax(const attention_params *params, float sink) {
    return (row_softmax){{params->sinks ? 1.0f : 0.0f}, sink * LOG2_E / to_power_of(params)};
}

/* Turn the scores of a row and a strip into weights. `stride` is from the scores of one tile to those of the next. If the
   ceiling must be raised, the row's total and its `width` vectors of sums of values are rescaled. value_scales: for each
   tile, a vector by which the weights are multiplied, but not their total; NULL: none. */
INLINE void weigh(tile_weights *weights, row_softmax *row, floats *sums, int64_t width,
                  const floats *scores, int64_t stride, int num_tiles, float to_power,
                  const uint8_t *const *value_scales) {
    floats top = scores[0];
    for (int t = 1; t < num_tiles; t++) top = larger(scores[t * stride], top);
    if (any_above(top, row->ceiling)) {
        const float ceiling = max_of_lanes(top) + HEADROOM_BITS / to_power;
        const floats decay = exp2_nonpositive((floats){} + (row->ceiling - ceiling) * to_power);
        row->total *= decay;
        for (int64_t w = 0; w < width; w++) sums[w] *= decay;
        row->ceiling = ceiling;
    }
    /* Because of its window, a row may have seen no key yet. Its weights have no effect then, but must be finite. */
    const float shift = row->ceiling == -INFINITY ? 0.0f : row->ceiling * to_power;
    for (int t = 0; t < num_tiles; t++) {
        floats weight = exp2_nonpositive(scores[t * stride] * to_power - shift);
        row->total += weight;
        if (value_scales) weight *= *(const floats *)value_scales[t];
        store_weights(weights[t], weight);
    }
}

/* cap * tanh(scores / cap), as Gemma 2 caps its scores. */
static inline floats soft_cap(floats scores, float cap) {
    floats power = exp_nonpositive(absolute(scores) * (-2.0f / cap));
    floats size = cap * (1.0f - power) / (1.0f + power);
    return select_lanes(scores < 0.0f, -size, size);
}

/* Cap the scores of num_rows rows and a tile, if the layer does, and hide the keys that a row does not see. The tile is the
   num_tokens tokens from `position` on, and rows are at `positions`, which ascend. */
INLINE void cap_and_mask(floats *scores, const int num_rows, const attention_params *params, int64_t position,
                         int64_t num_tokens, const int64_t *positions) {
    for (int r = 0; r < num_rows && params->softcap != 0.0f; r++)
        scores[r] = soft_cap(scores[r] * params->scale, params->softcap);
    const int64_t window = params->window ? params->window : INT64_MAX;
    if (num_tokens == LANES && position + LANES - 1 <= positions[0] && positions[num_rows - 1] - position < window)
        return; /* all rows see all keys */
    const ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int r = 0; r < num_rows; r++) {
        const int64_t last = positions[r] - position; /* the last lane that this row sees */
        const int64_t first = last < window ? 0 : last - window + 1;
        const int32_t upper = (int32_t)(last < num_tokens - 1 ? last : num_tokens - 1);
        const int32_t lower = (int32_t)(first < LANES ? first : LANES);
        scores[r] = select_lanes((lanes <= upper) & (lanes >= lower), scores[r], (floats){} - INFINITY);
    }
}

#endif
