/* AMX tiles: registers of 16 rows of 64 bytes, with which some processors multiply small matrices.

   Tiles 0 and 1 hold the sums of the first 16 rows of x for the two halves of a strip, 2 and 3 those of up to 16 more
   rows; 4 and 5 hold x, 6 and 7 weights. */

#ifndef SERVEKIT_TILES_H
#define SERVEKIT_TILES_H

#include <stdint.h>

enum { TILE = 16 }; /* the rows of a tile */

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define HAS_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether Linux lets this process use tiles. The first call asks for it. */
static inline int may_use_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    static int answer = -1;
    if (answer < 0) answer = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return answer;
}

/* Call this between writing to memory and loading tiles, or their shape, from there. The intrinsics of GCC 12 do not
   tell the compiler that they read memory. Without this, the compiler might write later, or never. */
static inline void finish_writing(const void *to) { __asm__ volatile("" : : "r"(to) : "memory"); }

/* Shape the tiles: `first` rows in tiles 0, 1 and 4, and `second` rows in tiles 2, 3 and 5. Those of weights have
   weight_rows rows, of four bytes of x each. */
static inline void shape_tiles_of(int64_t first, int64_t second, int64_t weight_rows) {
    struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    const uint8_t one = (uint8_t)first, other = (uint8_t)second, inner = (uint8_t)weight_rows;
    const uint8_t rows[8] = {one, one, other, other, one, other, inner, inner};
    for (int tile = 0; tile < 8; tile++) {
        shape.rows[tile] = rows[tile];
        shape.bytes[tile] = (uint16_t)(tile == 4 || tile == 5 ? 4 * weight_rows : 64);
    }
    finish_writing(&shape);
    _tile_loadconfig(&shape);
}

/* Shape the tiles for num_rows rows of x, up to 32. */
static inline void shape_tiles(int64_t num_rows, int64_t weight_rows) {
    shape_tiles_of(num_rows < TILE ? num_rows : TILE, num_rows > TILE ? num_rows - TILE : 1, weight_rows);
}
#endif

#endif
