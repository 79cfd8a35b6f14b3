/* What multiplications by prepared weights share: strips are divided among threads, prefetched and finished. */

#ifndef SERVEKIT_STRIPS_H
#define SERVEKIT_STRIPS_H

#include <omp.h>
#include <stddef.h>

#include "kernels.h"
#include "team.h"

/* Into the second-level cache, because the first is small: a strip of 2048 inputs is 128 KiB in bfloat16. */
static inline void prefetch(const void *line) { __builtin_prefetch(line, 0, 2); }

/* The strips of the calling thread, [first, end). */
typedef struct { int64_t first, end; } strip_range;

static inline strip_range strips_of_thread(const prepared_weight *weight) {
    const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
    const int64_t num_strips = (weight->num_outputs + STRIP - 1) / STRIP;
    return (strip_range){num_strips * thread / num_threads, num_strips * (thread + 1) / num_threads};
}

/* Whether all threads have nearly equal numbers of strips, so that one which ends late was kept from its work. */
static inline int is_even(const prepared_weight *weight) {
    return weight->num_outputs >= 4 * STRIP * omp_get_max_threads();
}

enum { MIN_TASKS_PER_THREAD = 4 }; /* so that threads end at about the same time */

/* Whether there are enough panels of blocked_gemm for all threads, without dividing rows among them. */
static inline int has_panels_for_all(const prepared_weight *weight) {
    return weight->num_outputs >= MIN_TASKS_PER_THREAD * BLOCKED_GEMM_WIDTH * omp_get_max_threads();
}

/* The data of strip `index`. From the end of the thread's strips on, these are its strips of the weight that is
   multiplied next; NULL if there is none. */
static inline const void *strip_to_prefetch(const prepared_weight *weight, strip_range strips, int64_t index) {
    if (index < strips.end) return weight->data + index * weight->strip_bytes;
    const prepared_weight *next = weight->next;
    if (!next) return NULL;
    return next->data + (strips_of_thread(next).first + index - strips.end) * next->strip_bytes;
}

/* output = sums [num_rows, STRIP] * row_scales + bias + residual, for the outputs from `first` on. residual and output have
   num_outputs columns. row_scales [num_rows]; NULL: all are 1. */
static inline void finish_strip(const prepared_weight *weight, const float *sums, const float *row_scales,
                                int64_t first, const scalar *residual, scalar *output, int64_t num_rows) {
    const int64_t num_outputs = weight->num_outputs, left = num_outputs - first;
    for (int64_t row = 0; row < num_rows; row++, sums += STRIP) {
        const int64_t offset = row * num_outputs + first;
        const float scale = row_scales ? row_scales[row] : 1.0f;
        if (left >= STRIP) {
            for (int64_t i = 0; i < STRIP; i += LANES) {
                floats sum = *(const floats *)(sums + i) * scale;
                if (weight->bias) sum += load(weight->bias + first + i);
                if (residual) sum += load(residual + offset + i);
                store(output + offset + i, sum);
            }
        } else {
            for (int64_t i = 0; i < left; i++) {
                const float bias = weight->bias ? to_float(weight->bias[first + i]) : 0.0f;
                output[offset + i] = from_float(sums[i] * scale + bias + (residual ? to_float(residual[offset + i]) : 0.0f));
            }
        }
    }
}

#endif
