"""Packed linear layers compute what the layers they replace compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workers.layers.linear import PackedLinear, can_pack, pack_linears

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5), (33, 48), (512, 16), (1, 8), (96, 200)])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_what_the_original_layer_computes(
    dtype: torch.dtype, shape: tuple[int, int], num_rows: int, bias: bool
) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(shape[1], shape[0], bias=bias)
    x = torch.randn(1, num_rows, shape[1])
    expected = linear.to(dtype).double()(x.to(dtype).double())
    with torch.inference_mode():
        output = PackedLinear(linear.to(dtype))(x.to(dtype))
    assert output.shape == expected.shape and output.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    assert (output.double() - expected).norm() <= tolerance * expected.norm()


def test_only_plain_linear_layers_are_replaced() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
            return 2 * super().forward(input)

    model = nn.ModuleDict({"plain": nn.Linear(4, 4), "inner": nn.ModuleList([nn.Linear(4, 2)]), "own": Scaled(4, 4)})
    assert pack_linears(model) == 2
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("PackedLinear") == 2 and kinds.count("Linear") == 0 and kinds.count("Scaled") == 1
