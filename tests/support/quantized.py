"""Quantized weights of random codes."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.quantization.quantized_tensor import INT4_LEVELS, Activations, Encoding, QuantizedTensor
from workers.quantization.two_level_scales import TwoLevelScales

# Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, appendix E.
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# Four bits of floating point: a sign, two bits of exponent, one of mantissa ("OCP Microscaling Formats", 2023).
FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def random_matrix(
    num_outputs: int,
    num_inputs: int,
    encoding: Encoding,
    group_size: int | None = None,
    *,
    levels: tuple[float, ...] = INT4_LEVELS,
    scales: torch.dtype = torch.float16,
    has_offsets: bool = False,
    is_reordered: bool = False,
    activations: Activations = "float",
) -> QuantizedTensor:
    """Return a matrix with every code of its encoding; `group_size` None: one scale for each row."""
    if encoding == "float8":
        codes = torch.randint(0, 256, (num_outputs, num_inputs), dtype=torch.uint8)
        codes = codes.where(codes & 0x7F != 0x7F, 0).view(torch.float8_e4m3fn)  # 0x7f is NaN
    else:
        width = num_inputs // 2 if encoding == "int4" else num_inputs
        codes = torch.randint(0, 256, (num_outputs, width), dtype=torch.uint8)
        codes = codes if encoding == "int4" else codes.view(torch.int8)
    num_groups = num_inputs // (group_size or num_inputs)
    return QuantizedTensor(
        codes,
        _random_scales(num_outputs, num_groups).to(scales),
        offsets=(torch.randn(num_outputs, num_groups) / 50).to(scales) if has_offsets else None,
        levels=levels,
        input_order=torch.randperm(num_inputs) if is_reordered else None,
        activations=activations,
    )


def random_two_levels(num_outputs: int, num_groups: int, super_block_groups: int) -> TwoLevelScales:
    """Return scales that are products of signed bytes and float16."""
    factors = torch.randint(-128, 128, (num_outputs, num_groups), dtype=torch.int8)
    return TwoLevelScales(factors, (_random_scales(num_outputs, num_groups // super_block_groups) / 64).half())


def _random_scales(num_outputs: int, num_groups: int) -> Tensor:
    return (torch.rand(num_outputs, num_groups) + 0.5) / 100
