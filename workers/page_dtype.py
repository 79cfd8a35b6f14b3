"""How keys and values are kept in pages: as they are, or in a byte each."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

LARGEST_FLOAT8 = 448.0
SCALE_BYTES = 4


class PageDtype(Protocol):
    """One of them. What it stores is finite, whatever it is given."""

    name: str
    stored: torch.dtype

    def width(self, dim: int) -> int:
        """How many stored numbers a vector of `dim` takes."""

    def encode(self, vectors: Tensor) -> Tensor:
        """[..., dim] -> [..., width]."""

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., width] -> [..., dim]."""


class PlainPages:
    """In the model's own dtype."""

    name = "auto"

    def __init__(self, dtype: torch.dtype) -> None:
        self.stored = dtype

    def width(self, dim: int) -> int:
        return dim

    def encode(self, vectors: Tensor) -> Tensor:
        return vectors.nan_to_num(0.0, 0.0, 0.0)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored


class Float8Pages:
    """float8 e4m3 without a scale: three bits after the point, and numbers up to 448, which keys and values keep to.

    Micikevicius et al., "FP8 formats for deep learning", 2022, section 3.
    """

    name = "fp8_e4m3"
    stored = torch.uint8  # which torch can copy and gather on every device

    def width(self, dim: int) -> int:
        return dim

    def encode(self, vectors: Tensor) -> Tensor:
        clamped = vectors.nan_to_num(0.0, 0.0, 0.0).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
        return clamped.to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored.view(torch.float8_e4m3fn).to(dtype)


class Int8Pages:
    """int8 with a scale for each vector, its largest number's, which stands behind it in the page."""

    name = "int8"
    stored = torch.uint8

    def width(self, dim: int) -> int:
        return dim + SCALE_BYTES

    def encode(self, vectors: Tensor) -> Tensor:
        wide = vectors.nan_to_num(0.0, 0.0, 0.0).float()
        scales = wide.abs().amax(dim=-1, keepdim=True).div(127.0).clamp(min=1e-30)
        rounded = (wide / scales).round().to(torch.int8)
        return torch.cat([rounded.view(torch.uint8), scales.view(torch.uint8)], dim=-1)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        rounded, scales = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
        aligned = scales.clone(memory_format=torch.contiguous_format)  # not contiguous(), which may keep an odd address
        return (rounded.view(torch.int8) * aligned.view(torch.float32)).to(dtype)


def page_dtype(name: str, dtype: torch.dtype) -> PageDtype:
    """By the setting's word for it, for a model of this dtype."""
    match name:
        case "fp8_e4m3":
            return Float8Pages()
        case "int8":
            return Int8Pages()
        case _:
            return PlainPages(dtype)
