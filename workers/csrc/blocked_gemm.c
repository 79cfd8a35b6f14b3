/* Blocked GEMM: linear layers on any number of rows, in bfloat16 on processors without AMX. With more than some 16 rows,
   the processor's multiplications are the limit.

   Weights are read in oneDNN's layout, see skinny_gemm.c. A panel is a block of that layout: PANEL outputs and all inputs.
   The sums of a tile, some rows and a panel's outputs, stay in registers for all inputs, because a sum that is stored and
   loaded again takes the place of a multiplication. For each pair of inputs a tile loads four vectors of weights and one
   pair of each row: ten loads for 24 multiplications, where a processor that starts two multiplications in a cycle also
   starts two loads. A panel stays in the second-level cache for the rows of a block.

   With few rows, reading the weights is the limit. A panel is read from its first byte to its last: a strip of
   skinny_gemm.c is half of each 256 bytes, which takes longer to read. Threads take panels in turn, and each one prefetches
   its next panel while it multiplies. With many rows, threads take tasks, a panel and a block of rows each, when they have
   time.

   Compact panels hold the same weights in fewer bytes, see compact_panels.h. Each tile decodes its panel while it
   multiplies. The processor has units for that which multiplications do not use, so for many rows it takes some 2 % more
   time; to keep a decoded panel for the next tile takes more, because a store allocates a cache line (write-allocate).

   An output is the sum of its products in their order, for any number of rows and threads, and in both layouts. */

#include "compact_panels.h"
#include "kernels.h"
#include "strips.h"

#if defined(BFLOAT16) && defined(__AVX512BF16__)

#include <immintrin.h>
#include <stddef.h>

enum { TILE_ROWS = 6, PANEL = BLOCKED_GEMM_WIDTH, TILE_VECTORS = PANEL / LANES }; /* the sums are 24 of the 32 registers */
/* Rows of this many share a panel in the second-level cache. Fewer, if there are too few tasks for all threads. */
enum { MAX_BLOCK_ROWS = 32 * TILE_ROWS, MIN_BLOCK_ROWS = 4 * TILE_ROWS };
enum { MAX_ROWS_IN_TURN = 8 };

typedef floats tile_sums[TILE_VECTORS];

/* sums [num_rows, PANEL] = x W' for the panel `weights`. num_rows, is_compact and lines_ahead, the cache lines at `next`
   that are prefetched for each pair of inputs, are constants wherever this is inlined. */
static inline __attribute__((always_inline)) void multiply_tile(tile_sums *sums, const int num_rows,
                                                                const int is_compact, const int lines_ahead,
                                                                const scalar *x, const uint8_t *weights,
                                                                const uint8_t *next, int64_t num_inputs) {
    __m512 sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] = _mm512_setzero_ps();
#ifdef HAS_COMPACT_PANELS
    const __m512i upper_bytes = _mm512_loadu_si512(weights);
    const uint8_t *masks = weights + 64;
    uint64_t is_plain = 0;
    if (is_compact) weights += compact_header_bytes(num_inputs);
#endif
    for (int64_t i = 0; i < num_inputs; i += 2, next += lines_ahead * 64) {
        __m512bh weight[TILE_VECTORS];
#ifdef HAS_COMPACT_PANELS
        if (is_compact && i % (2 * PAIRS_OF_MASK) == 0) {
            memcpy(&is_plain, masks, sizeof is_plain);
            masks += sizeof is_plain;
        }
        const int is_record_compact = is_compact && !(is_plain & 1);
        is_plain >>= 1;
        if (__builtin_expect(is_record_compact, is_compact)) {
            read_compact_record(weight, weights, upper_bytes);
            weights += COMPACT_RECORD_BYTES;
        } else
#endif
        {
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) weight[v] = (__m512bh)_mm512_loadu_si512(weights + v * 64);
            weights += TILE_VECTORS * 64;
        }
#pragma GCC unroll 4
        for (int line = 0; line < lines_ahead; line++) prefetch(next + line * 64);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * num_inputs + i, sizeof pair);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], weight[v], both);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] = (floats)sum[r][v];
}

#define TILE_OF(num_rows, is_compact, lines_ahead) \
    case num_rows: multiply_tile(sums, num_rows, is_compact, lines_ahead, x, weights, next, num_inputs); break;
#define TILES(is_compact, lines_ahead) \
    switch (num_rows) { \
        TILE_OF(1, is_compact, lines_ahead) TILE_OF(2, is_compact, lines_ahead) TILE_OF(3, is_compact, lines_ahead) \
        TILE_OF(4, is_compact, lines_ahead) TILE_OF(5, is_compact, lines_ahead) TILE_OF(6, is_compact, lines_ahead) \
    }

/* A panel has four lines for each pair of inputs, and a compact one three. */
static void tile_of_rows(tile_sums *sums, int64_t num_rows, int is_compact, int64_t lines_ahead, const scalar *x,
                         const uint8_t *weights, const uint8_t *next, int64_t num_inputs) {
#ifdef HAS_COMPACT_PANELS
    if (is_compact) {
        if (lines_ahead == 0) TILES(1, 0)
        else if (lines_ahead == 1) TILES(1, 1)
        else if (lines_ahead == 2) TILES(1, 2)
        else TILES(1, 3)
        return;
    }
#endif
    if (lines_ahead == 0) TILES(0, 0)
    else if (lines_ahead == 1) TILES(0, 1)
    else if (lines_ahead == 2) TILES(0, 2)
    else TILES(0, 4)
}

/* output = sums [num_rows, PANEL] + bias + residual, for the outputs from `first` on. */
static void finish_tile(const prepared_weight *weight, const tile_sums *sums, int64_t first, const scalar *residual,
                        scalar *output, int64_t num_rows) {
    if (weight->num_outputs - first < PANEL) { /* the last panel is not full */
        for (int64_t from = 0; from < PANEL && first + from < weight->num_outputs; from += STRIP) {
            float of_strip[TILE_ROWS * STRIP];
            for (int64_t row = 0; row < num_rows; row++)
                memcpy(of_strip + row * STRIP, (const float *)sums[row] + from, STRIP * sizeof *of_strip);
            finish_strip(weight, of_strip, NULL, first + from, residual, output, num_rows);
        }
        return;
    }
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t v = 0; v < TILE_VECTORS; v++) {
            const int64_t i = first + v * LANES, offset = row * weight->num_outputs + i;
            floats sum = sums[row][v];
            if (weight->bias) sum += load(weight->bias + i);
            if (residual) sum += load(residual + offset);
            store(output + offset, sum);
        }
}

/* One task: the panel `index`, and num_rows rows. While they are multiplied, the data at `next`, as large as a panel, are
   prefetched; NULL: nothing. */
static void multiply_panel(const prepared_weight *weight, int is_compact, int64_t index, const uint8_t *next,
                           const scalar *x, const scalar *residual, scalar *output, int64_t num_rows) {
    const int64_t num_inputs = weight->num_inputs, num_outputs = weight->num_outputs;
    const int64_t panel_bytes = weight->strip_bytes * (PANEL / STRIP);
    const uint8_t *weights = weight->data + index * panel_bytes;
    /* Lines for each pair of inputs that are not prefetched yet. The first tiles prefetch them in equal parts, because
       memory delivers them no faster. */
    int64_t lines_left = !next ? 0 : is_compact ? 3 : 4;
    /* Tiles of nearly equal size: one of few rows takes longer than its share, because its sums wait for each other. */
    int64_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t row = 0; num_tiles; num_tiles--) {
        tile_sums sums[TILE_ROWS];
        const int64_t rows = (num_rows - row + num_tiles - 1) / num_tiles;
        const int64_t lines = (lines_left + num_tiles - 1) / num_tiles;
        tile_of_rows(sums, rows, is_compact, lines, x + row * num_inputs, weights, next, num_inputs);
        if (lines) next += lines * num_inputs / 2 * 64;
        lines_left -= lines;
        const int64_t offset = row * num_outputs;
        finish_tile(weight, sums, index * PANEL, residual ? residual + offset : NULL, output + offset, rows);
        row += rows;
    }
}

/* What the thread that multiplies panel `index` multiplies next, if threads take panels in turn; NULL if nothing does. */
static const uint8_t *panel_to_prefetch(const prepared_weight *weight, int64_t index) {
    const int64_t panel_strips = PANEL / STRIP, following = panel_strips * (index + omp_get_num_threads());
    if (following * STRIP < weight->num_outputs) return weight->data + following * weight->strip_bytes;
    const prepared_weight *next = weight->next;
    return next ? next->data + omp_get_thread_num() * panel_strips * next->strip_bytes : NULL;
}

static void multiply_panels(const prepared_weight *weight, int is_compact, const scalar *x, const scalar *residual,
                            scalar *output, int64_t num_rows) {
    const int64_t num_panels = (weight->num_outputs + PANEL - 1) / PANEL;
    const int64_t num_inputs = weight->num_inputs, num_outputs = weight->num_outputs;
    if (num_rows <= MAX_BLOCK_ROWS && has_panels_for_all(weight)) {
        const int64_t began_ns = begin_region();
#pragma omp parallel
        {
            /* The time of few rows is even, because it is that of reading. Of more rows, a thread takes another one's
               panels while that has no core. */
            if (num_rows <= MAX_ROWS_IN_TURN) {
#pragma omp for schedule(static, 1) nowait
                for (int64_t panel = 0; panel < num_panels; panel++)
                    multiply_panel(weight, is_compact, panel, panel_to_prefetch(weight, panel), x, residual, output,
                                   num_rows);
            } else {
#pragma omp for schedule(dynamic, 1) nowait
                for (int64_t panel = 0; panel < num_panels; panel++)
                    multiply_panel(weight, is_compact, panel, panel_to_prefetch(weight, panel), x, residual, output,
                                   num_rows);
            }
            end_work();
        }
        end_region(began_ns);
        return;
    }
    int64_t block_rows = MAX_BLOCK_ROWS;
    while (block_rows > MIN_BLOCK_ROWS &&
           num_panels * ((num_rows + block_rows - 1) / block_rows) < MIN_TASKS_PER_THREAD * omp_get_max_threads())
        block_rows /= 2;
    const int64_t num_tasks = num_panels * ((num_rows + block_rows - 1) / block_rows);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t task = 0; task < num_tasks; task++) {
        const int64_t row = task / num_panels * block_rows, left = num_rows - row;
        multiply_panel(weight, is_compact, task % num_panels, NULL, x + row * num_inputs,
                       residual ? residual + row * num_outputs : NULL, output + row * num_outputs,
                       left < block_rows ? left : block_rows);
    }
}

void blocked_gemm(const prepared_weight *weight, const scalar *x, const scalar *residual, scalar *output,
                  int64_t num_rows, void *workspace) {
    (void)workspace;
    multiply_panels(weight, 0, x, residual, output, num_rows);
}

#ifdef HAS_COMPACT_PANELS
void compact_gemm(const prepared_weight *weight, const scalar *x, const scalar *residual, scalar *output,
                  int64_t num_rows, void *workspace) {
    (void)workspace;
    multiply_panels(weight, 1, x, residual, output, num_rows);
}
#endif

#endif
