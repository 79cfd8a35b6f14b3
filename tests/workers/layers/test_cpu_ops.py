"""The C norm and the gates agree with torch's in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workers.csrc.build import c_library
from workers.layers.cpu_ops import CpuOps
from workers.layers.linear import can_pack

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]


def cpu_ops(dtype: torch.dtype) -> CpuOps:
    library = c_library(str(dtype).removeprefix("torch."))
    assert library is not None
    return CpuOps(library, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (5, 48), (1, 768), (70, 2048)])
def test_norm_and_gates_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, weight = (3 * torch.randn(shape)).to(dtype), torch.randn(shape[1])
    tolerance = {"rtol": 2e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 1e-6}
    expected = nn.functional.rms_norm(x.double(), shape[1:], weight.double(), 1e-5)
    torch.testing.assert_close(cpu_ops(dtype).norm(x, weight, 1e-5).double(), expected, **tolerance)
    residual = torch.randn(shape).to(dtype)
    expected, given = expected + residual, residual.clone()
    atol = 2e-6 if dtype is torch.float32 else 2e-2  # terms may cancel
    torch.testing.assert_close(cpu_ops(dtype).norm_add(x, weight, 1e-5, given).double(), expected, rtol=8e-3, atol=atol)
    gate_up = (8 * torch.randn(shape[0], 2 * shape[1])).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = nn.functional.silu(gate) * up
    torch.testing.assert_close(cpu_ops(dtype).swiglu(gate_up).double(), expected, **tolerance)
    expected = nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(cpu_ops(dtype).geglu(gate_up).double(), expected, **tolerance)
