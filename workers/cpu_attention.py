"""Attention on a CPU, by the C of paged_attention.c: prompt chunks and single tokens, over pages where they lie."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from workers.kv_cache import KVCache, LayerShape, Shape
from workers.paged_step import HeadNorms, PagedStep, Rotation, Score, StepRows

LANES = 16
MAX_HEAD_DIM = 512  # what a thread's stack holds of a row
PACK = {torch.float32: 1, torch.bfloat16: 2}  # numbers that are multiplied at once


class _Layer(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size")),
        ("window", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class CpuAttention:
    """Pages in tiles of sixteen tokens, packed as the multiplications read them."""

    name = "cpu"
    captures = False

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        pointer: Any = ctypes.c_void_p
        number: Any = ctypes.c_int64
        self.stored = dtype
        self._pack = PACK[dtype]
        of_step = [number, pointer, number, pointer, pointer, pointer, number]
        self._attend = library.write_and_attend
        self._attend.argtypes = [*([pointer] * 3), *of_step, *([pointer, number] * 3), pointer]
        self._attend.restype = None
        self._attend_rotated = library.rotate_write_and_attend
        self._attend_rotated.argtypes = [*([pointer] * 3), *of_step, *([pointer] * 5), ctypes.c_float, pointer]
        self._attend_rotated.restype = None
        self._described: dict[int, tuple[Score, _Layer, Tensor | None]] = {}

    def block_shapes(self, layer: LayerShape, block_size: int) -> tuple[Shape, Shape]:
        num_tiles, pack = -(-block_size // LANES), self._pack
        key_dim, value_dim = (-(-dim // LANES) * LANES for dim in (layer.key_dim, layer.value_dim))
        keys = (layer.num_kv_heads, num_tiles, key_dim // pack, LANES, pack)
        values = (layer.num_kv_heads, num_tiles, LANES // pack, value_dim, pack)
        return keys, values

    def prepare(self, rows: StepRows) -> tuple[int, ...]:
        """The C functions' arguments that are the same for all layers."""
        tensors = (rows.query_starts, rows.lengths, rows.block_table)
        assert all(each.is_contiguous() for each in (*tensors, rows.slot_mapping))
        written = (rows.slot_mapping.shape[0], rows.slot_mapping.data_ptr())
        return (*written, len(rows.num_keys), *(each.data_ptr() for each in tensors), rows.block_table.shape[1])

    def attend(
        self, step: PagedStep, layer: int, queries: Tensor, keys: Tensor, values: Tensor, score: Score
    ) -> Tensor:
        given = [_with_dense_heads(each) for each in (queries, keys, values)]
        output = queries.new_empty(*queries.shape[:2], values.shape[-1])
        of_layer = self.layer_arguments(step.cache, layer, queries.shape[1], score)
        pointers = (each for tensor in given for each in (tensor.data_ptr(), tensor.stride(0)))
        self._attend(*of_layer, *step.prepared, *pointers, output.data_ptr())
        return output

    def attend_rotated(
        self, step: PagedStep, layer: int, qkv: Tensor, rotation: Rotation, norms: HeadNorms | None, score: Score
    ) -> Tensor:
        shape = step.cache.layers[layer]
        num_heads = qkv.shape[1] // shape.key_dim - 2 * shape.num_kv_heads
        cosines, sines = rotation
        assert qkv.is_contiguous() and cosines.is_contiguous() and sines.is_contiguous()
        output = qkv.new_empty(qkv.shape[0], num_heads * shape.value_dim)
        self._attend_rotated(
            *self.layer_arguments(step.cache, layer, num_heads, score),
            *step.prepared,
            *(qkv.data_ptr(), cosines.data_ptr(), sines.data_ptr()),
            *((None, None, 0.0) if norms is None else _pointers_of(norms)),
            output.data_ptr(),
        )
        return output

    def layer_arguments(self, cache: KVCache, layer: int, num_heads: int, score: Score) -> tuple[int, int, int]:
        """The C functions' arguments that are the same for all steps."""
        known = self._described.get(layer)
        if known is None or known[0] is not score:
            shape = cache.layers[layer]
            sinks = None if score.sinks is None else score.sinks.float().contiguous()
            described = _Layer(
                *(num_heads, shape.num_kv_heads, shape.key_dim, shape.value_dim, cache.block_size, score.window or 0),
                *(None if sinks is None else sinks.data_ptr(), score.scale, score.softcap or 0.0),
            )
            known = self._described[layer] = (score, described, sinks)  # kept, for C is given addresses only
        return ctypes.addressof(known[1]), cache.keys[layer].data_ptr(), cache.values[layer].data_ptr()


def _pointers_of(norms: HeadNorms) -> tuple[int, int, float]:
    return norms.query_weight.data_ptr(), norms.key_weight.data_ptr(), norms.epsilon


def _with_dense_heads(tensor: Tensor) -> Tensor:
    """The same [num_tokens, num_heads, dim], a token's heads one after the other in memory."""
    is_dense = tensor.stride(2) == 1 and (tensor.stride(1) == tensor.shape[2] or tensor.shape[1] == 1)
    return tensor if is_dense else tensor.contiguous()
