"""The Triton norm and the gates agree with float64."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_device import TOLERANCES, assert_same, random, triton_ops

add_norm, swiglu, geglu = triton_ops.add_norm, triton_ops.swiglu, triton_ops.geglu

pytestmark = pytest.mark.usefixtures("triton_kernels_run")


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("with_delta", [True, False])
def test_the_norm_is_that_of_the_rounded_sum(dtype: torch.dtype, with_delta: bool) -> None:
    residual, delta = random(5, 100, dtype=dtype), (30 * random(5, 130, dtype=dtype))[:, 9:109] if with_delta else None
    weight, before = 1 + random(100, dtype=dtype) / 4, residual.clone()
    normed = add_norm(residual, delta, weight, 1e-5)
    if delta is None:
        assert torch.equal(residual, before)
    elif dtype is torch.bfloat16:
        assert_same(residual, before.double() + delta.double())
    else:
        assert torch.equal(residual, before + delta)
    wide = residual.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert_same(normed, expected)
    if dtype is torch.float16:  # rounded once, so it is the nearest number, except where float32 sees a tie
        assert (normed == expected.half()).double().mean() > 0.99


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_first_half_are_gates(dtype: torch.dtype) -> None:
    gate_up = 5 * random(3, 2 * 1100, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_same(swiglu(gate_up), torch.nn.functional.silu(gate) * up)
    assert_same(geglu(gate_up), torch.nn.functional.gelu(gate, approximate="tanh") * up)
