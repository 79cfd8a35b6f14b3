/* quantized_gemm.c for a processor with AMX, whose tiles are emulated. */

#include "../../support/emulated_tiles.h"

#include "quantized_gemm.c"
