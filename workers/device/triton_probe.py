"""The smallest Triton kernel: launched once, it tells whether Triton's kernels run on a GPU."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
# Kernels are in Triton's language, for which mypy has no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_kernel(output, size: tl.constexpr):
    tl.store(output + tl.arange(0, size), tl.arange(0, size))


def launch(device: torch.device) -> None:
    """Compile and launch a kernel, and read its result. Raises whatever the compiler or the driver does."""
    output = torch.zeros(16, dtype=torch.int32, device=device)
    _write_kernel[(1,)](output, 16, num_warps=1)
    if output.tolist() != list(range(16)):
        raise RuntimeError(f"a kernel that writes 0 to 15 wrote {output.tolist()}")
