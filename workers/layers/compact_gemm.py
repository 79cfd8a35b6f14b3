"""Linear layers whose weights take three quarters of their bytes in memory, and are not rounded, by blocked_gemm.c.

A step of few tokens takes as long as reading its weights from memory. In bfloat16 the upper bytes of a weight are of
few kinds, so they are stored as codes of four bits; compact_panels.h says how. Products are those of skinny_gemm.py,
bit by bit. This is for processors that multiply bfloat16 in vectors: with AMX, weights have another layout.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers.csrc.bindings import STRIP, CPackedWeight, CPreparedWeight
from workers.layers.cpu_weight import CpuWeight
from workers.layers.skinny_gemm import MAX_ROWS_IN_ONE_CALL

PANEL = 2 * STRIP  # BLOCKED_GEMM_WIDTH in kernels.h
MAX_SHARE = 0.9  # of a plain weight's bytes: otherwise decoding is not worth it
LINE_BYTES = 64  # of a cache line
MIN_PANELS_PER_THREAD = 4  # MIN_TASKS_PER_THREAD in strips.h: a panel is not divided among threads


def make_compact_weight(library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> CpuWeight | None:
    """Return a weight that takes fewer bytes; None if it does not gain from that, or this processor cannot read it."""
    num_outputs, num_inputs = weight.shape
    if weight.dtype is not torch.bfloat16 or num_outputs < MIN_PANELS_PER_THREAD * PANEL * torch.get_num_threads():
        return None
    weight = weight.contiguous()
    most_bytes = int(MAX_SHARE * PANEL * num_inputs * weight.element_size()) // LINE_BYTES * LINE_BYTES
    panels = torch.empty(-(-num_outputs // PANEL), most_bytes, dtype=torch.uint8)
    panel_bytes = library.write_compact_panels(
        weight.data_ptr(), num_outputs, num_inputs, most_bytes, panels.data_ptr()
    )
    if not panel_bytes:
        return None
    data = panels[:, :panel_bytes].contiguous()
    base = CPreparedWeight(
        data=data.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        strip_bytes=panel_bytes // (PANEL // STRIP),
    )
    struct = CPackedWeight(base=base, block_width=PANEL)
    return CpuWeight(library, library.compact_gemm, struct, MAX_ROWS_IN_ONE_CALL, 0, [data, bias])
