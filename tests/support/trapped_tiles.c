/* AMX tiles on a processor that has none, for Linux on x86-64. Each of their instructions traps (SIGILL), and is
   emulated by emulated_tiles.h. So the compiled code is tested, and not only the source. For example, GCC 12 does not
   know that loading a tile reads memory. */

#define _GNU_SOURCE
#include <signal.h>
#include <ucontext.h>

#include "emulated_tiles.h"

enum { MAP_0F38 = 2, NO_PREFIX = 0, PREFIX_F3 = 2, PREFIX_F2 = 3 }; /* as VEX encodes them */
static const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
static struct sigaction before;

typedef struct {
    char *address; /* of the operand in memory, without its index */
    long stride;   /* the index; 0: there is none */
    int num_bytes; /* of ModRM, SIB and the displacement */
} operand;

static operand read_operand(const uint8_t *at, const greg_t *registers, int base_bit, int index_bit) {
    const int mod = at[0] >> 6, rm = at[0] & 7;
    operand found = {NULL, 0, 1};
    int base = rm;
    if (rm == 4) {
        const int index = (at[1] >> 3 & 7) | index_bit << 3;
        if (index != 4) found.stride = registers[REGISTERS[index]] << (at[1] >> 6);
        base = at[1] & 7;
        found.num_bytes++;
    }
    int32_t wide = 0;
    if (mod == 2 || (mod == 0 && base == 5)) {
        memcpy(&wide, at + found.num_bytes, 4);
        found.num_bytes += 4;
    } else if (mod == 1) wide = (int8_t)at[found.num_bytes++];
    if (mod == 0 && base == 5 && rm != 4) found.address = (char *)at + found.num_bytes + wide; /* relative to RIP */
    else if (mod == 0 && base == 5) found.address = (char *)(intptr_t)wide;
    else found.address = (char *)registers[REGISTERS[base | base_bit << 3]] + wide;
    return found;
}

/* Returns the number of bytes of the instruction; 0 if it has nothing to do with tiles. */
static int emulate(const uint8_t *at, const greg_t *registers) {
    if (at[0] != 0xc4 || (at[1] & 31) != MAP_0F38) return 0;
    const int prefix = at[2] & 3, opcode = at[3], modrm = at[4], tile = modrm >> 3 & 7;
    const int is_register = modrm >> 6 == 3, third = ~(at[2] >> 3) & 15;
    if ((opcode == 0x5c || opcode == 0x5e) && prefix == PREFIX_F3 && is_register) {
        if (opcode == 0x5c) multiply_bfloat16(tile, modrm & 7, third);
        else multiply_bytes(tile, modrm & 7, third);
        return 5;
    }
    if (opcode == 0x49 && is_register) {
        if (prefix == PREFIX_F2) memset(tiles[tile], 0, sizeof tiles[tile]);
        else if (prefix == NO_PREFIX) shape.palette = 0;
        else return 0;
        return 5;
    }
    if ((opcode != 0x49 && opcode != 0x4b) || is_register) return 0;
    const operand memory = read_operand(at + 4, registers, !(at[1] & 0x20), !(at[1] & 0x40));
    if (opcode == 0x49 && prefix == NO_PREFIX) load_shape(memory.address);
    else if (opcode == 0x4b && prefix == PREFIX_F2) load_tile(tile, memory.address, memory.stride);
    else if (opcode == 0x4b && prefix == PREFIX_F3) store_tile(tile, memory.address, memory.stride);
    else return 0;
    return 4 + memory.num_bytes;
}

static void handle(int signal_number, siginfo_t *info, void *context) {
    (void)info;
    greg_t *const registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const int num_bytes = emulate((const uint8_t *)registers[REG_RIP], registers);
    registers[REG_RIP] += num_bytes;
    if (!num_bytes) sigaction(signal_number, &before, NULL); /* the instruction traps again, as it would have */
}

/* Emulate the instructions of tiles in this process from now on. */
void trap_tiles(void) {
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGILL, &action, &before);
}
