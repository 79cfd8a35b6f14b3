/* Skinny GEMM: linear layers on the few rows of a decode step. Every weight is read once, so memory bandwidth is the
   limit. What blocked_gemm.c multiplies faster is passed on to it, and so are more rows; the caller knows where it can.

   Weights are read in the layout that oneDNN chose, so memory holds one copy, and oneDNN can multiply as well.
   The layout is blocks of `block_width` outputs; inside a block, all inputs follow each other, in bfloat16 two by two,

       [num_outputs / block_width, num_inputs / UNIT, block_width, UNIT]

   with unused outputs at the end of the last block. A unit is four bytes: UNIT inputs of one output. oneDNN does not
   promise this layout, so packed_block_width checks every weight, number by number.

   What is gained is the time in which oneDNN waits for memory. This code prefetches: while one strip of outputs is
   multiplied, the cache lines of another strip are requested; during a thread's last strip, those of its first strip of
   the weight that is multiplied next. Sums are float32, and rounded once.

   No sum depends on the number of threads. In bfloat16 without tiles, none depends on the number of rows either: whatever
   is multiplied here or by blocked_gemm.c is added up in the order of the inputs. */

#include "kernels.h"
#include "strips.h"
#ifdef BFLOAT16
#include "tiles.h"
#else
enum { TILE = 16 };
#endif

#if (defined(BFLOAT16) && defined(__AVX512BF16__)) || (!defined(BFLOAT16) && defined(__AVX512F__))

#include <immintrin.h>
#include <stddef.h>

enum { LINE = 64 / sizeof(scalar), UNIT = 4 / sizeof(scalar) }; /* the scalars of a cache line, and of a unit */
/* The sums of GROUP rows stay in registers. More rows are multiplied a group at a time, while a strip is in the cache:
   it is read from memory once. From MIN_ROWS_FOR_TILES rows on, tiles are faster than vectors. */
enum { GROUP = 14, MAX_ROWS_IN_TWO_CHAINS = 4, MAX_ROWS = 2 * TILE, MIN_ROWS_FOR_TILES = 3 };
enum { MAX_ROWS_OF_PANELS = 6 }; /* that blocked_gemm multiplies in one pass */

typedef uint32_t unit __attribute__((may_alias)); /* in bfloat16 two scalars, the first one in the lower half */

static int has_tiles = 0; /* set by skinny_gemm_max_rows */

int64_t skinny_gemm_max_rows(void) {
#ifdef HAS_TILES
    has_tiles = may_use_tiles();
#endif
    return MAX_ROWS;
}

int64_t blocked_gemm_block_width(void) {
#ifdef BFLOAT16
    if (!has_tiles) return BLOCKED_GEMM_WIDTH;
#endif
    return 0;
}

static inline int64_t num_blocks(int64_t num_outputs, int64_t width) { return (num_outputs + width - 1) / width; }

int64_t packed_block_width(const scalar *weight, const scalar *packed, int64_t num_outputs, int64_t num_inputs,
                           int64_t num_bytes) {
    if (num_inputs % LINE) return 0;
    for (int64_t width = STRIP; width <= 2 * STRIP; width += STRIP) {
        if (num_bytes != num_blocks(num_outputs, width) * width * num_inputs * (int64_t)sizeof(scalar)) continue;
        int64_t num_different = 0;
#pragma omp parallel for reduction(+ : num_different)
        for (int64_t output = 0; output < num_outputs; output++) {
            const unit *original = (const unit *)(weight + output * num_inputs);
            const unit *found = (const unit *)packed + output / width * width * num_inputs / UNIT + output % width;
            for (int64_t i = 0; i < num_inputs / UNIT; i++) num_different += original[i] != found[i * width];
        }
        if (num_different == 0) return width;
    }
    return 0;
}

/* -- one strip ---------------------------------------------------------------------------------------------------- */

#define UNROLLED _Pragma("GCC unroll 16")

static inline __attribute__((always_inline)) void add_unit(floats *sums, const scalar *weights, unit inputs) {
#ifdef BFLOAT16
    const __m512bh both = (__m512bh)_mm512_set1_epi32((int)inputs);
    for (int half = 0; half < 2; half++)
        sums[half] = (floats)_mm512_dpbf16_ps((__m512)sums[half],
                                              (__m512bh)_mm512_loadu_si512(weights + half * LINE), both);
#else
    const __m512 input = (__m512)_mm512_set1_epi32((int)inputs);
    for (int half = 0; half < 2; half++)
        sums[half] = (floats)_mm512_fmadd_ps(_mm512_loadu_ps(weights + half * LINE), input, (__m512)sums[half]);
#endif
}

/* sums [num_rows, STRIP] = x W' for one strip of outputs. num_rows is a constant wherever this is inlined, so that the
   sums stay in registers. `stride` is from one unit of inputs to the next, in scalars. The lines at `next` are dense. */
static inline __attribute__((always_inline)) void strip_by_vectors(float *sums, const int num_rows,
                                                                   const int has_two_chains, const scalar *x,
                                                                   const scalar *weights, int64_t stride,
                                                                   const scalar *next, int64_t num_inputs) {
    /* has_two_chains is another constant. No pointer selects the chain, and every loop over rows is unrolled: otherwise
       compilers keep the sums in memory. */
    floats even[GROUP][2], odd[GROUP][2];
    memset(even, 0, sizeof even);
    memset(odd, 0, sizeof odd);
    const unit *units = (const unit *)x;
    const int64_t num_units = num_inputs / UNIT;
    for (int64_t u = 0; u < num_units; u += 2, weights += 2 * stride, next += 4 * LINE) {
        UNROLLED for (int line = 0; line < 4; line++) prefetch(next + line * LINE);
        UNROLLED for (int r = 0; r < num_rows; r++) add_unit(even[r], weights, units[r * num_units + u]);
        UNROLLED for (int r = 0; r < num_rows; r++) {
            const unit inputs = units[r * num_units + u + 1];
            if (has_two_chains) add_unit(odd[r], weights + stride, inputs);
            else add_unit(even[r], weights + stride, inputs);
        }
    }
    UNROLLED for (int r = 0; r < num_rows; r++)
        UNROLLED for (int half = 0; half < 2; half++)
            *(floats *)(sums + r * STRIP + half * LANES) = even[r][half] + odd[r][half];
}

/* Whether few rows have two chains of sums, while registers last, because each sum waits for the one before it. Not in
   bfloat16 without tiles: blocked_gemm has one, and multiplies by the same weight when there are other numbers of rows or
   of threads. */
static inline int have_two_chains(int64_t num_rows) {
#ifdef BFLOAT16
    if (!has_tiles) return 0;
#endif
    return num_rows <= MAX_ROWS_IN_TWO_CHAINS;
}

#define STRIP_OF(num_rows, chains) \
    case num_rows: strip_by_vectors(sums, num_rows, chains == 2, x, weights, stride, next, num_inputs); break;

static void strip_of_group(float *sums, int64_t num_rows, const scalar *x, const scalar *weights, int64_t stride,
                           const scalar *next, int64_t num_inputs) {
    if (have_two_chains(num_rows)) switch (num_rows) { STRIP_OF(1, 2) STRIP_OF(2, 2) STRIP_OF(3, 2) STRIP_OF(4, 2) }
    else switch (num_rows) { STRIP_OF(1, 1) STRIP_OF(2, 1) STRIP_OF(3, 1) STRIP_OF(4, 1) STRIP_OF(5, 1) STRIP_OF(6, 1)
                            STRIP_OF(7, 1) STRIP_OF(8, 1) STRIP_OF(9, 1) STRIP_OF(10, 1) STRIP_OF(11, 1)
                            STRIP_OF(12, 1) STRIP_OF(13, 1) STRIP_OF(14, 1) }
}

static void strip_of_rows_by_vectors(float *sums, int64_t num_rows, const scalar *x, const scalar *weights,
                                     int64_t stride, const scalar *next, int64_t num_inputs) {
    /* Groups of nearly equal size: a group of one row takes longer than its share, because its sums wait for each other. */
    for (int64_t num_left = num_rows, num_groups = (num_rows + GROUP - 1) / GROUP; num_groups; num_groups--) {
        const int64_t size = (num_left + num_groups - 1) / num_groups;
        strip_of_group(sums, size, x, weights, stride, next, num_inputs);
        num_left -= size, sums += size * STRIP, x += size * num_inputs;
        next = weights; /* what is in the cache already: the first group has prefetched the next strip */
    }
}

#ifdef HAS_TILES
static inline __attribute__((always_inline)) void strip_by_tiles(float *sums, const int has_two_tiles, const scalar *x,
                                                                 const scalar *weights, int64_t stride,
                                                                 const scalar *next, int64_t num_inputs) {
    const long x_bytes = 2 * num_inputs, bytes = 2 * stride, sums_bytes = STRIP * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < num_inputs; i += 2 * TILE, weights += TILE * stride) {
        for (const scalar *end = next + 2 * TILE * STRIP; next < end; next += LINE) prefetch(next);
        _tile_loadd(4, x + i, x_bytes);
        _tile_loadd(6, weights, bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + LINE, bytes);
        _tile_dpbf16ps(1, 4, 7);
        if (has_two_tiles) {
            _tile_loadd(5, x + TILE * num_inputs + i, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, sums_bytes);
    _tile_stored(1, sums + LANES, sums_bytes);
    if (has_two_tiles) {
        _tile_stored(2, sums + TILE * STRIP, sums_bytes);
        _tile_stored(3, sums + TILE * STRIP + LANES, sums_bytes);
    }
}
#else
#define shape_tiles(...) ((void)0)
#define _tile_release() ((void)0)
#define strip_by_tiles(...) ((void)0)
#endif

/* -- one weight --------------------------------------------------------------------------------------------------- */

static void multiply_strips_of_thread(const packed_weight *packed, const scalar *x, const scalar *residual,
                                      scalar *output, int64_t num_rows) {
    float sums[MAX_ROWS * STRIP];
    const prepared_weight *weight = &packed->base;
    const int by_tiles = has_tiles && num_rows >= MIN_ROWS_FOR_TILES;
    const int64_t num_inputs = weight->num_inputs, width = packed->block_width, stride = UNIT * width;
    const int64_t strips_per_block = width / STRIP;
    const strip_range strips = strips_of_thread(weight);
    if (by_tiles) shape_tiles(num_rows, TILE);
    for (int64_t i = strips.first; i < strips.end; i++) {
        const scalar *block = (const scalar *)weight->data + i / strips_per_block * width * num_inputs;
        const scalar *weights = block + i % strips_per_block * 2 * LINE;
        /* The strips of a block are interleaved. With each strip of this block, a dense half of the next block is
           prefetched. */
        const void *following = strip_to_prefetch(weight, strips, i + strips_per_block);
        const scalar *next = following ? following : weights;
        if (!by_tiles) strip_of_rows_by_vectors(sums, num_rows, x, weights, stride, next, num_inputs);
        else if (num_rows > TILE) strip_by_tiles(sums, 1, x, weights, stride, next, num_inputs);
        else strip_by_tiles(sums, 0, x, weights, stride, next, num_inputs);
        finish_strip(weight, sums, NULL, i * STRIP, residual, output, num_rows);
    }
    if (by_tiles) _tile_release();
}

static void multiply_strips(const prepared_weight *weight, const scalar *x, const scalar *residual, scalar *output,
                            int64_t num_rows) {
    const int64_t began_ns = begin_region();
#pragma omp parallel
    {
        multiply_strips_of_thread((const packed_weight *)weight, x, residual, output, num_rows);
        end_work();
    }
    if (is_even(weight)) end_region(began_ns);
}

void skinny_gemm(const prepared_weight *weight, const scalar *x, const scalar *residual, scalar *output,
                 int64_t num_rows, void *workspace) {
#ifdef BFLOAT16
    const int is_blocked = ((const packed_weight *)weight)->block_width == blocked_gemm_block_width();
    /* Panels are as fast as reading while their rows are one tile; a group of strips takes more rows in one pass. */
    const int is_one_pass = num_rows > MAX_ROWS_OF_PANELS && num_rows <= GROUP;
    if (is_blocked && (num_rows > MAX_ROWS || (!is_one_pass && has_panels_for_all(weight)))) {
        blocked_gemm(weight, x, residual, output, num_rows, workspace);
        return;
    }
#else
    (void)workspace;
#endif
    for (; num_rows > MAX_ROWS; num_rows -= MAX_ROWS) {
        multiply_strips(weight, x, residual, output, MAX_ROWS);
        x += MAX_ROWS * weight->num_inputs, output += MAX_ROWS * weight->num_outputs;
        if (residual) residual += MAX_ROWS * weight->num_outputs;
    }
    multiply_strips(weight, x, residual, output, num_rows);
}

#else
int64_t skinny_gemm_max_rows(void) { return 0; }
int64_t blocked_gemm_block_width(void) { return 0; }
#endif
