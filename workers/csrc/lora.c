/* What LoRA adapters add to a product of a weight: y += (x A') B', with the A and B of each row's adapter.

   A runs over all inputs and B over all outputs of the weight, but their rank is small, so the work is that of reading
   both. They are read once for up to 16 rows of an adapter, wherever in the step these rows are. Both have one layout,
   strips of 16 outputs, so one function multiplies by either:

       A  [rank / 16, num_inputs / PACK, 16, PACK]
       B  [num_outputs / 16, rank / PACK, 16, PACK]     PACK = 2 numbers of bfloat16, or 1 float

   The rank is a multiple of 16; rows of A and columns of B beyond the adapter's own are zeros. What the parts of a weight
   have of an adapter follows each other in memory, and so do places; runs are in order of their places. So all is read
   from lower to higher addresses. Vectors prefetch what is AHEAD, without which they would take twice as long; tiles are
   faster with the processor's own prefetching alone. */

#include <omp.h>
#include <stddef.h>

#include "kernels.h"
#include "products.h"
#include "tiles.h"

#if defined(BFLOAT16) && defined(HAS_TILES)
#define MULTIPLIES_BY_TILES
#endif

enum { MIN_PARALLEL_NUMBERS = 32768 }; /* of A and B; below this, one thread: to wake another one costs microseconds */
enum { MAX_ROWS_BY_VECTORS = 8 };      /* so many sums stay in registers */
enum { ROWS_OF_TWO_CHAINS = 4 };       /* with few rows, two sums for each, because each sum waits for the one before */
enum { LINE = sizeof(ints) / sizeof(scalar) }; /* the scalars of a cache line, those of 16 outputs for PACK inputs */
enum { AHEAD = 4096 / sizeof(scalar) };

/* -- one strip ---------------------------------------------------------------------------------------------------- */

/* sums [num_rows] = x W' for one strip. num_rows is a constant wherever this is inlined. */
INLINE void strip_by_vectors(floats *sums, const int num_rows, const scalar *const *x, const scalar *weights,
                             int64_t num_inputs) {
    floats even[MAX_ROWS_BY_VECTORS], odd[ROWS_OF_TWO_CHAINS];
    const int has_two_chains = num_rows <= ROWS_OF_TWO_CHAINS;
    UNROLLED for (int r = 0; r < num_rows; r++) even[r] = (floats){};
    if (has_two_chains) UNROLLED for (int r = 0; r < num_rows; r++) odd[r] = (floats){};
    const int lines = has_two_chains ? 2 : 1;
    for (int64_t i = 0; i < num_inputs; i += lines * PACK, weights += lines * LINE) {
        const ints first = load_ints(weights), second = has_two_chains ? load_ints(weights + LINE) : first;
        for (int line = 0; line < lines; line++) __builtin_prefetch(weights + AHEAD + line * LINE, 0, 3);
        UNROLLED for (int r = 0; r < num_rows; r++) {
            const packed *numbers = (const packed *)(x[r] + i);
            even[r] = add_products(even[r], first, numbers[0]);
            if (has_two_chains) odd[r] = add_products(odd[r], second, numbers[1]);
        }
    }
    UNROLLED for (int r = 0; r < num_rows; r++) {
        sums[r] = even[r];
        if (has_two_chains) sums[r] += odd[r];
    }
}

#define STRIP_OF(num_rows) \
    case num_rows: strip_by_vectors(sums, num_rows, x, weights, num_inputs); break;

static void strip_of_rows_by_vectors(floats *sums, int64_t num_rows, const scalar *const *x, const scalar *weights,
                                     int64_t num_inputs) {
    for (; num_rows > 0; num_rows -= MAX_ROWS_BY_VECTORS, sums += MAX_ROWS_BY_VECTORS, x += MAX_ROWS_BY_VECTORS) {
        switch (num_rows) {
            STRIP_OF(1) STRIP_OF(2) STRIP_OF(3) STRIP_OF(4) STRIP_OF(5) STRIP_OF(6) STRIP_OF(7)
        default: strip_by_vectors(sums, MAX_ROWS_BY_VECTORS, x, weights, num_inputs);
        }
    }
}

#ifdef MULTIPLIES_BY_TILES
enum { MIN_ROWS_FOR_TILES = 3 }; /* as in skinny_gemm.c */
enum { GATHERED = 512 };         /* inputs */

/* The inputs that one tile of a weight takes. */
INLINE int64_t tile_inputs(int64_t num_inputs) { return num_inputs % (2 * TILE) ? TILE : 2 * TILE; }

#define LOAD_X(from) _tile_loadd(4, from, GATHERED * sizeof(scalar))

/* Tile `sum` += tile 4, which is x, times the tile of a weight that begins here. */
#define ADD_TILE(sum, weight, from) \
    do { \
        _tile_loadd(weight, from, 64); \
        _tile_dpbf16ps(sum, 4, weight); \
    } while (0)

/* The same as strip_by_vectors, with tiles: four sums that are added in the end. */
static void strip_by_tiles(floats *sums, int64_t num_rows, const scalar *const *x, const scalar *weights,
                           int64_t num_inputs) {
    scalar gathered[TILE * GATHERED];
    floats parts[4][TILE];
    const int64_t step = tile_inputs(num_inputs);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t first = 0; first < num_inputs; first += GATHERED) {
        const int64_t count = num_inputs - first < GATHERED ? num_inputs - first : GATHERED;
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t i = 0; i < count; i += LANES)
                *(scalars *)(gathered + row * GATHERED + i) = *(const scalars *)(x[row] + first + i);
        int64_t i = 0;
        for (; i + 4 * step <= count; i += 4 * step, weights += 4 * step * LANES) {
            LOAD_X(gathered + i);
            ADD_TILE(0, 6, weights);
            LOAD_X(gathered + i + step);
            ADD_TILE(1, 7, weights + step * LANES);
            LOAD_X(gathered + i + 2 * step);
            ADD_TILE(2, 6, weights + 2 * step * LANES);
            LOAD_X(gathered + i + 3 * step);
            ADD_TILE(3, 7, weights + 3 * step * LANES);
        }
        for (; i < count; i += step, weights += step * LANES) {
            LOAD_X(gathered + i);
            ADD_TILE(0, 6, weights);
        }
    }
    _tile_stored(0, parts[0], sizeof(floats));
    _tile_stored(1, parts[1], sizeof(floats));
    _tile_stored(2, parts[2], sizeof(floats));
    _tile_stored(3, parts[3], sizeof(floats));
    for (int64_t row = 0; row < num_rows; row++)
        sums[row] = parts[0][row] + parts[1][row] + parts[2][row] + parts[3][row];
}

/* sums [4, TILE] = x W' for four strips. x: [num_rows, num_inputs], x_bytes from row to row. */
static void four_strips_by_tiles(floats *sums, const scalar *x, int64_t x_bytes, const scalar *weights,
                                 int64_t num_inputs) {
    const int64_t step = tile_inputs(num_inputs), strip = num_inputs * LANES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < num_inputs; i += step, weights += step * LANES) {
        _tile_loadd(4, x + i, x_bytes);
        ADD_TILE(0, 6, weights);
        ADD_TILE(1, 7, weights + strip);
        ADD_TILE(2, 6, weights + 2 * strip);
        ADD_TILE(3, 7, weights + 3 * strip);
    }
    _tile_stored(0, sums, sizeof(floats));
    _tile_stored(1, sums + TILE, sizeof(floats));
    _tile_stored(2, sums + 2 * TILE, sizeof(floats));
    _tile_stored(3, sums + 3 * TILE, sizeof(floats));
}

INLINE int is_by_tiles(int64_t num_rows) { return num_rows >= MIN_ROWS_FOR_TILES && may_use_tiles(); }
INLINE void begin_tiles(int64_t num_rows, int64_t num_inputs) {
    shape_tiles_of(num_rows, num_rows, tile_inputs(num_inputs) / 2);
}
INLINE void end_tiles(void) { _tile_release(); }
#else
#define is_by_tiles(...) 0
#define begin_tiles(...) ((void)0)
#define end_tiles() ((void)0)
#define strip_by_tiles(...) ((void)0)
#define four_strips_by_tiles(...) ((void)0)
#endif

/* -- one weight --------------------------------------------------------------------------------------------------- */

static inline const lora_part *parts_of(const lora_weight *weight, const lora_run *run) {
    return weight->parts + run->place * weight->num_parts;
}

/* hidden = x A' for the items from `first` to `end`, in order of run, part and strip. */
static void shrink(const lora_weight *weight, const lora_step *step, const scalar *x, int64_t first, int64_t end) {
    const int64_t num_strips = step->max_rank / LANES, num_parts = weight->num_parts, num_inputs = weight->num_inputs;
    const int64_t hidden_stride = num_parts * step->max_rank;
    for (int64_t item = first; item < end; item++) {
        const int64_t strip = item % num_strips, index = item / num_strips % num_parts;
        const lora_run *run = step->runs + item / num_strips / num_parts;
        const lora_part *part = parts_of(weight, run) + index;
        if (strip * LANES >= part->rank) continue;
        const scalar *rows[LORA_RUN_ROWS], *weights = part->a + strip * LANES * num_inputs;
        floats sums[LORA_RUN_ROWS];
        for (int64_t row = 0; row < run->num_rows; row++) rows[row] = x + step->rows[run->first + row] * num_inputs;
        if (is_by_tiles(run->num_rows)) {
            begin_tiles(run->num_rows, num_inputs);
            strip_by_tiles(sums, run->num_rows, rows, weights, num_inputs);
            end_tiles();
        } else {
            strip_of_rows_by_vectors(sums, run->num_rows, rows, weights, num_inputs);
        }
        scalar *hidden = step->hidden + run->first * hidden_stride + index * step->max_rank + strip * LANES;
        for (int64_t row = 0; row < run->num_rows; row++) store(hidden + row * hidden_stride, sums[row]);
    }
}

/* output += hidden B' for some strips of outputs of one part. hidden and output are those of the run's first row and the
   first strip. */
static void expand_strips(const lora_part *part, const lora_run *run, const int64_t *rows, const scalar *hidden,
                          int64_t hidden_stride, const scalar *weights, int64_t num_strips, scalar *output,
                          int64_t output_stride) {
    const scalar *hidden_rows[LORA_RUN_ROWS];
    const int64_t num_rows = run->num_rows, strip = part->rank * LANES;
    for (int64_t row = 0; row < num_rows; row++) hidden_rows[row] = hidden + row * hidden_stride;
    int64_t i = 0;
    if (is_by_tiles(num_rows)) {
        begin_tiles(num_rows, part->rank);
        for (; i + 4 <= num_strips; i += 4) {
            floats sums[4 * LORA_RUN_ROWS];
            four_strips_by_tiles(sums, hidden, hidden_stride * (int64_t)sizeof(scalar), weights + i * strip, part->rank);
            for (int64_t row = 0; row < num_rows; row++) {
                scalar *target = output + rows[row] * output_stride + i * LANES;
                for (int k = 0; k < 4; k++)
                    store(target + k * LANES, load(target + k * LANES) + sums[k * LORA_RUN_ROWS + row]);
            }
        }
        end_tiles();
    }
    for (; i < num_strips; i++) {
        floats sums[LORA_RUN_ROWS];
        strip_of_rows_by_vectors(sums, num_rows, hidden_rows, weights + i * strip, part->rank);
        for (int64_t row = 0; row < num_rows; row++) {
            scalar *target = output + rows[row] * output_stride + i * LANES;
            store(target, load(target) + sums[row]);
        }
    }
}

/* output += hidden B' for the items from `first` to `end`, in order of run and strip of outputs. */
static void expand(const lora_weight *weight, const lora_step *step, scalar *output, int64_t first, int64_t end) {
    const int64_t num_outputs = weight->num_outputs, num_strips = num_outputs / LANES;
    const int64_t hidden_stride = weight->num_parts * step->max_rank;
    while (first < end) {
        const lora_run *run = step->runs + first / num_strips;
        const lora_part *part = parts_of(weight, run);
        const int64_t from = first % num_strips * LANES;
        int64_t index = 0;
        while (from >= part[index].first_output + part[index].num_outputs) index++;
        part += index;
        const int64_t skipped = from - part->first_output, left = (part->num_outputs - skipped) / LANES;
        const int64_t count = left < end - first ? left : end - first;
        if (part->rank)
            expand_strips(part, run, step->rows + run->first,
                          step->hidden + run->first * hidden_stride + index * step->max_rank, hidden_stride,
                          part->b + skipped * part->rank, count, output + from, num_outputs);
        first += count;
    }
}

void add_lora(const lora_weight *weight, const lora_step *step, const scalar *x, scalar *output) {
    const int64_t num_shrinks = step->num_runs * weight->num_parts * (step->max_rank / LANES);
    const int64_t num_expands = step->num_runs * (weight->num_outputs / LANES);
    const int64_t num_numbers = num_shrinks * LANES * weight->num_inputs + num_expands * LANES * step->max_rank;
#pragma omp parallel if (num_numbers > MIN_PARALLEL_NUMBERS)
    {
        const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
        shrink(weight, step, x, num_shrinks * thread / num_threads, num_shrinks * (thread + 1) / num_threads);
#pragma omp barrier
        expand(weight, step, output, num_expands * thread / num_threads, num_expands * (thread + 1) / num_threads);
    }
}
