"""Round matrices to Q4_K and Q6_K, the blocks that most GGUF files consist of. The package gguf only reads them.

ggml-common.h of llama.cpp defines the layouts. Scales are those of each group's extremes. llama.cpp searches for better
ones, so its error is smaller.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

BLOCK = 256
# What llama.cpp takes where the length of a row is no multiple of BLOCK.
FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


def q4_k(matrix: np.ndarray) -> np.ndarray:
    """Return the blocks of a matrix float32 [rows, columns], uint8 [rows, bytes of a row]."""
    groups = matrix.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), 0.0)
    scales = (groups.max(axis=2) - low) / 15
    scale_factors, scale_codes = _six_bits(scales)
    minimum_factors, minimum_codes = _six_bits(-low)
    steps = scale_factors * scale_codes
    minimums = minimum_factors * minimum_codes
    codes = np.round((groups + minimums[..., None]) / np.where(steps > 0, steps, 1.0)[..., None])
    codes = np.clip(codes, 0, 15).astype(np.uint8)
    first, last = slice(0, 4), slice(4, 8)
    packed_scales = [
        scale_codes[:, first] | scale_codes[:, last] >> 4 << 6,
        minimum_codes[:, first] | minimum_codes[:, last] >> 4 << 6,
        scale_codes[:, last] & 0xF | (minimum_codes[:, last] & 0xF) << 4,
    ]
    nibbles = codes[:, 0::2] | codes[:, 1::2] << 4
    factors = [_half_bytes(scale_factors), _half_bytes(minimum_factors)]
    blocks = np.concatenate([*factors, *packed_scales, nibbles.reshape(len(groups), -1)], axis=1)
    return blocks.reshape(len(matrix), -1)


def q6_k(matrix: np.ndarray) -> np.ndarray:
    """Return the blocks of a matrix float32 [rows, columns], uint8 [rows, bytes of a row]."""
    groups = matrix.reshape(-1, 16, 16)
    scales = np.abs(groups).max(axis=2) / 31
    factors = (scales.max(axis=1, keepdims=True) / 127).astype(np.float16)
    wide = factors.astype(np.float32)
    scale_codes = np.round(scales / np.where(wide > 0, wide, 1.0)).astype(np.int8)
    steps = wide * scale_codes
    codes = np.round(groups / np.where(steps > 0, steps, 1.0)[..., None])
    quarters = (np.clip(codes, -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = [quarters[:, :, 0] & 0xF | quarters[:, :, 2] << 4, quarters[:, :, 1] & 0xF | quarters[:, :, 3] << 4]
    high = quarters[:, :, 0] >> 4
    for place in (1, 2, 3):
        high = high | quarters[:, :, place] >> 4 << 2 * place
    num_blocks = len(groups)
    parts = [
        np.concatenate(low, axis=2).reshape(num_blocks, -1),
        high.reshape(num_blocks, -1),
        scale_codes.view(np.uint8),
        factors.view(np.uint8),
    ]
    return np.concatenate(parts, axis=1).reshape(len(matrix), -1)


_PACKERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Q4_K": q4_k, "Q6_K": q6_k}


def blocks_of(matrix: np.ndarray, type_name: str) -> np.ndarray:
    """Return the blocks of a matrix float32, in a type of this module or of the package gguf."""
    if type_name in _PACKERS:
        return _PACKERS[type_name](matrix)
    packed: np.ndarray = quantize(np.ascontiguousarray(matrix), GGMLQuantizationType[type_name])
    return packed


def type_in_q4_k_m(name: str, layer: int, num_layers: int, num_columns: int) -> str:
    """Return the type that llama.cpp chooses for a matrix of a Llama in a file of Q4_K_M.

    `name` is the GGUF name without layer and `.weight`: attn_v, output. `token_embd` is that of a tied embedding.
    """
    wanted = "Q4_K"
    if name in ("output", "token_embd") or (name in ("attn_v", "ffn_down") and _has_more_bits(layer, num_layers)):
        wanted = "Q6_K"
    return wanted if num_columns % BLOCK == 0 else FALLBACKS[wanted]


def _has_more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _six_bits(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers [blocks, groups], none of them negative, as a factor of each block and codes below 64."""
    factors = (numbers.max(axis=1, keepdims=True) / 63).astype(np.float16).astype(np.float32)
    codes = np.round(numbers / np.where(factors > 0, factors, 1.0))
    return factors, np.clip(codes, 0, 63).astype(np.uint8)


def _half_bytes(numbers: np.ndarray) -> np.ndarray:
    """Return float32 numbers [n, 1], which float16 holds exactly, as bytes [n, 2]."""
    return numbers.astype(np.float16).view(np.uint8)
