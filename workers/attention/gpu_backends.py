"""Compute attention on a GPU.

All backends share the page layout [num_blocks, block_size, num_kv_heads, dim] of flash-attn.

A block of codes has them in that order, too, and after them their scales [block_size, num_kv_heads].

Triton's kernels are our own and serve every model. flash-attn 2, and torch's version of it, need pages of a multiple of
256 tokens and have no attention sinks. All of them use our own kernel to store keys and values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.attention import triton_kernels, triton_rotary
from workers.attention.interface import AttentionMetadata, AttentionParams, HeadNorms, PagedStep, Rotation
from workers.attention.triton_kernels import LayerPages
from workers.kv_cache.kv_quantization import SCALE_BYTES, PageFormat, PlainPages, QuantizedPages
from workers.kv_cache.pages import KVCache, LayerShape, Shape

FLASH_BLOCK_SIZE = 256  # flash-attn 2 needs a multiple of it
FLASH_HEAD_DIM = 256  # the largest that flash-attn 2 has kernels for
ALIGNMENT_BYTES = 16  # of codes and of scales, for loads of that width


class BackendUnavailableError(Exception):
    """A backend cannot be used here; the message says why."""


class TritonAttention:
    """Attention by triton_kernels.py. It serves every model, and CUDA graphs can capture it."""

    name = "triton"
    supports_cuda_graphs = True

    def __init__(self, pages: PageFormat) -> None:
        """`pages` may have any format; float8 needs a GPU of compute capability 8.9."""
        self.page_dtype = pages.dtype
        self._format = pages
        self._workspaces: dict[tuple[int, int, int], Tensor] = {}
        # By layer: the key pages, and views of these and of the value pages.
        self._layer_pages: dict[int, tuple[Tensor, LayerPages]] = {}

    def block_shapes(self, layer: LayerShape, block_size: int) -> tuple[Shape, Shape]:
        keys, values = _vectors_of(layer, block_size)
        if isinstance(self._format, QuantizedPages):
            return (_first_scale(keys) + _scale_bytes(keys),), (_first_scale(values) + _scale_bytes(values),)
        return keys, values

    def prepare(self, metadata: AttentionMetadata) -> Any:
        """Return nothing: the kernels take the metadata as it is."""

    def attend(
        self, step: PagedStep, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        pages, slot_mapping = self._pages(step.cache, layer), step.metadata.slot_mapping
        triton_kernels.store(_with_dense_dims(keys), _with_dense_dims(values), pages, slot_mapping)
        return self.attend_to_pages(step, layer, _with_dense_dims(queries), params)

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
        cosines, sines = rotation
        triton_rotary.rotate_and_store(
            qkv,
            num_heads,
            shape.num_kv_heads,
            shape.key_dim,
            cosines,
            sines,
            None if norms is None else norms.query_weight,
            None if norms is None else norms.key_weight,
            0.0 if norms is None else norms.epsilon,
            self._pages(step.cache, layer),
            step.metadata.slot_mapping,
        )
        queries = qkv.view(qkv.shape[0], -1, shape.key_dim)[:, :num_heads]
        return self.attend_to_pages(step, layer, queries, params).flatten(1)

    def attend_to_pages(self, step: PagedStep, layer: int, queries: Tensor, params: AttentionParams) -> Tensor:
        """Attend to what the pages hold now, without storing anything. Returns [num_tokens, num_heads, value_dim]."""
        shape, metadata = step.cache.layers[layer], step.metadata
        output = queries.new_empty(*queries.shape[:2], shape.value_dim)
        triton_kernels.attend(
            queries,
            self._pages(step.cache, layer),
            metadata.query_starts,
            metadata.lengths,
            metadata.block_table,
            output,
            params.scale,
            self._workspace(queries.shape[1], shape, queries.device),
            params.window,
            params.softcap,
            params.sinks,
        )
        return output

    def _pages(self, cache: KVCache, layer: int) -> LayerPages:
        keys, values = cache.keys[layer], cache.values[layer]
        known = self._layer_pages.get(layer)
        if known is None or known[0] is not keys:
            known = self._layer_pages[layer] = (keys, self._views(cache, layer, keys, values))
        return known[1]

    def _views(self, cache: KVCache, layer: int, keys: Tensor, values: Tensor) -> LayerPages:
        if not isinstance(self._format, QuantizedPages):
            return LayerPages(keys, values)
        key_shape, value_shape = _vectors_of(cache.layers[layer], cache.block_size)
        key_codes, key_scales = _split(keys, key_shape, self._format.code_dtype)
        value_codes, value_scales = _split(values, value_shape, self._format.code_dtype)
        given = cache.key_scales[layer], cache.value_scales[layer]
        return LayerPages(key_codes, value_codes, key_scales, value_scales, *given)

    def _workspace(self, num_heads: int, shape: LayerShape, device: torch.device) -> Tensor:
        """Return a workspace that all layers of one size share: they run one after the other, on one stream."""
        sizes = (num_heads, shape.num_kv_heads, shape.value_dim)
        if sizes not in self._workspaces:
            self._workspaces[sizes] = triton_kernels.make_workspace(*sizes, device)
        return self._workspaces[sizes]


def _vectors_of(layer: LayerShape, block_size: int) -> tuple[Shape, Shape]:
    """Return the shapes of a block's keys and values, [block_size, num_kv_heads, dim]."""
    return (block_size, layer.num_kv_heads, layer.key_dim), (block_size, layer.num_kv_heads, layer.value_dim)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _first_scale(vectors: Shape) -> int:
    """Return where the scales begin in a block of codes of this shape."""
    return _aligned(math.prod(vectors))


def _scale_bytes(vectors: Shape) -> int:
    return _aligned(math.prod(vectors[:-1]) * SCALE_BYTES)


def _split(pages: Tensor, vectors: Shape, code_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return views of bytes [num_blocks, ...]: codes [num_blocks, *vectors], and scales [num_blocks, *vectors[:-1]]."""
    num_codes, num_scales, first_scale = math.prod(vectors), math.prod(vectors[:-1]), _first_scale(vectors)
    codes = pages[:, :num_codes].view(code_dtype)
    scales = pages[:, first_scale : first_scale + num_scales * SCALE_BYTES].view(torch.float32)
    return codes.view(-1, *vectors), scales.view(-1, *vectors[:-1])


class _FlashMetadata:
    """What flash attention takes besides AttentionMetadata."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        self.max_queries, self.max_keys = int(metadata.num_queries.max()), int(metadata.num_keys.max())
        self.key_starts = F.pad(metadata.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        self.is_decode = self.max_queries == 1


class FlashAttention(TritonAttention):
    """The flash-attn package, version 2. Dao, "FlashAttention-2", ICLR 2024."""

    name = "flash_attn"

    def __init__(self, pages: PageFormat, varlen: Callable[..., Tensor], with_kvcache: Callable[..., Tensor]) -> None:
        super().__init__(pages)
        self._varlen, self._with_kvcache = varlen, with_kvcache

    def prepare(self, metadata: AttentionMetadata) -> _FlashMetadata:
        return _FlashMetadata(metadata)

    def attend_to_pages(self, step: PagedStep, layer: int, queries: Tensor, params: AttentionParams) -> Tensor:
        metadata, flash = step.metadata, step.prepared
        key_pages, value_pages = step.cache.keys[layer], step.cache.values[layer]
        options = {
            "softmax_scale": params.scale,
            "causal": True,
            "window_size": _window_size(params),
            "softcap": params.softcap or 0.0,
            "block_table": metadata.block_table,
        }
        if flash.is_decode:  # this function splits a sequence's keys among programs when sequences are few
            output = self._with_kvcache(
                queries[:, None], key_pages, value_pages, cache_seqlens=metadata.lengths, **options
            )
            return output[:, 0]
        return self._varlen(
            queries,
            key_pages,
            value_pages,
            metadata.query_starts,
            flash.key_starts,
            flash.max_queries,
            flash.max_keys,
            **options,
        )


class VarlenAttention(TritonAttention):
    """torch's own flash attention, which takes a block table from torch 2.12 on."""

    name = "torch_varlen"

    def __init__(self, pages: PageFormat, varlen: Callable[..., Any]) -> None:
        super().__init__(pages)
        self._varlen = varlen

    def prepare(self, metadata: AttentionMetadata) -> _FlashMetadata:
        return _FlashMetadata(metadata)

    def attend_to_pages(self, step: PagedStep, layer: int, queries: Tensor, params: AttentionParams) -> Tensor:
        metadata, flash = step.metadata, step.prepared
        output: Tensor = self._varlen(
            queries,
            step.cache.keys[layer],
            step.cache.values[layer],
            metadata.query_starts,
            flash.key_starts,
            flash.max_queries,
            flash.max_keys,
            scale=params.scale,
            window_size=_window_size(params),
            enable_gqa=True,
            seqused_k=metadata.lengths,
            block_table=metadata.block_table,
        )
        return output


def _window_size(params: AttentionParams) -> tuple[int, int]:
    """Return (keys before a query that it sees, keys after it), as flash attention counts; -1 is all of them."""
    return (-1 if params.window is None else params.window - 1, 0)


def reasons_against_flash(
    layers: list[LayerShape], params: list[AttentionParams], block_size: int, pages: PageFormat
) -> list[str]:
    """Return why no flash attention, neither the package's nor torch's, can serve these layers; empty if both can."""
    reasons = []
    if block_size % FLASH_BLOCK_SIZE:
        reasons.append(f"it needs pages of a multiple of {FLASH_BLOCK_SIZE} tokens, and --block-size is {block_size}")
    if not isinstance(pages, PlainPages):
        reasons.append(f"it cannot read {pages.name} pages")
    elif pages.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"it does not compute in {str(pages.dtype).removeprefix('torch.')}")
    if any(each.sinks is not None for each in params):
        reasons.append("it has no attention sinks")
    if any(layer.key_dim != layer.value_dim or layer.key_dim > FLASH_HEAD_DIM or layer.key_dim % 8 for layer in layers):
        reasons.append(f"it needs key_dim = value_dim, a multiple of 8 and at most {FLASH_HEAD_DIM}")
    return reasons


def load_flash_attention(_: list[AttentionParams], pages: PageFormat) -> FlashAttention:
    """Return the flash-attn package as a backend. Raises BackendUnavailableError."""
    try:
        # A package that was built for another torch raises OSError. flash-attn 4 alone lacks these functions.
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # type: ignore[import-not-found]
    except (ImportError, OSError) as error:
        raise BackendUnavailableError(f"the flash-attn package cannot be imported: {error}") from error
    return FlashAttention(pages, flash_attn_varlen_func, flash_attn_with_kvcache)


def load_varlen_attention(params: list[AttentionParams], pages: PageFormat) -> VarlenAttention:
    """Return torch's own flash attention as a backend. Raises BackendUnavailableError."""
    if any(each.softcap for each in params):
        raise BackendUnavailableError("torch's own flash attention has no soft caps")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise BackendUnavailableError(
            f"torch {torch.__version__} has no flash attention of its own: {error}"
        ) from error
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise BackendUnavailableError(f"the flash attention of torch {torch.__version__} takes no block table")
    return VarlenAttention(pages, varlen_attn)


def _with_dense_dims(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
