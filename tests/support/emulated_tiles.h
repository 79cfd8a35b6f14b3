/* AMX tiles in plain C, for a source that is included after this. A shape that a processor would refuse ends the
   process. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define syscall(...) 0 /* Linux allows tiles */

#ifndef FORGOTTEN_BYTES
#define FORGOTTEN_BYTES 0 /* at the end of each row of bfloat16: if more, the emulated processor computes wrongly */
#endif

static _Thread_local struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} shape;
static _Thread_local uint8_t tiles[8][16][64];

static void load_shape(const void *from) {
    memcpy(&shape, from, sizeof shape);
    for (int t = 0; t < 8; t++)
        if (shape.palette != 1 || shape.rows[t] < 1 || shape.rows[t] > 16 || shape.bytes[t] < 1 || shape.bytes[t] > 64)
            abort();
    memset(tiles, 0, sizeof tiles);
}

static void load_tile(int t, const void *from, long stride) {
    if (!shape.palette) abort();
    memset(tiles[t], 0, sizeof tiles[t]);
    for (int r = 0; r < shape.rows[t]; r++) memcpy(tiles[t][r], (const char *)from + r * stride, shape.bytes[t]);
}

static void store_tile(int t, void *to, long stride) {
    for (int r = 0; r < shape.rows[t]; r++) memcpy((char *)to + r * stride, tiles[t][r], shape.bytes[t]);
}

static void check_shapes(int c, int a, int b) {
    if (!shape.palette || shape.rows[c] != shape.rows[a] || shape.bytes[c] != shape.bytes[b]) abort();
    if (shape.bytes[a] != 4 * shape.rows[b] || shape.bytes[c] % 4) abort();
}

static void multiply_bytes(int c, int a, int b) {
    check_shapes(c, a, b);
    for (int m = 0; m < shape.rows[c]; m++)
        for (int k = 0; k < shape.bytes[a]; k++)
            for (int n = 0; n < shape.bytes[c] / 4; n++)
                ((int32_t *)tiles[c][m])[n] += (int8_t)tiles[a][m][k] * (int32_t)tiles[b][k / 4][4 * n + k % 4];
}

static float wide(const uint8_t *from) {
    float result = 0.0f;
    memcpy((char *)&result + 2, from, 2);
    return result;
}

static void multiply_bfloat16(int c, int a, int b) {
    check_shapes(c, a, b);
    for (int m = 0; m < shape.rows[c]; m++)
        for (int k = 0; k < shape.bytes[a] - FORGOTTEN_BYTES; k += 2)
            for (int n = 0; n < shape.bytes[c] / 4; n++)
                ((float *)tiles[c][m])[n] += wide(tiles[a][m] + k) * wide(tiles[b][k / 4] + 4 * n + k % 4);
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig load_shape
#define _tile_loadd load_tile
#define _tile_stored store_tile
#define _tile_zero(t) memset(tiles[t], 0, sizeof tiles[t])
#define _tile_release() (shape.palette = 0)
#define _tile_dpbsud multiply_bytes
#define _tile_dpbf16ps multiply_bfloat16
