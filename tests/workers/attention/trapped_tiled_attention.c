/* tiled_attention.c for a processor with AMX, as it is compiled for one. See trapped_tiles.c. */

#include <sys/syscall.h>
#include <unistd.h>

#define syscall(...) 0 /* Linux allows tiles */

#include "tiled_attention.c"
