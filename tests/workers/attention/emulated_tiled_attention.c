/* tiled_attention.c for a processor with AMX, whose tiles are emulated. */

#include "../../support/emulated_tiles.h"

#include "tiled_attention.c"
