"""The number formats of KV pages: the model's own dtype, or one byte per number and a scale per vector.

A format defines the stored numbers, by `encode` and `decode`. Each attention backend defines where the bytes and scales
of a block are.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

SCALE_BYTES = 4  # float32: a smaller scale would save 2 bytes of 68 or more
SMALLEST_SCALE = 1e-30  # its reciprocal is finite; a vector that needs a smaller one is stored as zeros


class PageFormat(Protocol):
    """One number format. Whatever it encodes, the result is finite: attention multiplies masked cells by zero."""

    name: str  # as --kv-cache-dtype has it
    dtype: torch.dtype  # type of the pages' elements

    def width(self, dim: int) -> int:
        """Return how many elements a vector of `dim` numbers takes."""

    def encode(self, vectors: Tensor, scales: Tensor | None = None) -> Tensor:
        """Convert numbers [..., num_heads, dim] to elements [..., num_heads, width].

        scales: [num_heads] float32, for formats with codes; None: each vector has its own.
        """

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert elements [..., num_heads, width] to numbers [..., num_heads, dim] of `dtype`."""


class PlainPages:
    """Pages in the model's own dtype."""

    name = "auto"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def width(self, dim: int) -> int:
        return dim

    def encode(self, vectors: Tensor, scales: Tensor | None = None) -> Tensor:
        return vectors.nan_to_num(0.0, 0.0, 0.0)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored


class QuantizedPages:
    """Pages of one byte per number, its code, and a float32 scale per vector: a number is its code's value times it.

    A vector is what one head stores for one token. Its scale makes its largest magnitude the largest code, so no vector
    overflows, whatever the model's range is; and it is computed when the vector is stored, so nothing is calibrated. If
    the checkpoint has scales of its own for float8, they are stored in its place.
    """

    dtype = torch.uint8  # torch copies and gathers bytes on every device, float8 not

    def __init__(self, name: str, code_dtype: torch.dtype, largest_code: float) -> None:
        self.name, self.code_dtype, self.largest_code = name, code_dtype, largest_code

    def width(self, dim: int) -> int:
        return dim + SCALE_BYTES

    def encode(self, vectors: Tensor, scales: Tensor | None = None) -> Tensor:
        """Return the codes of each vector, followed by the bytes of its scale."""
        wide = vectors.nan_to_num(0.0, 0.0, 0.0).float()
        if scales is None:
            own = wide.abs().amax(dim=-1, keepdim=True).div(self.largest_code).clamp(min=SMALLEST_SCALE)
        else:
            own = scales[:, None].expand(*wide.shape[:-1], 1).contiguous()
        codes = (wide / own).clamp(-self.largest_code, self.largest_code)
        codes = codes.round() if self.code_dtype is torch.int8 else codes
        return torch.cat([codes.to(self.code_dtype).view(torch.uint8), own.view(torch.uint8)], dim=-1)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scales = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
        aligned = scales.clone(memory_format=torch.contiguous_format)  # contiguous() may keep an unaligned address
        return (codes.view(self.code_dtype).float() * aligned.view(torch.float32)).to(dtype)


# Steps of a 127th of the vector's largest magnitude.
INT8_PAGES = QuantizedPages("int8", torch.int8, 127.0)
# e4m3: three bits of mantissa. Micikevicius et al., "FP8 formats for deep learning", 2022, section 3.
FLOAT8_PAGES = QuantizedPages("fp8_e4m3", torch.float8_e4m3fn, 448.0)


def page_format(name: str, dtype: torch.dtype) -> PageFormat:
    """Return the format that --kv-cache-dtype calls `name`, for a model of this dtype."""
    return {pages.name: pages for pages in (INT8_PAGES, FLOAT8_PAGES)}.get(name) or PlainPages(dtype)
