/* Attention of one query per sequence over KV pages, where they lie: what a decode step asks of a CPU.

   Nothing is gathered: each key and value is read once, for all query heads that share it, and the softmax is computed
   as it goes (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax"). Plain C, OpenMP and the
   vectors that GCC and Clang have for every processor; no headers of torch, so that it compiles in half a second.

   With -DBFLOAT16 pages and queries hold bfloat16, else float. Sums are float. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16, STRIP = 4 };
typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#ifdef BFLOAT16
typedef uint16_t scalar; /* the upper half of a float */
typedef uint16_t scalars __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* `width` vectors. Two come out of 32 scalars with a shift and a mask, those at even places before those at odd ones:
   products and sums do not mind, and `narrow` puts them back in order. */
static inline void widen(const scalar *from, floats *to, const int width) {
    int w = 0;
    for (; w + 1 < width; w += 2) {
        ints both = *(const ints *)(from + w * LANES);
        to[w] = (floats)(both << 16);
        to[w + 1] = (floats)(both & (int32_t)0xffff0000);
    }
    if (w < width) to[w] = (floats)(__builtin_convertvector(*(const scalars *)(from + w * LANES), ints) << 16);
}

static inline ints nearest(floats values) { /* ties to even; the upper halves are the answer. Values are finite */
    ints bits = (ints)values;
    return bits + 0x7fff + ((bits >> 16) & 1);
}

static inline void narrow(const floats *from, scalar *to, const int width) {
    int w = 0;
    for (; w + 1 < width; w += 2)
        *(ints *)(to + w * LANES) =
            ((nearest(from[w]) >> 16) & 0xffff) | (nearest(from[w + 1]) & (int32_t)0xffff0000);
    if (w < width) *(scalars *)(to + w * LANES) = __builtin_convertvector(nearest(from[w]) >> 16, scalars);
}
#else
typedef float scalar;

static inline void widen(const scalar *from, floats *to, const int width) {
    for (int w = 0; w < width; w++) to[w] = *(const floats *)(from + w * LANES);
}

static inline void narrow(const floats *from, scalar *to, const int width) {
    for (int w = 0; w < width; w++) *(floats *)(to + w * LANES) = from[w];
}
#endif

typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t window;     /* how many keys a query sees, itself included; 0 is all */
    const float *sinks; /* [num_heads] scores that take probability and give nothing; NULL is none */
    float scale, softcap; /* softcap 0 is none */
} layer;

static inline floats chosen(ints mask, floats yes, floats no) { /* a lane of the mask is all bits, or none */
    return (floats)((mask & (ints)yes) | (~mask & (ints)no));
}

/* e^x for x <= 0, to 2e-7 of it: 2^n by its bits, the rest as a polynomial. */
static inline floats exp_of_negative(floats x) {
    x *= 1.44269504f;
    x = chosen(x < -126.0f, (floats){} - 126.0f, x);
    ints whole = __builtin_convertvector(x - 0.5f, ints); /* towards zero: the next whole number from x - 1/2 */
    floats part = x - __builtin_convertvector(whole, floats);
    floats value = part * 1.5403530e-4f + 1.3333558e-3f;
    value = value * part + 9.6181291e-3f;
    value = value * part + 5.5504109e-2f;
    value = value * part + 2.4022651e-1f;
    value = value * part + 6.9314718e-1f;
    value = value * part + 1.0f;
    return value * (floats)((whole + 127) << 23);
}

/* Lane j of the result is the sum of vector j: sixteen sums in fifteen additions. */
static inline floats sums_of(floats each[LANES]) {
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
    for (int i = 0; i < LANES; i += 2)
        each[i] = PICK(each[i], each[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
                  PICK(each[i], each[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    for (int i = 0; i < LANES; i += 4)
        each[i] = PICK(each[i], each[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                  PICK(each[i], each[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    for (int i = 0; i < LANES; i += 8)
        each[i] = PICK(each[i], each[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                  PICK(each[i], each[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    return PICK(each[0], each[8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PICK(each[0], each[8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#undef PICK
}

static inline float largest(floats x) {
#define TURNED(...) __builtin_shufflevector(x, x, __VA_ARGS__)
    floats y = TURNED(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x = chosen(x > y, x, y);
    y = TURNED(4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x = chosen(x > y, x, y);
    y = TURNED(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    x = chosen(x > y, x, y);
    return x[0] > x[1] ? x[0] : x[1];
#undef TURNED
}

/* One sequence, and the query heads of some key heads: from `first` on, `num_kv` of them. `width` is head_dim / LANES,
   and `group` the query heads of a key head: where they are constants, all loops over them are unrolled. */
static inline __attribute__((always_inline)) void attend_row(const layer *of, const int width, const int group,
                                                             const scalar *queries, const scalar *keys,
                                                             const scalar *values, const int64_t *block_table,
                                                             int64_t length, int64_t first, int64_t num_kv,
                                                             scalar *output) {
    const int64_t head_dim = (int64_t)width * LANES, stride = of->num_kv_heads * head_dim;
    const int64_t num_heads = num_kv * group;
    floats query[num_heads][width], sum[num_heads][width];
    floats total[num_heads]; /* by lane */
    float most[num_heads];
    queries += first * group * head_dim;
    output += first * group * head_dim;
    for (int64_t h = 0; h < num_heads; h++) {
        widen(queries + h * head_dim, query[h], width);
        for (int w = 0; w < width; w++) {
            query[h][w] *= of->scale;
            sum[h][w] = (floats){};
        }
        most[h] = of->sinks ? of->sinks[first * group + h] : -INFINITY;
        total[h] = (floats){of->sinks ? 1.0f : 0.0f};
    }
    int64_t at = of->window && length > of->window ? length - of->window : 0;
    while (at < length) {
        /* As many keys as there are lanes, or as are left in the block: there the cells are in order. */
        const int64_t place = at % of->block_size;
        int64_t num = of->block_size - place < LANES ? of->block_size - place : LANES;
        num = length - at < num ? length - at : num;
        const int64_t cell = (block_table[at / of->block_size] * of->block_size + place) * stride + first * head_dim;
        const ints is_there = (ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} < (int32_t)num;
        if (at + LANES < length) { /* the next tile comes while this one is computed */
            const int64_t next_place = (at + num) % of->block_size;
            const int64_t next = (block_table[(at + num) / of->block_size] * of->block_size + next_place) * stride;
            for (int64_t j = 0; j < LANES; j++)
                for (int64_t d = 0; d < num_kv * head_dim; d += 64 / sizeof(scalar)) {
                    __builtin_prefetch(keys + next + first * head_dim + j * stride + d);
                    __builtin_prefetch(values + next + first * head_dim + j * stride + d);
                }
        }
        for (int64_t kv = 0; kv < num_kv; kv++) {
            floats weights[group], each[group][LANES];
            const floats(*of_group)[width] = query + kv * group;
            for (int j = 0; j < LANES; j++) { /* a key is widened once, and multiplied by each query while it is */
                const scalar *key = keys + cell + kv * head_dim + (j < num ? j : 0) * stride;
                floats wide[width];
                widen(key, wide, width);
                for (int g = 0; g < group; g++) {
                    floats products = of_group[g][0] * wide[0];
                    for (int w = 1; w < width; w++) products += of_group[g][w] * wide[w];
                    each[g][j] = products;
                }
            }
            for (int g = 0; g < group; g++) {
                const int64_t h = kv * group + g;
                floats scores = sums_of(each[g]);
                if (of->softcap)
                    for (int j = 0; j < LANES; j++) scores[j] = of->softcap * tanhf(scores[j] / of->softcap);
                scores = chosen(is_there, scores, (floats){} - INFINITY);
                const float peak = largest(scores);
                if (peak > most[h]) {
                    const float shrink = exp_of_negative((floats){} + (most[h] - peak))[0];
                    total[h] *= shrink;
                    for (int w = 0; w < width; w++) sum[h][w] *= shrink;
                    most[h] = peak;
                }
                weights[g] = chosen(is_there, exp_of_negative(scores - most[h]), (floats){});
                total[h] += weights[g];
            }
            for (int w = 0; w < width; w += STRIP) { /* as many sums as stay in registers */
                const int some = width - w < STRIP ? width - w : STRIP;
                floats strip[group][STRIP];
                for (int g = 0; g < group; g++)
                    for (int i = 0; i < some; i++) strip[g][i] = sum[kv * group + g][w + i];
                for (int j = 0; j < num; j++) {
                    floats wide[STRIP];
                    widen(values + cell + kv * head_dim + j * stride + w * LANES, wide, some);
                    for (int g = 0; g < group; g++)
                        for (int i = 0; i < some; i++) strip[g][i] += weights[g][j] * wide[i];
                }
                for (int g = 0; g < group; g++)
                    for (int i = 0; i < some; i++) sum[kv * group + g][w + i] = strip[g][i];
            }
        }
        at += num;
    }
    for (int64_t h = 0; h < num_heads; h++) {
        float all = 0.0f;
        for (int j = 0; j < LANES; j++) all += total[h][j];
        for (int w = 0; w < width; w++) sum[h][w] *= 1.0f / all;
        narrow(sum[h], output + h * head_dim, width);
    }
}

/* queries and output [.., num_heads, head_dim], of which row r is number tokens[r]; keys and values [num_blocks,
   block_size, num_kv_heads, head_dim]; block_tables [num_rows, table_width]; row r sees positions[r] + 1 keys.
   head_dim is a multiple of LANES. A row is the work of one thread, or of as many as there are `num_parts`. */
void attend(const layer *of, const scalar *queries, const scalar *keys, const scalar *values, const int64_t *tokens,
            const int64_t *block_tables, const int64_t *positions, int64_t num_rows, int64_t table_width,
            int64_t num_parts, scalar *output) {
    const int64_t group = of->num_heads / of->num_kv_heads;
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t part = 0; part < num_parts; part++) {
            const int64_t token = tokens[row] * of->num_heads * of->head_dim;
            const int64_t first = of->num_kv_heads * part / num_parts;
            const int64_t num_kv = of->num_kv_heads * (part + 1) / num_parts - first;
#define ATTEND(width, group)                                                                                   \
    attend_row(of, width, group, queries + token, keys, values, block_tables + row * table_width,             \
               positions[row] + 1, first, num_kv, output + token)
#define SIZED(width)                                                                                          \
    switch (group) {                                                                                          \
        case 1: ATTEND(width, 1); break;                                                                      \
        case 2: ATTEND(width, 2); break;                                                                      \
        case 3: ATTEND(width, 3); break;                                                                      \
        case 4: ATTEND(width, 4); break;                                                                      \
        case 7: ATTEND(width, 7); break;                                                                      \
        case 8: ATTEND(width, 8); break;                                                                      \
        default: ATTEND(width, (int)group);                                                                   \
    }
            switch (of->head_dim / LANES) {
                case 4: SIZED(4) break;
                case 8: SIZED(8) break;
                default: SIZED((int)(of->head_dim / LANES))
            }
#undef SIZED
#undef ATTEND
        }
}
