/* tiled_attention.c as it is compiled for a processor with AMX. See trapped_tiles.c. */

#include <sys/syscall.h>
#include <unistd.h>

#define syscall(...) 0 /* Linux allows tiles */

#include "tiled_attention.c"
