"""The number formats of KV pages: the model's own dtype, or one byte per element."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

MAX_FLOAT8 = 448.0  # the largest finite number of e4m3
SCALE_BYTES = 4


class PageFormat(Protocol):
    """One number format. Whatever it encodes, the result is finite: attention multiplies masked cells by zero."""

    name: str  # as --kv-cache-dtype has it
    dtype: torch.dtype  # of the pages' elements

    def width(self, dim: int) -> int:
        """Return how many elements a vector of `dim` numbers takes."""

    def encode(self, vectors: Tensor) -> Tensor:
        """Convert numbers [..., dim] to elements [..., width]."""

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert elements [..., width] to numbers [..., dim] of `dtype`."""


class PlainPages:
    """Pages in the model's own dtype."""

    name = "auto"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def width(self, dim: int) -> int:
        return dim

    def encode(self, vectors: Tensor) -> Tensor:
        return vectors.nan_to_num(0.0, 0.0, 0.0)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored


class Float8Pages:
    """float8 e4m3 without a scale: three bits of mantissa, and numbers up to 448. Keys and values stay below that.

    Micikevicius et al., "FP8 formats for deep learning", 2022, section 3.
    """

    name = "fp8_e4m3"
    dtype = torch.uint8  # torch copies and gathers bytes on every device, float8 not

    def width(self, dim: int) -> int:
        return dim

    def encode(self, vectors: Tensor) -> Tensor:
        clamped = vectors.nan_to_num(0.0, 0.0, 0.0).clamp(-MAX_FLOAT8, MAX_FLOAT8)
        return clamped.to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored.view(torch.float8_e4m3fn).to(dtype)


class Int8Pages:
    """int8 with a float32 scale for each vector, its largest magnitude / 127. The scale follows the vector's bytes."""

    name = "int8"
    dtype = torch.uint8

    def width(self, dim: int) -> int:
        return dim + SCALE_BYTES

    def encode(self, vectors: Tensor) -> Tensor:
        wide = vectors.nan_to_num(0.0, 0.0, 0.0).float()
        scales = wide.abs().amax(dim=-1, keepdim=True).div(127.0).clamp(min=1e-30)
        rounded = (wide / scales).round().to(torch.int8)
        return torch.cat([rounded.view(torch.uint8), scales.view(torch.uint8)], dim=-1)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        rounded, scales = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
        aligned = scales.clone(memory_format=torch.contiguous_format)  # contiguous() may keep an unaligned address
        return (rounded.view(torch.int8) * aligned.view(torch.float32)).to(dtype)


def page_format(name: str, dtype: torch.dtype) -> PageFormat:
    """Return the format that --kv-cache-dtype calls `name`, for a model of this dtype."""
    match name:
        case "fp8_e4m3":
            return Float8Pages()
        case "int8":
            return Int8Pages()
        case _:
            return PlainPages(dtype)
