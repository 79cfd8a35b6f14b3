/* Linear layers of few rows, as decode steps have them: every weight is read once, and hardly anything computed.

   Weights are read where oneDNN has laid them out for itself, so there is one copy of them, and prompts are multiplied by
   oneDNN as ever: blocks of `width` outputs, in each of which all inputs follow each other two by two,

       [num_outputs / width, num_inputs / 2, width, 2]

   with outputs that nobody asked for at the end of the last block. That it is so is seen, weight by weight, not assumed.

   What is won is the time in which oneDNN waits for memory. Here the processor is told what comes next: while one strip of
   outputs is multiplied, the lines of another are asked for, and with a thread's last strip its first ones of the weight
   that is multiplied after this one. Sums are float32, and rounded once. */

#include "vectors.h"

#if defined(BFLOAT16) && defined(__AVX512BF16__)

#include <immintrin.h>
#include <omp.h>
#include <stddef.h>

#if defined(__AMX_BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { STRIP = 2 * LANES, LINE = 32 };
enum { ROWS_OF_VECTORS = 8, TILE = 16, ROWS_OF_TILES = 2 * TILE, WORTH_A_TILE = 3 };

typedef uint32_t pair __attribute__((may_alias)); /* two scalars, the first one in the lower half */

typedef struct linear {
    const scalar *packed, *bias; /* no bias is NULL */
    int64_t num_inputs, num_outputs, width;
    const struct linear *next; /* whose weights are wanted after these */
} linear;

static int64_t most_rows = 0; /* that are multiplied at once; 0 until somebody asks */

/* How many rows may come; 0 is none. The kernel gives tiles only to processes that ask for them. */
int64_t most_few_rows(void) {
    most_rows = ROWS_OF_VECTORS;
#ifdef TILES
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0) most_rows = ROWS_OF_TILES;
#endif
    return most_rows;
}

static inline int64_t blocks_of(int64_t num_outputs, int64_t width) { return (num_outputs + width - 1) / width; }

/* The width of the blocks in which `packed` holds weight [num_outputs, num_inputs]; 0 if it holds it in another way. */
int64_t width_of_blocks(const scalar *weight, const scalar *packed, int64_t num_outputs, int64_t num_inputs,
                        int64_t num_bytes) {
    if (num_inputs % LINE) return 0;
    for (int64_t width = STRIP; width <= 2 * STRIP; width += STRIP) {
        if (num_bytes != blocks_of(num_outputs, width) * width * num_inputs * (int64_t)sizeof(scalar)) continue;
        int64_t num_others = 0;
#pragma omp parallel for reduction(+ : num_others)
        for (int64_t output = 0; output < num_outputs; output++) {
            const pair *from = (const pair *)(weight + output * num_inputs);
            const pair *in = (const pair *)packed + output / width * width * num_inputs / 2 + output % width;
            for (int64_t i = 0; i < num_inputs / 2; i++) num_others += from[i] != in[i * width];
        }
        if (num_others == 0) return width;
    }
    return 0;
}

/* -- one strip ---------------------------------------------------------------------------------------------------- */

/* Into the second level, for the first is small; a strip of 2048 inputs is 128 KiB. */
static inline void fetch(const scalar *line) { __builtin_prefetch(line, 0, 2); }

static inline void add_pair(floats *sums, const scalar *weights, pair inputs) {
    const __m512bh both = (__m512bh)_mm512_set1_epi32((int)inputs);
    for (int half = 0; half < 2; half++)
        sums[half] = (floats)_mm512_dpbf16_ps((__m512)sums[half],
                                              (__m512bh)_mm512_loadu_si512(weights + half * LINE), both);
}

/* `num` is the number of rows, and a constant wherever this is inlined, so that their sums stay in registers. Input pairs
   are `stride` scalars apart; what is asked for lies in a row. */
static inline __attribute__((always_inline)) void strip_by_vectors(float *sums, const int num, const scalar *x,
                                                                   const scalar *weights, int64_t stride,
                                                                   const scalar *ahead, int64_t num_inputs) {
    floats even[num][2], odd[num][2]; /* two of each while registers last, for a sum waits for the one before it */
    memset(even, 0, sizeof even), memset(odd, 0, sizeof odd);
    floats(*other)[2] = num <= 4 ? odd : even;
    const pair *pairs = (const pair *)x;
    const int64_t num_pairs = num_inputs / 2;
    for (int64_t p = 0; p < num_pairs; p += 2, weights += 2 * stride, ahead += 4 * LINE) {
        for (int line = 0; line < 4; line++) fetch(ahead + line * LINE);
        for (int r = 0; r < num; r++) add_pair(even[r], weights, pairs[r * num_pairs + p]);
        for (int r = 0; r < num; r++) add_pair(other[r], weights + stride, pairs[r * num_pairs + p + 1]);
    }
    for (int r = 0; r < num; r++)
        for (int half = 0; half < 2; half++)
            *(floats *)(sums + r * STRIP + half * LANES) = even[r][half] + odd[r][half];
}

#define STRIP_OF(num) \
    case num: strip_by_vectors(sums, num, x, weights, stride, ahead, num_inputs); break;

static void any_strip_by_vectors(float *sums, int64_t num_rows, const scalar *x, const scalar *weights, int64_t stride,
                                 const scalar *ahead, int64_t num_inputs) {
    switch (num_rows) { STRIP_OF(1) STRIP_OF(2) STRIP_OF(3) STRIP_OF(4) STRIP_OF(5) STRIP_OF(6) STRIP_OF(7) STRIP_OF(8) }
}

#ifdef TILES
/* Tiles by number: sums of the first rows 0 1, of the second 2 3; inputs 4 5; weights 6 7. */
static void shape_tiles(int64_t num_rows) {
    struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    const uint8_t first = (uint8_t)(num_rows < TILE ? num_rows : TILE);
    const uint8_t second = (uint8_t)(num_rows > TILE ? num_rows - TILE : 1);
    const uint8_t rows[8] = {first, first, second, second, first, second, TILE, TILE};
    for (int tile = 0; tile < 8; tile++) shape.rows[tile] = rows[tile], shape.bytes[tile] = 64;
    _tile_loadconfig(&shape);
}

static inline __attribute__((always_inline)) void strip_by_tiles(float *sums, const int is_more_than_a_tile,
                                                                 const scalar *x, const scalar *weights, int64_t stride,
                                                                 const scalar *ahead, int64_t num_inputs) {
    const long x_bytes = 2 * num_inputs, bytes = 2 * stride, sums_bytes = STRIP * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < num_inputs; i += 2 * TILE, weights += TILE * stride) {
        for (const scalar *end = ahead + 2 * TILE * STRIP; ahead < end; ahead += LINE) fetch(ahead);
        _tile_loadd(4, x + i, x_bytes);
        _tile_loadd(6, weights, bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + LINE, bytes);
        _tile_dpbf16ps(1, 4, 7);
        if (is_more_than_a_tile) {
            _tile_loadd(5, x + TILE * num_inputs + i, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, sums_bytes);
    _tile_stored(1, sums + LANES, sums_bytes);
    if (is_more_than_a_tile) {
        _tile_stored(2, sums + TILE * STRIP, sums_bytes);
        _tile_stored(3, sums + TILE * STRIP + LANES, sums_bytes);
    }
}
#else
static void shape_tiles(int64_t num_rows) { (void)num_rows; }
static void _tile_release(void) {}
#define strip_by_tiles(...) ((void)0)
#endif

/* -- one weight --------------------------------------------------------------------------------------------------- */

/* sums [num_rows, STRIP] + bias + to -> output, for those from `first` on; both have as many columns as there are outputs. */
static void finish_strip(const linear *of, const float *sums, int64_t first, const scalar *to, scalar *output,
                         int64_t num_rows) {
    const int64_t num_outputs = of->num_outputs, left = num_outputs - first;
    for (int64_t row = 0; row < num_rows; row++, sums += STRIP) {
        const int64_t at = row * num_outputs + first;
        if (left >= STRIP) {
            for (int64_t i = 0; i < STRIP; i += LANES) {
                floats sum = *(const floats *)(sums + i);
                if (of->bias) sum += load(of->bias + first + i);
                if (to) sum += load(to + at + i);
                store(output + at + i, sum);
            }
        } else {
            for (int64_t i = 0; i < left; i++) {
                const float bias = of->bias ? widened(of->bias[first + i]) : 0.0f;
                output[at + i] = narrowed(sums[i] + bias + (to ? widened(to[at + i]) : 0.0f));
            }
        }
    }
}

/* A thread's strips, from `first` to `end`. */
typedef struct { int64_t first, end; } share;

static inline share share_of(const linear *of) {
    const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
    const int64_t num_strips = blocks_of(of->num_outputs, STRIP);
    return (share){num_strips * thread / num_threads, num_strips * (thread + 1) / num_threads};
}

static void multiply_share(const linear *of, const scalar *x, const scalar *to, scalar *output, int64_t num_rows) {
    float sums[ROWS_OF_TILES * STRIP];
    const int by_tiles = num_rows >= WORTH_A_TILE && most_rows > ROWS_OF_VECTORS;
    const int64_t num_inputs = of->num_inputs, a_block = of->width / STRIP, stride = 2 * of->width;
    const linear *next = of->next;
    const share mine = share_of(of);
    const int64_t first_of_next = next ? share_of(next).first : 0;
    if (by_tiles) shape_tiles(num_rows);
    for (int64_t i = mine.first; i < mine.end; i++) {
        const scalar *weights = of->packed + i / a_block * of->width * num_inputs + i % a_block * 2 * LINE;
        /* A block's strips lie between each other: half of the next block is asked for with each, in one row. */
        const int64_t ahead = i + a_block;
        const scalar *wanted = weights; /* nothing: what is here already */
        if (ahead < mine.end) wanted = of->packed + ahead * STRIP * num_inputs;
        else if (next) wanted = next->packed + (first_of_next + ahead - mine.end) * STRIP * next->num_inputs;
        if (!by_tiles) any_strip_by_vectors(sums, num_rows, x, weights, stride, wanted, num_inputs);
        else if (num_rows > TILE) strip_by_tiles(sums, 1, x, weights, stride, wanted, num_inputs);
        else strip_by_tiles(sums, 0, x, weights, stride, wanted, num_inputs);
        finish_strip(of, sums, i * STRIP, to, output, num_rows);
    }
    if (by_tiles) _tile_release();
}

/* x [num_rows, num_inputs] W' + bias + to -> output [num_rows, num_outputs], all dense; `to` may be NULL, or the output. */
void multiply_few_rows(const linear *of, const scalar *x, const scalar *to, scalar *output, int64_t num_rows) {
#pragma omp parallel
    multiply_share(of, x, to, output, num_rows);
}

/* -- a whole decoder ---------------------------------------------------------------------------------------------- */

void norm(const scalar *x, const scalar *weight, scalar *output, int64_t num_rows, int64_t size, float epsilon);
void swiglu(const scalar *gate_up, scalar *output, int64_t num_rows, int64_t size);
void rotate_write_and_attend(const void *of, scalar *key_pages, scalar *value_pages, int64_t num_tokens,
                             const int64_t *slot_mapping, int64_t num_rows, const int32_t *query_starts,
                             const int32_t *lengths, const int32_t *block_tables, int64_t table_width, scalar *qkv,
                             const scalar *cosines, const scalar *sines, const scalar *query_norm,
                             const scalar *key_norm, float epsilon, scalar *output);

typedef struct {
    const linear *qkv, *output, *gate_up, *down;
    const scalar *attention_norm, *mlp_norm, *query_norm, *key_norm; /* the last two are NULL where heads have none */
    float attention_epsilon, mlp_epsilon, head_epsilon;
} decoder_layer;

typedef struct {
    const void *of; /* paged_attention.c knows what it is */
    scalar *key_pages, *value_pages;
} layer_pages;

/* x [num_tokens, size] becomes what `num_layers` layers make of it. What is in between is paged_attention.c's; cosines and
   sines are [num_tokens, head_dim], and `room` is for as many scalars a token as its five uses add up to.

   All layers in one call, for a thread that waits longer than some microseconds goes to sleep, and to be woken takes it
   longer than to multiply: Python between two calls is long enough. */
void decode_few_rows(const decoder_layer *layers, const layer_pages *pages, int64_t num_layers, int64_t num_tokens,
                     const int64_t *slot_mapping, int64_t num_rows, const int32_t *query_starts, const int32_t *lengths,
                     const int32_t *block_tables, int64_t table_width, const scalar *cosines, const scalar *sines,
                     scalar *x, scalar *room) {
    for (int64_t i = 0; i < num_layers; i++) {
        const decoder_layer *each = layers + i;
        const int64_t size = each->qkv->num_inputs, inner = each->down->num_inputs;
        scalar *normed = room, *qkv = normed + num_tokens * size, *attended = qkv + num_tokens * each->qkv->num_outputs;
        scalar *gate_up = attended + num_tokens * each->output->num_inputs, *opened = gate_up + num_tokens * 2 * inner;
        norm(x, each->attention_norm, normed, num_tokens, size, each->attention_epsilon);
        multiply_few_rows(each->qkv, normed, NULL, qkv, num_tokens);
        rotate_write_and_attend(pages[i].of, pages[i].key_pages, pages[i].value_pages, num_tokens, slot_mapping, num_rows,
                                query_starts, lengths, block_tables, table_width, qkv, cosines, sines,
                                each->query_norm, each->key_norm, each->head_epsilon, attended);
        multiply_few_rows(each->output, attended, x, x, num_tokens);
        norm(x, each->mlp_norm, normed, num_tokens, size, each->mlp_epsilon);
        multiply_few_rows(each->gate_up, normed, NULL, gate_up, num_tokens);
        swiglu(gate_up, opened, num_tokens, inner);
        multiply_few_rows(each->down, opened, x, x, num_tokens);
    }
}

#else
int64_t most_few_rows(void) { return 0; }
#endif
