/* Multiplication by quantized weights, for steps of any size.

   A step of few tokens reads every weight once and computes little, so weights of fewer bits make it faster by as much
   as they are smaller, if nothing but memory is waited for. The weight is strips of 32 outputs, and a strip is

       codes     [num_inputs / 4, 32, 4]  eight bits each, or
                 [num_inputs / 4, 16, 4]  two codes in a byte: the lower half is output i's, the upper one output i + 16's
                 [num_inputs / 16, 5 or 6, 16, 4]  of five or six bits: four times as above, the lower four bits of the
                 codes of four inputs; then all their upper bits, see unpack_narrow
       scales    [num_groups, 32], or [num_groups] if all outputs of a strip have the same ones
       offsets   like scales, if the weight has any

   and zeros up to whole cache lines. Scales and offsets may be products of two numbers. Then they are [num_groups, 32]
   signed bytes, and after these [num_groups / super_block_groups, 32] float16.

   Weights that are multiplied by int8 (A8): each row of x is quantized, with one scale. Codes are unsigned, x is
   signed, and sums of their products are int32. The product of x with the zero point is subtracted from each sum.
   Weights that are multiplied by floats (A16): codes become scalars, and sums are float32. There, the four inputs of a
   lane are in the order 0, 2, 1, 3, so that pairs of bfloat16 need few instructions. In both cases scales multiply sums,
   not codes, and a result is rounded once.

   Few rows are multiplied while codes are unpacked. More rows are multiplied by one panel of a strip after the other,
   256 or 512 inputs, which stays in the first-level cache. Codes that take few instructions to unpack are unpacked for
   each eight rows again. Others are unpacked once:

       [256 / PACK, 32, PACK]   PACK = 4 codes of eight bits, 2 numbers of bfloat16, or 1 float

   Everything is plain C, but for the instructions that processors have for these products and look-ups. */

#include "kernels.h"
#include "products.h"
#include "strips.h"
#include "tiles.h"

#if defined(BFLOAT16) && defined(__AVX512BW__)
#define LOOKS_UP_PAIRS /* four-bit codes, two at a time */
#endif
#if defined(BFLOAT16) && defined(__AVX512BW__) && defined(__AVX512VBMI__)
#define LOOKS_UP_BYTES /* codes of more bits */
#endif

/* STEP inputs are unpacked together. Rows from FEW_ROWS + 1 on use panels, CHUNK rows at a time. Tiles are faster from
   MIN_ROWS_FOR_BFLOAT16_TILES on, because processors that have them multiply vectors of bfloat16 slowly, and those of int8
   fast. A panel is used for MAX_ROWS rows: with more, it is read and unpacked less often, and their x no
   longer fits into the second-level cache. */
enum { STEP = 4, FEW_ROWS = 8, MIN_ROWS_FOR_BFLOAT16_TILES = 3, CHUNK = 8, MAX_ROWS = 128 };
enum { PANEL = 256, WIDE_PANEL = 512 };    /* inputs; see panel_inputs */
enum { ROWS_OF_TWO_CHAINS = 4 };           /* see dot_by_float */
enum { SCALARS = INT6_BY_FLOAT + 1 };      /* one more kernel: a panel of scalars */
enum { MIN_PARALLEL_NUMBERS = 16384 };     /* as in layers.c */

/* Codes are prefetched so many bytes before they are multiplied; at the end of a strip, those of the next strip. Scales
   are prefetched a strip before. */
enum { CODES_AHEAD = 4096 };

#define ROWS(r) for (int r = 0; r < num_rows; r++) /* num_rows is a constant wherever this is compiled */
#define HALVES(h) for (int h = 0; h < 2; h++)

typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t shorts __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t words __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int32_t four_bytes __attribute__((may_alias));

INLINE int is_by_int8(const int kernel) { return kernel == INT4_BY_INT8 || kernel == INT8_BY_INT8; }
INLINE int bits_of(const int kernel) {
    return kernel == INT4_BY_INT8 || kernel == INT4_BY_FLOAT ? 4
           : kernel == INT5_BY_FLOAT                         ? 5
           : kernel == INT6_BY_FLOAT                         ? 6
           : kernel == SCALARS                               ? 8 * (int)sizeof(scalar)
                                                             : 8;
}

/* Whether the upper bits of codes are apart from the lower ones. */
INLINE int is_narrow(const int kernel) { return kernel == INT5_BY_FLOAT || kernel == INT6_BY_FLOAT; }

/* Whether many rows are multiplied by codes that were unpacked before, because that takes many instructions. Tiles always
   need it, but for eight bits by int8. */
INLINE int is_unpacked_before(const int kernel) {
#if defined(LOOKS_UP_PAIRS) && !defined(HAS_TILES)
    if (kernel == INT4_BY_FLOAT) return 0;
#endif
    return !is_by_int8(kernel);
}

/* The inputs of a panel, and the most of a block: so many that panel and x of a chunk fit into the first-level cache,
   and that sums of int8 products are below 2^24, exact as floats. */
INLINE int64_t panel_inputs(const int kernel) { return is_unpacked_before(kernel) ? PANEL : WIDE_PANEL; }

/* The inputs whose codes are in the same lines: a step, or several. */
INLINE int span_of(const int kernel) { return is_narrow(kernel) ? LANES : STEP; }

/* The bytes of a strip's codes of so many inputs, whole spans. */
INLINE int64_t code_bytes(const int kernel, int64_t num_inputs) { return num_inputs * STRIP * bits_of(kernel) / 8; }

/* Prefetch the lines that are `ahead` of a span's codes, for so many rows. With one or two rows, memory is waited for:
   into the first-level cache, because there the requests for the second one are fewer at a time than the processor's own.
   Codes of eight bits that are multiplied as they are follow each other so evenly that its own are enough on an EPYC. On a
   Xeon with tiles they are not: two rows would take 1.3 times as long. */
INLINE void prefetch_span(const int kernel, const int num_rows, const uint8_t *codes, ptrdiff_t ahead) {
#ifndef HAS_TILES
    if (kernel == INT8_BY_INT8 && num_rows <= 4) return;
#endif
    for (int i = 0; i < code_bytes(kernel, span_of(kernel)); i += (int)sizeof(ints)) {
        if (num_rows <= 2) __builtin_prefetch(codes + ahead + i, 0, 3);
        else prefetch(codes + ahead + i);
    }
}

/* -- int8 products ------------------------------------------------------------------------------------------------ */

/* sums + the products of four unsigned codes in each lane and four signed numbers. */
INLINE ints dot_four(ints sums, ints codes, int32_t x) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(x));
#else
    /* A code times a number fits into 16 bits. */
    const int32_t first = x << 24 >> 24, second = x << 16 >> 24, third = x << 8 >> 24, fourth = x >> 24;
    const shorts even = (shorts)((ints){} + ((first & 0xffff) | third << 16));
    const shorts odd = (shorts)((ints){} + ((second & 0xffff) | fourth << 16));
    const ints evens = (ints)((shorts)(codes & 0x00ff00ff) * even);
    const ints odds = (ints)((shorts)((codes >> 8) & 0x00ff00ff) * odd);
    return sums + (evens << 16 >> 16) + (evens >> 16) + (odds << 16 >> 16) + (odds >> 16);
#endif
}

/* The codes of a step's 32 outputs, four inputs in each lane. */
INLINE void unpack_codes(const int kernel, const uint8_t *codes, ints *unpacked) {
    if (kernel == INT4_BY_INT8) {
        const ints both = load_ints(codes);
        unpacked[0] = both & 0x0f0f0f0f;
        unpacked[1] = (both >> 4) & 0x0f0f0f0f;
    } else {
        unpacked[0] = load_ints(codes);
        unpacked[1] = load_ints(codes + sizeof(ints));
    }
}

/* -- float products ----------------------------------------------------------------------------------------------- */

/* The vectors of scalars that a step is unpacked into: [STEP / PACK, 2 halves of the strip]. */
enum { STEP_VECTORS = STEP / PACK * 2 };

/* What codes are looked up in. Of four bits: the sixteen levels, in the first vector; as bfloat16 they are there twice.
   Of more bits, as bfloat16: the lower bytes of the numbers of the codes from 0 to 127, and then the upper bytes. */
typedef struct tables {
    ints vectors[4];
    float zero_point; /* of codes of five or six bits */
} tables;

/* The numbers of sixteen codes of eight bits. The codes are in the upper bytes of `upper`. */
INLINE floats numbers_of(const int kernel, ints upper) {
    if (kernel == INT8_BY_FLOAT || is_narrow(kernel)) return __builtin_convertvector(upper >> 24, floats);
    /* Float8 (e4m3): a sign, four bits of exponent, three of mantissa. As the bits of a float it is the number times
       2^-120, also if it is subnormal. */
    const ints magnitude = (upper >> 4) & 0x07f00000;
    return (floats)((ints)((floats)magnitude * 0x1p120f) | (upper & (int32_t)0x80000000));
}

static tables make_tables(const quantized_weight *weight) {
    const int kernel = (int)weight->kernel;
    tables made = {.zero_point = is_narrow(kernel) ? (float)weight->zero_point : 0.0f};
    if (kernel == INT4_BY_FLOAT) {
        scalar *const levels = (scalar *)&made;
        store(levels, *(const floats *)weight->levels);
#ifdef BFLOAT16
        store(levels + LANES, *(const floats *)weight->levels);
#ifndef LOOKS_UP_PAIRS
        made.vectors[0] = (ints)load(levels);
#endif
#endif
    }
#ifdef LOOKS_UP_BYTES
    if (bits_of(kernel) > 4) {
        const ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        bytes *const lower = (bytes *)made.vectors, *const upper = (bytes *)(made.vectors + 2);
        for (int i = 0; i < 8; i++) {
            const ints bits = (ints)(numbers_of(kernel, (lanes + i * LANES) << 24) - made.zero_point) >> 16;
            lower[i] = __builtin_convertvector(bits, bytes);
            upper[i] = __builtin_convertvector(bits >> 8, bytes);
        }
    }
#endif
    return made;
}

#ifdef LOOKS_UP_PAIRS
/* The levels of the codes in the lower bytes of 16-bit words. The upper half of such a byte, and the upper byte, do not
   matter: an index has five bits, and the table is the same for the fifth. */
INLINE ints look_up_pairs(ints table, ints codes) {
    return (ints)_mm512_permutexvar_epi16((__m512i)codes, (__m512i)table);
}
#else
/* The levels of the codes in the lowest four bits of each lane. */
INLINE floats look_up(ints table, ints codes) {
#ifdef __AVX512F__
    return (floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)table);
#else
    floats levels;
    for (int i = 0; i < LANES; i++) levels[i] = ((const float *)&table)[codes[i] & 15];
    return levels;
#endif
}
#endif

#ifdef LOOKS_UP_BYTES
/* The bfloat16 pairs of codes of eight bits: those of inputs 0 and 1, and those of inputs 2 and 3. */
INLINE void look_up_bytes(const int kernel, const tables *tables, ints codes, ints *first, ints *second) {
    const __m512i code = (__m512i)codes, sign = _mm512_set1_epi8((char)0x80);
    const ints *const table = tables->vectors;
    __m512i lower, upper;
    if (is_narrow(kernel)) {
        lower = _mm512_permutexvar_epi8(code, (__m512i)table[0]);
        upper = _mm512_permutexvar_epi8(code, (__m512i)table[2]);
    } else {
        const __m512i index = kernel == INT8_BY_FLOAT ? _mm512_abs_epi8(code) : code; /* of which seven bits are used */
        lower = _mm512_permutex2var_epi8((__m512i)table[0], index, (__m512i)table[1]);
        upper = _mm512_permutex2var_epi8((__m512i)table[2], index, (__m512i)table[3]) | (code & sign);
        if (kernel == INT8_BY_FLOAT) /* -128 has no index; the upper byte of it is 0xc3, and the lower one 0 */
            upper = _mm512_mask_mov_epi8(upper, _mm512_cmpeq_epi8_mask(code, sign), _mm512_set1_epi8((char)0xc3));
    }
    const __m512i low_bytes = _mm512_set1_epi16(0x00ff);
    *first = (ints)(_mm512_slli_epi16(upper, 8) | (lower & low_bytes));
    *second = (ints)(_mm512_andnot_si512(low_bytes, upper) | _mm512_srli_epi16(lower, 8));
}
#endif

/* The numbers of input `i` of a step, for one half of the strip. `codes` are the step's vectors. */
INLINE floats unpack_input(const int kernel, const ints *codes, const tables *tables, const int i, const int half) {
    const int shift = 8 * (i == 1 ? 2 : i == 2 ? 1 : i); /* the inputs are in the order 0, 2, 1, 3 */
#ifndef LOOKS_UP_PAIRS
    if (kernel == INT4_BY_FLOAT) return look_up(tables->vectors[0], codes[0] >> (shift + 4 * half));
#endif
    const floats numbers = numbers_of(kernel, codes[half] << (24 - shift));
    if (is_narrow(kernel)) return numbers - tables->zero_point;
    return numbers;
}

/* The codes of five or six bits of a step's 32 outputs. `codes` are those of the span. Its upper bits are in order of
   step and half: eight or four in each byte of a vector, the first ones in the lowest bits. */
INLINE void unpack_narrow(const int kernel, const uint8_t *codes, const int step, ints *unpacked) {
    const int bits = bits_of(kernel) - 4, mask = bits == 1 ? 0x01010101 : 0x03030303;
    const ints lower = load_ints(codes + step * sizeof(ints));
    HALVES(h) {
        const int place = (2 * step + h) * bits;
        const ints upper = load_ints(codes + (LANES / STEP + place / 8) * sizeof(ints)) >> place % 8;
        unpacked[h] = ((lower >> 4 * h) & 0x0f0f0f0f) | (upper & mask) << 4;
    }
}

/* The scalars of the 32 outputs of one step of a span. */
INLINE void unpack_step(const int kernel, const uint8_t *codes, const int step, const tables *tables, ints *unpacked) {
    if (kernel == SCALARS) {
        UNROLLED for (int v = 0; v < STEP_VECTORS; v++) unpacked[v] = load_ints(codes + v * sizeof(ints));
        return;
    }
    ints vectors[2];
    if (is_narrow(kernel)) unpack_narrow(kernel, codes, step, vectors);
    else vectors[0] = load_ints(codes);
    if (bits_of(kernel) == 8) vectors[1] = load_ints(codes + sizeof(ints));
#ifdef LOOKS_UP_PAIRS
    if (kernel == INT4_BY_FLOAT) {
        UNROLLED for (int v = 0; v < STEP_VECTORS; v++)
            unpacked[v] = look_up_pairs(tables->vectors[0], vectors[0] >> 4 * v);
        return;
    }
#endif
#ifdef LOOKS_UP_BYTES
    HALVES(h) look_up_bytes(kernel, tables, vectors[h], unpacked + h, unpacked + 2 + h);
#else
    UNROLLED for (int v = 0; v < STEP_VECTORS; v++) {
        const int input = v / 2 * PACK, half = v % 2;
        const ints first = (ints)unpack_input(kernel, vectors, tables, input, half);
#ifdef BFLOAT16 /* what is cut off is zero */
        const ints second = (ints)unpack_input(kernel, vectors, tables, input + 1, half);
        unpacked[v] = ((first >> 16) & 0xffff) | (second & (int32_t)0xffff0000);
#else
        unpacked[v] = first;
#endif
    }
#endif
}

/* -- one block ---------------------------------------------------------------------------------------------------- */

/* The inputs of a multiplication, prepared. */
typedef struct {
    const uint8_t *x;        /* int8 or scalars [num_rows, num_inputs] */
    int64_t row_bytes;       /* from one row of x to the next */
    const float *block_sums; /* [num_rows, num_blocks] the sums of x over blocks; only for int8, or if there are offsets */
    const int32_t *starts;   /* [num_rows, num_blocks] for int8: minus the zero point times the sum */
    const float *row_scales; /* [num_rows] of int8 */
    int64_t num_rows, num_blocks;
} inputs;

/* A block of a strip: inputs of one group, at most those of a panel. */
typedef struct {
    const uint8_t *codes;  /* or a panel */
    const uint8_t *x;      /* of the first row */
    const float *sums;     /* of the first row */
    const int32_t *starts; /* of the first row */
    int64_t row_bytes, num_blocks, num_inputs;
    ptrdiff_t ahead; /* what is prefetched is so far behind the codes; 0: nothing, because these are in the cache */
    int has_offsets;
    const tables *tables;
    floats scales[2], offsets[2];
} block;

/* The steps of one iteration. With few rows, instructions that only count would be a third of all. */
INLINE int unrolled_steps(const int num_rows) { return num_rows <= ROWS_OF_TWO_CHAINS ? LANES / STEP : 1; }

/* dots [num_rows][2] = codes . x, as floats. */
INLINE void dot_by_int8(const int kernel, const int num_rows, floats (*dots)[2], const block *block) {
    ints sums[CHUNK][2];
    const uint8_t *codes = block->codes, *x = block->x;
    const int64_t row_bytes = block->row_bytes;
    const ptrdiff_t ahead = block->ahead;
    const int steps = unrolled_steps(num_rows);
    UNROLLED ROWS(r) sums[r][0] = sums[r][1] = (ints){} + block->starts[r * block->num_blocks];
    for (const uint8_t *end = x + block->num_inputs; x < end; x += steps * STEP) {
        UNROLLED for (int step = 0; step < steps; step++) {
            ints unpacked[2];
            prefetch_span(kernel, num_rows, codes, ahead);
            unpack_codes(kernel, codes, unpacked);
            UNROLLED ROWS(r) {
                const int32_t four = *(const four_bytes *)(x + r * row_bytes + step * STEP);
                sums[r][0] = dot_four(sums[r][0], unpacked[0], four);
                sums[r][1] = dot_four(sums[r][1], unpacked[1], four);
            }
            codes += code_bytes(kernel, STEP);
        }
    }
    UNROLLED ROWS(r) HALVES(h) dots[r][h] = __builtin_convertvector(sums[r][h], floats); /* exact, see panel_inputs */
}

INLINE void dot_by_float(const int kernel, const int num_rows, floats (*dots)[2], const block *block) {
    /* Two chains of sums while registers last, because each sum waits for the one before it. */
    floats odd[ROWS_OF_TWO_CHAINS][2];
    const uint8_t *codes = block->codes, *x = block->x;
    const int64_t row_bytes = block->row_bytes;
    const ptrdiff_t ahead = block->ahead;
    const tables tables = kernel == SCALARS ? (struct tables){} : *block->tables;
    const int has_two_chains = num_rows <= ROWS_OF_TWO_CHAINS, span = span_of(kernel);
    const int steps = span > STEP ? span / STEP : unrolled_steps(num_rows);
    UNROLLED ROWS(r) dots[r][0] = dots[r][1] = (floats){};
    if (has_two_chains) UNROLLED ROWS(r) odd[r][0] = odd[r][1] = (floats){};
    for (const uint8_t *end = x + block->num_inputs * sizeof(scalar); x < end; x += steps * STEP * sizeof(scalar)) {
        UNROLLED for (int step = 0; step < steps; step++) {
            ints unpacked[STEP_VECTORS];
            const uint8_t *const line = codes + step * STEP / span * code_bytes(kernel, span);
            if (kernel != SCALARS && step * STEP % span == 0) prefetch_span(kernel, num_rows, line, ahead);
            unpack_step(kernel, line, step % (span / STEP), &tables, unpacked);
            UNROLLED for (int p = 0; p < STEP / PACK; p++) {
                UNROLLED ROWS(r) {
                    const packed few = ((const packed *)(x + r * row_bytes))[step * (STEP / PACK) + p];
                    floats *sums = has_two_chains && p % 2 ? odd[r] : dots[r];
                    sums[0] = add_products(sums[0], unpacked[2 * p], few);
                    sums[1] = add_products(sums[1], unpacked[2 * p + 1], few);
                }
            }
        }
        codes += code_bytes(kernel, steps * STEP);
    }
    if (has_two_chains) UNROLLED ROWS(r) HALVES(h) dots[r][h] += odd[r][h];
}

/* totals [num_rows][2] += scales * (codes . x) + offsets * sums of x. */
INLINE void add_block(const int kernel, const int num_rows, floats (*totals)[2], const block *block) {
    floats dots[CHUNK][2];
    if (is_by_int8(kernel)) dot_by_int8(kernel, num_rows, dots, block);
    else dot_by_float(kernel, num_rows, dots, block);
    UNROLLED ROWS(r) HALVES(h) totals[r][h] += dots[r][h] * block->scales[h];
    if (block->has_offsets)
        UNROLLED ROWS(r) HALVES(h) totals[r][h] += block->offsets[h] * block->sums[r * block->num_blocks];
}

/* -- one strip ---------------------------------------------------------------------------------------------------- */

/* The bytes of a group's scales or offsets, without what they are multiples of. */
INLINE int64_t group_bytes(int64_t type) {
    switch (type) {
    case NO_NUMBERS: return 0;
    case AS_FLOAT32: return 4 * STRIP;
    case AS_FLOAT16: case AS_BFLOAT16: return 2 * STRIP;
    case AS_ONE_FLOAT32: return 4;
    default: return STRIP;
    }
}

/* The bytes of all scales or offsets of a strip. */
INLINE int64_t number_bytes(const quantized_weight *weight, int64_t type) {
    const int64_t num_groups = weight->base.num_inputs / weight->group_size;
    const int64_t num_super_blocks = type == AS_PRODUCTS ? num_groups / weight->super_block_groups : 0;
    return num_groups * group_bytes(type) + num_super_blocks * group_bytes(AS_FLOAT16);
}

/* Sixteen signed bytes. In two conversions, because GCC 12 converts bytes to four times their size one by one. */
INLINE ints load_bytes(const uint8_t *from) {
    return __builtin_convertvector(__builtin_convertvector(*(const bytes *)from, words), ints);
}

/* The scales or offsets of half a strip; bytes are multiples of `factors`. */
INLINE floats load_numbers(int64_t type, const uint8_t *from, floats factors) {
    if (type == AS_FLOAT32) return *(const floats *)from;
    if (type == AS_ONE_FLOAT32) return (floats){} + *(const float *)from;
    if (type == AS_MULTIPLES || type == AS_PRODUCTS)
        return __builtin_convertvector(load_bytes(from), floats) * factors;
    if (type == AS_EXPONENTS) return (floats)((load_bytes(from) & 0xff) << 23);
#ifdef __AVX512F__
    if (type == AS_FLOAT16) return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#endif
    const ints wide = __builtin_convertvector(*(const halves *)from, ints);
    if (type == AS_BFLOAT16) return (floats)(wide << 16);
    /* As the bits of a float, those of a float16 are the number times 2^-112, also if it is subnormal. */
    return (floats)((ints)((floats)((wide & 0x7fff) << 13) * 0x1p112f) | (wide & 0x8000) << 16);
}

/* Reads the scales or the offsets of a strip, one group after the other. */
typedef struct {
    int64_t type;
    const uint8_t *next;         /* of the next group */
    const uint8_t *super_scales; /* of the next super-block; only AS_PRODUCTS */
    floats factors[2];           /* of this super-block */
} number_reader;

INLINE number_reader read_numbers(const quantized_weight *weight, int64_t type, const uint8_t *from) {
    const int64_t num_groups = weight->base.num_inputs / weight->group_size;
    return (number_reader){.type = type, .next = from, .super_scales = from + num_groups * group_bytes(type)};
}

/* Read those of the next group. Those that are multiples of the scales need `scales`. Not inlined: it would be in each of
   some hundred functions, and compiling would take three times as long. */
static __attribute__((noinline)) void next_numbers(number_reader *reader, int begins_super_block, ptrdiff_t ahead,
                                                   const floats *scales, floats *numbers) {
    const int64_t type = reader->type;
    if (type == AS_PRODUCTS && begins_super_block) {
        prefetch(reader->super_scales + ahead);
        HALVES(h) reader->factors[h] = load_numbers(AS_FLOAT16, reader->super_scales + h * 2 * LANES, (floats){});
        reader->super_scales += group_bytes(AS_FLOAT16);
    }
    prefetch(reader->next + ahead);
    const int64_t half_bytes = type == AS_ONE_FLOAT32 ? 0 : group_bytes(type) / 2;
    HALVES(h)
        numbers[h] = load_numbers(type, reader->next + h * half_bytes,
                                  type == AS_MULTIPLES ? scales[h] : reader->factors[h]);
    reader->next += group_bytes(type);
}

/* Reads the blocks of a strip, one after the other. */
typedef struct {
    const quantized_weight *weight;
    number_reader scales, offsets;
    ptrdiff_t next_strip;     /* how far behind this strip the next one is */
    const uint8_t *codes_end;
    int has_16_bits;          /* scales, and offsets if there are any, are float16 or bfloat16 */
    int64_t super_block_left; /* groups of the super-block after this one */
    int64_t group_left;       /* inputs of the group, from the block's first one on */
    block block;
} strip_reader;

static __attribute__((noinline)) void begin_group_of_any_type(strip_reader *reader) {
    const quantized_weight *weight = reader->weight;
    block *const block = &reader->block;
    const int begins_super_block = reader->super_block_left == 0;
    reader->super_block_left = (begins_super_block ? weight->super_block_groups : reader->super_block_left) - 1;
    next_numbers(&reader->scales, begins_super_block, reader->next_strip, block->scales, block->scales);
    if (block->has_offsets)
        next_numbers(&reader->offsets, begins_super_block, reader->next_strip, block->scales, block->offsets);
}

INLINE int is_16_bits(int64_t type) { return type == AS_FLOAT16 || type == AS_BFLOAT16; }

INLINE void next_numbers_of_16_bits(number_reader *reader, ptrdiff_t ahead, floats *numbers) {
    prefetch(reader->next + ahead);
    HALVES(h) {
        const uint8_t *const from = reader->next + h * 2 * LANES;
        numbers[h] = reader->type == AS_BFLOAT16 ? load_numbers(AS_BFLOAT16, from, (floats){})
                                                 : load_numbers(AS_FLOAT16, from, (floats){});
    }
    reader->next += 2 * STRIP;
}

INLINE void begin_group(strip_reader *reader) {
    reader->group_left = reader->weight->group_size;
    /* The most frequent types without a call, before which all totals would have to be stored. */
    if (__builtin_expect(reader->has_16_bits, 1)) {
        next_numbers_of_16_bits(&reader->scales, reader->next_strip, reader->block.scales);
        if (reader->block.has_offsets)
            next_numbers_of_16_bits(&reader->offsets, reader->next_strip, reader->block.offsets);
    } else begin_group_of_any_type(reader);
}

/* How far behind the codes of this block are those that are prefetched: at the end of a strip, scales are between. */
INLINE ptrdiff_t ahead_of_block(const int kernel, const strip_reader *reader) {
    if (reader->block.codes + CODES_AHEAD < reader->codes_end) return CODES_AHEAD;
    return CODES_AHEAD + reader->next_strip - code_bytes(kernel, reader->weight->base.num_inputs);
}

INLINE void read_strip(const int kernel, strip_reader *reader, const quantized_weight *weight, const inputs *inputs,
                       const tables *tables, const uint8_t *strip, ptrdiff_t next_strip) {
    const uint8_t *const scales = strip + code_bytes(kernel, weight->base.num_inputs);
    const uint8_t *const offsets = scales + number_bytes(weight, weight->scale_type);
    reader->weight = weight;
    reader->next_strip = next_strip;
    reader->super_block_left = 0;
    reader->has_16_bits =
        is_16_bits(weight->scale_type) && (weight->offset_type == NO_NUMBERS || is_16_bits(weight->offset_type));
    reader->scales = read_numbers(weight, weight->scale_type, scales);
    reader->offsets = read_numbers(weight, weight->offset_type, offsets);
    reader->block = (block){.codes = strip, .x = inputs->x, .sums = inputs->block_sums, .starts = inputs->starts,
                            .row_bytes = inputs->row_bytes, .num_blocks = inputs->num_blocks,
                            .has_offsets = weight->offset_type != NO_NUMBERS, .tables = tables};
    reader->codes_end = scales;
    reader->block.ahead = ahead_of_block(kernel, reader);
    begin_group(reader);
    reader->block.num_inputs = reader->group_left < panel_inputs(kernel) ? reader->group_left : panel_inputs(kernel);
}

/* Go to the next block; there must be one. */
INLINE void next_block(const int kernel, strip_reader *reader) {
    block *const block = &reader->block;
    block->codes += code_bytes(kernel, block->num_inputs);
    block->ahead = ahead_of_block(kernel, reader);
    block->x += block->num_inputs * (is_by_int8(kernel) ? 1 : (int64_t)sizeof(scalar));
    block->sums += 1;
    block->starts += 1;
    reader->group_left -= block->num_inputs;
    if (reader->group_left == 0) begin_group(reader);
    block->num_inputs = reader->group_left < panel_inputs(kernel) ? reader->group_left : panel_inputs(kernel);
}

/* sums [num_rows, STRIP] of one strip. Totals stay in registers. */
INLINE void strip_of_few_rows(const int kernel, const int num_rows, float *sums, const quantized_weight *weight,
                              const inputs *inputs, const tables *tables, const uint8_t *strip, ptrdiff_t next_strip) {
    floats totals[FEW_ROWS][2];
    strip_reader reader;
    UNROLLED ROWS(r) totals[r][0] = totals[r][1] = (floats){};
    read_strip(kernel, &reader, weight, inputs, tables, strip, next_strip);
    for (int64_t i = 0; i < inputs->num_blocks; i++) {
        if (i > 0) next_block(kernel, &reader);
        add_block(kernel, num_rows, totals, &reader.block);
    }
    UNROLLED ROWS(r) HALVES(h) *(floats *)(sums + r * STRIP + h * LANES) = totals[r][h];
}

/* -- many rows ---------------------------------------------------------------------------------------------------- */

enum { PANEL_BLOCKS = WIDE_PANEL / LANES };

/* Blocks of up to panel_inputs in all; more than one if groups are small. `block` is the first one. */
typedef struct {
    block block;
    int64_t num_blocks;
    floats scales[PANEL_BLOCKS][2], offsets[PANEL_BLOCKS][2]; /* by block */
} panel;

INLINE void go_to_block(const int kernel, const panel *panel, int64_t index, block *block) {
    const int64_t inputs = index * panel->block.num_inputs;
    block->codes = panel->block.codes + code_bytes(kernel, inputs);
    block->x = panel->block.x + inputs * (is_by_int8(kernel) ? 1 : (int64_t)sizeof(scalar));
    block->sums = panel->block.sums + index;
    block->starts = panel->block.starts + index;
    HALVES(h) block->scales[h] = panel->scales[index][h];
    HALVES(h) block->offsets[h] = panel->offsets[index][h];
}

/* sums [num_rows, STRIP] += the product with a panel. Totals stay in registers meanwhile. */
INLINE void add_panel(const int kernel, const int num_rows, float *sums, const panel *panel) {
    floats totals[CHUNK][2];
    block block = panel->block;
    UNROLLED ROWS(r) HALVES(h) totals[r][h] = *(const floats *)(sums + r * STRIP + h * LANES);
    for (int64_t i = 0; i < panel->num_blocks; i++) {
        go_to_block(kernel, panel, i, &block);
        add_block(kernel, num_rows, totals, &block);
    }
    UNROLLED ROWS(r) HALVES(h) *(floats *)(sums + r * STRIP + h * LANES) = totals[r][h];
}

#define PANEL_OF(rows) \
    case rows: add_panel(kernel, rows, sums, panel); break;
#define PANELS_BY(name, which)                                                                            \
    static void name(int64_t num_rows, float *sums, const panel *panel) {                                 \
        const int kernel = which;                                                                         \
        switch (num_rows) { PANEL_OF(1) PANEL_OF(2) PANEL_OF(3) PANEL_OF(4) PANEL_OF(5) PANEL_OF(6) PANEL_OF(7) PANEL_OF(8) } \
    }
PANELS_BY(add_panel_of_int4_by_int8, INT4_BY_INT8)
PANELS_BY(add_panel_of_int8_by_int8, INT8_BY_INT8)
PANELS_BY(add_panel_of_int4_by_float, INT4_BY_FLOAT)
PANELS_BY(add_panel_of_scalars, SCALARS)

/* sums [num_rows, STRIP] += the product with a panel of codes, which are unpacked before or not. */
INLINE void add_panel_of(const int kernel, int64_t num_rows, float *sums, const panel *panel) {
    if (kernel == INT4_BY_INT8) add_panel_of_int4_by_int8(num_rows, sums, panel);
    else if (kernel == INT8_BY_INT8) add_panel_of_int8_by_int8(num_rows, sums, panel);
    else if (is_unpacked_before(kernel)) add_panel_of_scalars(num_rows, sums, panel);
    else add_panel_of_int4_by_float(num_rows, sums, panel);
}

#ifdef HAS_TILES
enum { CHUNK_BY_TILES = 2 * TILE };

/* The rows of a tile of weights, each of four bytes: the most that divide a group. */
INLINE int64_t weight_rows(const int by_int8, const quantized_weight *weight) {
    int64_t rows = TILE;
    while (weight->group_size * (by_int8 ? 1 : (int64_t)sizeof(scalar)) % (4 * rows)) rows /= 2;
    return rows;
}

/* dots [num_rows, STRIP] = panel . x, int32 or float. */
INLINE void dot_by_tiles(const int by_int8, const int has_two_tiles, void *dots, const block *block, int64_t inner) {
    const long row_bytes = block->row_bytes, panel_bytes = 2 * sizeof(ints), dot_bytes = STRIP * sizeof(float);
    const uint8_t *panel = block->codes, *x = block->x;
    const uint8_t *const end = x + block->num_inputs * (by_int8 ? 1 : (int64_t)sizeof(scalar));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (; x < end; x += 4 * inner, panel += inner * panel_bytes) {
        if (block->ahead)
            for (long i = 0; i < inner * panel_bytes; i += sizeof(ints)) prefetch(panel + block->ahead + i);
        _tile_loadd(4, x, row_bytes);
        _tile_loadd(6, panel, panel_bytes);
        _tile_loadd(7, panel + sizeof(ints), panel_bytes);
        if (has_two_tiles) _tile_loadd(5, x + TILE * row_bytes, row_bytes);
        if (by_int8) {
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            if (has_two_tiles) _tile_dpbsud(2, 5, 6);
            if (has_two_tiles) _tile_dpbsud(3, 5, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (has_two_tiles) _tile_dpbf16ps(2, 5, 6);
            if (has_two_tiles) _tile_dpbf16ps(3, 5, 7);
        }
    }
    uint8_t *const first = dots, *const second = first + TILE * dot_bytes;
    _tile_stored(0, first, dot_bytes);
    _tile_stored(1, first + sizeof(ints), dot_bytes);
    if (has_two_tiles) {
        _tile_stored(2, second, dot_bytes);
        _tile_stored(3, second + sizeof(ints), dot_bytes);
    }
}

/* The same as add_panel for up to CHUNK_BY_TILES rows. The tiles are shaped for as many. */
INLINE void add_panel_by_tiles(const int by_int8, int64_t num_rows, float *sums, const panel *panel, int64_t inner) {
    ints dots[CHUNK_BY_TILES][2] __attribute__((aligned(64)));
    block block = panel->block;
    for (int64_t i = 0; i < panel->num_blocks; i++) {
        go_to_block(by_int8 ? INT8_BY_INT8 : SCALARS, panel, i, &block);
        if (num_rows > TILE) dot_by_tiles(by_int8, 1, dots, &block, inner);
        else dot_by_tiles(by_int8, 0, dots, &block, inner);
        for (int64_t r = 0; r < num_rows; r++)
            HALVES(h) {
                floats *const total = (floats *)(sums + r * STRIP + h * LANES);
                floats dot = (floats)dots[r][h];
                if (by_int8) dot = __builtin_convertvector(dots[r][h] + block.starts[r * block.num_blocks], floats);
                *total += dot * block.scales[h];
                if (block.has_offsets) *total += block.offsets[h] * block.sums[r * block.num_blocks];
            }
    }
}
#endif

/* Whether rows are multiplied by tiles, if there are more than a few. There are none for float32. */
static int uses_tiles(const quantized_weight *weight) {
#if defined(HAS_TILES) && defined(BFLOAT16)
    (void)weight;
    return may_use_tiles();
#elif defined(HAS_TILES)
    return is_by_int8((int)weight->kernel) && may_use_tiles();
#else
    (void)weight;
    return 0;
#endif
}

INLINE int min_rows_for_tiles(const int kernel) {
    return is_by_int8(kernel) ? FEW_ROWS + 1 : MIN_ROWS_FOR_BFLOAT16_TILES;
}

/* Unpack a block. */
INLINE void unpack_block(const int kernel, const block *block, ints *unpacked) {
    const uint8_t *codes = block->codes;
    const tables tables = is_by_int8(kernel) ? (struct tables){} : *block->tables;
    for (int64_t i = 0; i < block->num_inputs; i += span_of(kernel)) {
        prefetch_span(kernel, CHUNK, codes, block->ahead);
        UNROLLED for (int step = 0; step < span_of(kernel) / STEP; step++) {
            if (is_by_int8(kernel)) unpack_codes(kernel, codes, unpacked);
            else unpack_step(kernel, codes, step, &tables, unpacked);
            unpacked += is_by_int8(kernel) ? 2 : STEP_VECTORS;
        }
        codes += code_bytes(kernel, span_of(kernel));
    }
}

/* Read a panel, from the reader's block on; `left` is the number of blocks from there to the end of the strip. Codes are
   unpacked into `unpacked`, unless that is NULL. */
INLINE void read_panel(const int kernel, strip_reader *reader, int64_t left, ints *unpacked, panel *panel) {
    const int64_t num_inputs = reader->block.num_inputs;
    panel->block = reader->block;
    panel->num_blocks = 0;
    if (unpacked) {
        panel->block.codes = (const uint8_t *)unpacked;
        panel->block.ahead = 0;
    }
    for (;;) {
        HALVES(h) panel->scales[panel->num_blocks][h] = reader->block.scales[h];
        HALVES(h) panel->offsets[panel->num_blocks][h] = reader->block.offsets[h];
        if (unpacked) {
            const int64_t vectors = is_by_int8(kernel) ? 2 : STEP_VECTORS;
            unpack_block(kernel, &reader->block, unpacked + panel->num_blocks * num_inputs / STEP * vectors);
        }
        panel->num_blocks++;
        if (panel->num_blocks == left) return;
        next_block(kernel, reader);
        if (reader->block.num_inputs != num_inputs) return;
        if ((panel->num_blocks + 1) * num_inputs > panel_inputs(kernel)) return;
    }
}

/* shaped_for: the rows that this thread's tiles are shaped for. To shape them takes as long as some hundred inputs. */
INLINE void strip_of_many_rows(const int kernel, float *sums, const quantized_weight *weight, const inputs *inputs,
                               const tables *tables, const uint8_t *strip, ptrdiff_t next_strip,
                               int64_t *shaped_for) {
    ints memory[PANEL / STEP * STEP_VECTORS] __attribute__((aligned(64)));
    const int by_int8 = is_by_int8(kernel), by_tiles = uses_tiles(weight);
    ints *const unpacked = (by_tiles ? kernel != INT8_BY_INT8 : is_unpacked_before(kernel)) ? memory : NULL;
#ifdef HAS_TILES
    const int64_t inner = weight_rows(by_int8, weight), largest_chunk = by_tiles ? CHUNK_BY_TILES : CHUNK;
#else
    (void)shaped_for;
    const int64_t largest_chunk = CHUNK;
#endif
    const int64_t num_rows = inputs->num_rows, num_chunks = (num_rows + largest_chunk - 1) / largest_chunk;
    const int64_t chunk = (num_rows + num_chunks - 1) / num_chunks;
    memset(sums, 0, num_rows * STRIP * sizeof *sums);
    strip_reader reader;
    read_strip(kernel, &reader, weight, inputs, tables, strip, next_strip);
    for (int64_t left = inputs->num_blocks; left > 0;) {
        panel panel;
        read_panel(kernel, &reader, left, unpacked, &panel);
        left -= panel.num_blocks;
        for (int64_t row = 0; row < num_rows; row += chunk) {
            const int64_t rows = num_rows - row < chunk ? num_rows - row : chunk;
            float *const chunk_sums = sums + row * STRIP;
            if (by_tiles) {
#ifdef HAS_TILES
                if (rows != *shaped_for) shape_tiles(rows, inner);
                *shaped_for = rows;
                add_panel_by_tiles(by_int8, rows, chunk_sums, &panel, inner);
#endif
            } else add_panel_of(kernel, rows, chunk_sums, &panel);
            panel.block.x += rows * inputs->row_bytes;
            panel.block.sums += rows * inputs->num_blocks;
            panel.block.starts += rows * inputs->num_blocks;
            panel.block.ahead = 0; /* the first rows have prefetched it */
        }
    }
}

#define FEW_ROWS_OF(rows) \
    case rows: strip_of_few_rows(kernel, rows, sums, weight, inputs, tables, strip, next_strip); break;
#define STRIP_BY(name, which)                                                                                \
    static void name(float *sums, const quantized_weight *weight, const inputs *inputs, const tables *tables, \
                     const uint8_t *strip, ptrdiff_t next_strip, int64_t *shaped_for) {                      \
        const int kernel = which;                                                                            \
        const int64_t num_rows = inputs->num_rows;                                                           \
        switch (num_rows >= min_rows_for_tiles(kernel) && uses_tiles(weight) ? MAX_ROWS : num_rows) {        \
            FEW_ROWS_OF(1) FEW_ROWS_OF(2) FEW_ROWS_OF(3) FEW_ROWS_OF(4)                                      \
            FEW_ROWS_OF(5) FEW_ROWS_OF(6) FEW_ROWS_OF(7) FEW_ROWS_OF(8)                                      \
        default: strip_of_many_rows(kernel, sums, weight, inputs, tables, strip, next_strip, shaped_for);    \
        }                                                                                                    \
    }
STRIP_BY(strip_of_int4_by_int8, INT4_BY_INT8)
STRIP_BY(strip_of_int8_by_int8, INT8_BY_INT8)
STRIP_BY(strip_of_int4_by_float, INT4_BY_FLOAT)
STRIP_BY(strip_of_int8_by_float, INT8_BY_FLOAT)
STRIP_BY(strip_of_float8_by_float, FLOAT8_BY_FLOAT)
STRIP_BY(strip_of_int5_by_float, INT5_BY_FLOAT)
STRIP_BY(strip_of_int6_by_float, INT6_BY_FLOAT)

/* -- inputs ------------------------------------------------------------------------------------------------------- */

INLINE int64_t num_blocks_of(const quantized_weight *weight) {
    const int64_t most = panel_inputs((int)weight->kernel);
    return weight->base.num_inputs / weight->group_size * ((weight->group_size + most - 1) / most);
}

/* The bytes from one row to the next in the workspace. Rows whose distance is a power of two would compete for the same
   lines of the first-level cache. */
INLINE int64_t copy_bytes(const quantized_weight *weight) {
    const int64_t is_int8 = is_by_int8((int)weight->kernel) && !weight->input_order;
    return weight->base.num_inputs * (is_int8 ? 1 : (int64_t)sizeof(scalar)) + 64;
}

int64_t quantized_gemm_workspace_bytes(const quantized_weight *weight) {
    return copy_bytes(weight) + (2 * num_blocks_of(weight) + 1) * (int64_t)sizeof(float);
}

static void reorder_row(const quantized_weight *weight, const scalar *x, scalar *to) {
    for (int64_t i = 0; i < weight->base.num_inputs; i++) to[i] = x[weight->input_order[i]];
}

/* Sum one row of x over each block. */
static void sum_blocks(const quantized_weight *weight, const scalar *x, float *sums) {
    const int64_t most = panel_inputs((int)weight->kernel);
    for (int64_t group = 0; group < weight->base.num_inputs; group += weight->group_size)
        for (int64_t first = 0; first < weight->group_size; first += most, sums++) {
            const int64_t left = weight->group_size - first, end = first + (left < most ? left : most);
            floats sum = {};
            for (int64_t i = first; i < end; i += LANES) sum += load(x + group + i);
            *sums = sum_of_lanes(sum);
        }
}

/* The largest absolute value. In four chains, because each comparison waits for the one before it. */
static float largest_size(const scalar *x, int64_t size) {
    enum { CHAINS = 4 };
    floats largest[CHAINS] = {};
    for (int64_t first = 0; first < size; first += CHAINS * LANES)
        UNROLLED for (int64_t c = 0; c < CHAINS; c++) {
            const int64_t i = first + c * LANES;
            if (i >= size) break;
            const floats found = absolute(load(x + i));
            largest[c] = select_lanes(found > largest[c], found, largest[c]);
        }
    for (int c = 1; c < CHAINS; c++) largest[0] = select_lanes(largest[c] > largest[0], largest[c], largest[0]);
    return max_of_lanes(largest[0]);
}

/* Quantize one row to int8, symmetrically; return its scale. x and `to` may begin at the same address, because what is
   read is wider than what is written. */
static float quantize_row(const quantized_weight *weight, const scalar *x, int8_t *to, float *sums, int32_t *starts) {
    const int64_t num_inputs = weight->base.num_inputs, most = panel_inputs((int)weight->kernel);
    const float limit = largest_size(x, num_inputs), inverse = limit > 1e-30f ? 127.0f / limit : 0.0f;
    for (int64_t group = 0; group < num_inputs; group += weight->group_size)
        for (int64_t first = 0; first < weight->group_size; first += most, sums++, starts++) {
            const int64_t left = weight->group_size - first, end = first + (left < most ? left : most);
            ints sum = {};
            for (int64_t i = group + first; i < group + end; i += LANES) {
                /* The lower bits of 1.5 * 2^23 plus a number are the nearest integer. */
                const ints rounded = (ints)(load(x + i) * inverse + 0x1.8p23f) - 0x4b400000;
                *(bytes *)(to + i) = __builtin_convertvector(rounded, bytes);
                sum += rounded;
            }
            *sums = sum_of_lanes(__builtin_convertvector(sum, floats));
            *starts = (int32_t)*sums * -(int32_t)weight->zero_point;
        }
    return limit / 127.0f;
}

/* Prepare x [num_rows, num_inputs] in the workspace. */
static inputs prepare_inputs(const quantized_weight *weight, const scalar *x, int64_t num_rows, void *workspace) {
    const int64_t num_inputs = weight->base.num_inputs, num_blocks = num_blocks_of(weight);
    const int64_t row_bytes = copy_bytes(weight);
    const int by_int8 = is_by_int8((int)weight->kernel), reorders = weight->input_order != NULL;
    const int copies_x = by_int8 || reorders || num_rows >= CHUNK; /* see copy_bytes */
    const int has_offsets = weight->offset_type != NO_NUMBERS;
    uint8_t *const copies = workspace;
    float *const block_sums = (float *)(copies + num_rows * row_bytes);
    float *const row_scales = block_sums + num_rows * num_blocks;
    int32_t *const starts = (int32_t *)(row_scales + num_rows);
    if (copies_x || has_offsets) {
#pragma omp parallel for if (num_rows * num_inputs > MIN_PARALLEL_NUMBERS)
        for (int64_t row = 0; row < num_rows; row++) {
            const scalar *from = x + row * num_inputs;
            uint8_t *const copy = copies + row * row_bytes;
            float *const sums = block_sums + row * num_blocks;
            if (reorders) {
                reorder_row(weight, from, (scalar *)copy);
                from = (const scalar *)copy;
            } else if (copies_x && !by_int8) memcpy(copy, from, num_inputs * sizeof *from);
            if (by_int8) row_scales[row] = quantize_row(weight, from, (int8_t *)copy, sums, starts + row * num_blocks);
            else if (has_offsets) sum_blocks(weight, from, sums);
        }
    }
    return (inputs){.x = copies_x ? copies : (const uint8_t *)x,
                    .row_bytes = copies_x ? row_bytes : num_inputs * (int64_t)sizeof(scalar),
                    .block_sums = block_sums,
                    .starts = starts,
                    .row_scales = by_int8 ? row_scales : NULL,
                    .num_rows = num_rows,
                    .num_blocks = num_blocks};
}

/* -- one weight --------------------------------------------------------------------------------------------------- */

static void multiply_strips_of_thread(const quantized_weight *quantized, const inputs *inputs, const scalar *residual,
                                      scalar *output) {
    float sums[MAX_ROWS * STRIP] __attribute__((aligned(64)));
    const prepared_weight *weight = &quantized->base;
    const strip_range strips = strips_of_thread(weight);
    int64_t shaped_for = 0;
    tables tables;
    if (!is_by_int8((int)quantized->kernel)) tables = make_tables(quantized);
    for (int64_t i = strips.first; i < strips.end; i++) {
        const uint8_t *strip = weight->data + i * weight->strip_bytes;
        const uint8_t *next = strip_to_prefetch(weight, strips, i + 1);
        const ptrdiff_t next_strip = next ? next - strip : 0;
        switch (quantized->kernel) {
        case INT4_BY_INT8: strip_of_int4_by_int8(sums, quantized, inputs, &tables, strip, next_strip, &shaped_for); break;
        case INT8_BY_INT8: strip_of_int8_by_int8(sums, quantized, inputs, &tables, strip, next_strip, &shaped_for); break;
        case INT4_BY_FLOAT: strip_of_int4_by_float(sums, quantized, inputs, &tables, strip, next_strip, &shaped_for); break;
        case INT8_BY_FLOAT: strip_of_int8_by_float(sums, quantized, inputs, &tables, strip, next_strip, &shaped_for); break;
        case FLOAT8_BY_FLOAT: strip_of_float8_by_float(sums, quantized, inputs, &tables, strip, next_strip, &shaped_for); break;
        case INT5_BY_FLOAT: strip_of_int5_by_float(sums, quantized, inputs, &tables, strip, next_strip, &shaped_for); break;
        case INT6_BY_FLOAT: strip_of_int6_by_float(sums, quantized, inputs, &tables, strip, next_strip, &shaped_for); break;
        }
        finish_strip(weight, sums, inputs->row_scales, i * STRIP, residual, output, inputs->num_rows);
    }
#ifdef HAS_TILES
    if (shaped_for) _tile_release();
#endif
}

void quantized_gemm(const prepared_weight *weight, const scalar *x, const scalar *residual, scalar *output,
                    int64_t num_rows, void *workspace) {
    const quantized_weight *quantized = (const quantized_weight *)weight;
    for (int64_t first = 0; first < num_rows; first += MAX_ROWS) {
        const int64_t left = num_rows - first, rows = left < MAX_ROWS ? left : MAX_ROWS;
        const inputs inputs = prepare_inputs(quantized, x + first * weight->num_inputs, rows, workspace);
        const scalar *to = residual ? residual + first * weight->num_outputs : NULL;
        const int64_t began_ns = begin_region();
#pragma omp parallel
        {
            multiply_strips_of_thread(quantized, &inputs, to, output + first * weight->num_outputs);
            end_work();
        }
        if (is_even(weight)) end_region(began_ns);
    }
}
