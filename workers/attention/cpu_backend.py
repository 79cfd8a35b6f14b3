"""Compute attention on a CPU by paged_attention.c: prompt chunks and single tokens, over pages in place."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers.attention.interface import AttentionMetadata, AttentionParams, HeadNorms, PagedStep, Rotation
from workers.csrc.bindings import PAGE_FORMATS, CAttentionMetadata, CAttentionParams, CHeadNorms, CLayerPages, CRotation
from workers.csrc.build import LANES
from workers.kv_cache.kv_quantization import SCALE_BYTES, PageFormat, QuantizedPages
from workers.kv_cache.pages import KVCache, LayerShape, Shape

PACK = {torch.float32: 1, torch.bfloat16: 2}  # how many numbers one instruction multiplies in a lane


class CpuAttention:
    """Pages in tiles of sixteen tokens, in the layout that the C kernel multiplies; see paged_attention.c."""

    name = "cpu"
    supports_cuda_graphs = False

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, pages: PageFormat) -> None:
        """`library` is the one for models of `dtype`."""
        self.page_dtype = pages.dtype
        self._pages = pages
        self._pack = PACK[dtype]
        self._store_and_attend = library.store_and_attend
        self._rotate_store_and_attend = library.rotate_store_and_attend
        self._library = library
        # By layer: the parameters, the struct made of them, and the float32 sinks that the struct points to.
        self._structs: dict[int, tuple[AttentionParams, CAttentionParams, Tensor | None]] = {}

    def block_shapes(self, layer: LayerShape, block_size: int) -> tuple[Shape, Shape]:
        num_tiles, pack = -(-block_size // LANES), self._pack
        key_dim, value_dim = (-(-dim // LANES) * LANES for dim in (layer.key_dim, layer.value_dim))
        if isinstance(self._pages, QuantizedPages):  # the bytes of a tile: scales, then codes
            tiles = (layer.num_kv_heads, num_tiles)
            return (*tiles, LANES * (SCALE_BYTES + key_dim)), (*tiles, LANES * (SCALE_BYTES + value_dim))
        keys = (layer.num_kv_heads, num_tiles, key_dim // pack, LANES, pack)
        values = (layer.num_kv_heads, num_tiles, LANES // pack, value_dim, pack)
        return keys, values

    def prepare(self, metadata: AttentionMetadata) -> CAttentionMetadata:
        """Return the step as the C functions take it. It points to the tensors of `metadata`."""
        slot_mapping, block_table = metadata.slot_mapping, metadata.block_table
        query_starts, lengths = metadata.query_starts, metadata.lengths
        assert slot_mapping.is_contiguous() and block_table.is_contiguous()
        assert query_starts.is_contiguous() and lengths.is_contiguous()
        return CAttentionMetadata(
            num_tokens=slot_mapping.shape[0],
            slot_mapping=slot_mapping.data_ptr(),
            num_sequences=len(metadata.num_keys),
            query_starts=query_starts.data_ptr(),
            lengths=lengths.data_ptr(),
            block_table=block_table.data_ptr(),
            table_width=block_table.shape[1],
        )

    def attend(
        self, step: PagedStep, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        queries, keys, values = (_with_dense_heads(each) for each in (queries, keys, values))
        output = queries.new_empty(*queries.shape[:2], values.shape[-1])
        pages = self.layer_pages(step.cache, layer, queries.shape[1], params)
        self._store_and_attend(
            ctypes.byref(pages),
            ctypes.byref(step.prepared),
            queries.data_ptr(),
            queries.stride(0),
            keys.data_ptr(),
            keys.stride(0),
            values.data_ptr(),
            values.stride(0),
            output.data_ptr(),
        )
        return output

    def rotate_and_attend(
        self,
        step: PagedStep,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        params: AttentionParams,
    ) -> Tensor:
        shape = step.cache.layers[layer]
        num_heads = qkv.shape[1] // shape.key_dim - 2 * shape.num_kv_heads
        assert qkv.is_contiguous()
        output = qkv.new_empty(qkv.shape[0], num_heads * shape.value_dim)
        pages = self.layer_pages(step.cache, layer, num_heads, params)
        self._rotate_store_and_attend(
            ctypes.byref(pages),
            ctypes.byref(step.prepared),
            qkv.data_ptr(),
            ctypes.byref(rotation_struct(rotation, qkv.dtype)),
            ctypes.byref(head_norms_struct(norms)),
            output.data_ptr(),
        )
        return output

    def uses_tiles(self, cache: KVCache, layer: int, num_heads: int, params: AttentionParams) -> bool:
        """Return whether AMX tiles compute attention of prompts in this layer; see tiled_attention.c."""
        pages = self.layer_pages(cache, layer, num_heads, params)
        return bool(self._library.attention_uses_tiles(pages.params))

    def allow_tiles(self, are_allowed: bool) -> None:
        """Say whether attention may use tiles, in all layers of the process."""
        self._library.let_attention_use_tiles(are_allowed)

    def layer_pages(self, cache: KVCache, layer: int, num_heads: int, params: AttentionParams) -> CLayerPages:
        """Return a layer's parameters and pages as the C functions take them. It points to tensors of `cache`."""
        known = self._structs.get(layer)
        if known is None or known[0] is not params:
            shape = cache.layers[layer]
            sinks = None if params.sinks is None else params.sinks.float().contiguous()
            struct = CAttentionParams(
                num_heads=num_heads,
                num_kv_heads=shape.num_kv_heads,
                key_dim=shape.key_dim,
                value_dim=shape.value_dim,
                block_size=cache.block_size,
                window=params.window or 0,
                sinks=_address(sinks),
                scale=params.scale,
                softcap=params.softcap or 0.0,
                page_format=PAGE_FORMATS[self._pages.name],
                key_scales=_address(cache.key_scales[layer]),
                value_scales=_address(cache.value_scales[layer]),
            )
            known = self._structs[layer] = (params, struct, sinks)  # keeps them alive, because C has only addresses
        return CLayerPages(ctypes.addressof(known[1]), cache.keys[layer].data_ptr(), cache.values[layer].data_ptr())


def rotation_struct(rotation: Rotation, dtype: torch.dtype) -> CRotation:
    """Return cosines and sines of `dtype` as the C functions take them. It points to the tensors."""
    cosines, sines = rotation
    assert cosines.dtype is sines.dtype is dtype
    assert cosines.is_contiguous() and sines.is_contiguous()
    return CRotation(cosines.data_ptr(), sines.data_ptr(), cosines.shape[-1])


def head_norms_struct(norms: HeadNorms | None) -> CHeadNorms:
    """Return norms as the C functions take them. It points to their weights."""
    if norms is None:
        return CHeadNorms()
    for weight in (norms.query_weight, norms.key_weight):
        assert weight.dtype is torch.float32 and weight.is_contiguous()
    return CHeadNorms(norms.query_weight.data_ptr(), norms.key_weight.data_ptr(), norms.epsilon, norms.spans_heads)


def _with_dense_heads(tensor: Tensor) -> Tensor:
    """Return [num_tokens, num_heads, dim] with a token's heads next to each other in memory; copy only if needed."""
    is_dense = tensor.stride(2) == 1 and (tensor.stride(1) == tensor.shape[2] or tensor.shape[1] == 1)
    return tensor if is_dense else tensor.contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
