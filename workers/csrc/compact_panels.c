/* Making weights compact; compact_panels.h describes the layout, and blocked_gemm.c multiplies by it. */

#include "compact_panels.h"

#ifdef HAS_COMPACT_PANELS

#include <stdlib.h>

enum { PANEL = BLOCKED_GEMM_WIDTH, RECORD_WEIGHTS = 2 * PANEL, NO_CODE = 255 };

/* The codes of all upper bytes in a panel: the most frequent ones have one. */
typedef struct { uint8_t code_of[256], upper_bytes[NUM_CODES]; } panel_codes;

/* Lay out a panel as oneDNN has it: [num_inputs / 2, PANEL, 2]; outputs that do not exist are zero. */
static void lay_out(const scalar *weight, int64_t num_outputs, int64_t num_inputs, int64_t panel, scalar *plain) {
    for (int64_t i = 0; i < PANEL; i++) {
        const int64_t output = panel * PANEL + i;
        for (int64_t input = 0; input < num_inputs; input++)
            plain[input / 2 * RECORD_WEIGHTS + i * 2 + input % 2] =
                output < num_outputs ? weight[output * num_inputs + input] : 0;
    }
}

static panel_codes choose_codes(const scalar *plain, int64_t num_inputs) {
    panel_codes codes;
    int64_t counts[256] = {};
    for (int64_t i = 0; i < PANEL * num_inputs; i++) counts[plain[i] >> 8]++;
    memset(codes.code_of, NO_CODE, sizeof codes.code_of);
    for (int code = 0; code < NUM_CODES; code++) {
        int most = 0;
        for (int upper = 1; upper < 256; upper++)
            if (counts[upper] > counts[most]) most = upper;
        codes.upper_bytes[code] = (uint8_t)most;
        if (codes.code_of[most] == NO_CODE) codes.code_of[most] = (uint8_t)code;
        counts[most] = -1;
    }
    return codes;
}

static int is_compact(const panel_codes *codes, const scalar *record) {
    int num_without = 0;
    for (int i = 0; i < RECORD_WEIGHTS; i++) num_without += codes->code_of[record[i] >> 8] == NO_CODE;
    return num_without == 0;
}

static void write_compact_record(const panel_codes *codes, const scalar *record, uint8_t *to) {
    uint8_t *const of_codes = to + 128;
    memset(of_codes, 0, 64);
    for (int i = 0; i < RECORD_WEIGHTS; i++) {
        const int vector = i / 32, word = i % 32; /* unpacking takes eight bytes of each sixteen for a vector */
        const int place = word / 8 * 16 + vector % 2 * 8 + word % 8, half = vector / 2;
        to[64 * half + place] = (uint8_t)record[i];
        of_codes[place] |= (uint8_t)(codes->code_of[record[i] >> 8] << 4 * half);
    }
}

/* Write a panel, and return its bytes; 0 if they are more than max_bytes. */
static int64_t write_panel(const panel_codes *codes, const scalar *plain, int64_t num_inputs, int64_t max_bytes,
                           uint8_t *panel) {
    int64_t num_bytes = compact_header_bytes(num_inputs);
    if (num_bytes > max_bytes) return 0;
    memset(panel, 0, (size_t)num_bytes);
    for (int i = 0; i < 64; i++) panel[i] = codes->upper_bytes[i % NUM_CODES];
    uint8_t *const is_plain = panel + 64;
    for (int64_t pair = 0; pair < num_inputs / 2; pair++, plain += RECORD_WEIGHTS) {
        uint8_t *const record = panel + num_bytes;
        const int compact = is_compact(codes, plain);
        num_bytes += compact ? COMPACT_RECORD_BYTES : PLAIN_RECORD_BYTES;
        if (num_bytes > max_bytes) return 0;
        if (compact) write_compact_record(codes, plain, record);
        else {
            is_plain[pair / 8] |= (uint8_t)(1 << pair % 8);
            memcpy(record, plain, PLAIN_RECORD_BYTES);
        }
    }
    return num_bytes;
}

int64_t write_compact_panels(const scalar *weight, int64_t num_outputs, int64_t num_inputs, int64_t panel_bytes,
                             uint8_t *data) {
    if (blocked_gemm_block_width() != PANEL || num_inputs % 2) return 0;
    int64_t most = 0, num_failed = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(max : most) reduction(+ : num_failed)
    for (int64_t panel = 0; panel < (num_outputs + PANEL - 1) / PANEL; panel++) {
        scalar *const plain = malloc((size_t)(PANEL * num_inputs) * sizeof *plain);
        int64_t num_bytes = 0;
        if (plain) {
            lay_out(weight, num_outputs, num_inputs, panel, plain);
            const panel_codes codes = choose_codes(plain, num_inputs);
            num_bytes = write_panel(&codes, plain, num_inputs, panel_bytes, data + panel * panel_bytes);
        }
        free(plain);
        num_failed += num_bytes == 0;
        if (num_bytes > most) most = num_bytes;
    }
    return num_failed ? 0 : most;
}

#else
int64_t write_compact_panels(const scalar *weight, int64_t num_outputs, int64_t num_inputs, int64_t panel_bytes,
                             uint8_t *data) {
    (void)weight, (void)num_outputs, (void)num_inputs, (void)panel_bytes, (void)data;
    return 0;
}
#endif
