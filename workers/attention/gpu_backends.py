"""Attention on a GPU. All backends share the page layout [num_blocks, block_size, num_kv_heads, dim] of flash-attn.

Triton's kernels are our own and serve every model. flash-attn 2, and torch's version of it, need pages of a multiple of
256 tokens and have no attention sinks. All of them use our own kernel to store keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.attention import triton_kernels, triton_rotary
from workers.attention.interface import AttentionMetadata, AttentionParams, HeadNorms, PagedStep, Rotation
from workers.kv_cache.kv_quantization import Float8Pages, PageFormat, PlainPages
from workers.kv_cache.pages import LayerShape, Shape

FLASH_BLOCK_SIZE = 256  # flash-attn 2 needs a multiple of it
FLASH_HEAD_DIM = 256  # the largest that flash-attn 2 has kernels for


class BackendUnavailableError(Exception):
    """A backend cannot be used here; the message says why."""


class TritonAttention:
    """Attention by triton_kernels.py. It serves every model, and CUDA graphs can capture it."""

    name = "triton"
    supports_cuda_graphs = True

    def __init__(self, pages: PageFormat) -> None:
        """`pages` are in the model's own dtype, or in float8."""
        self.page_dtype = pages.dtype
        # torch keeps float8 pages as bytes, see Float8Pages; the kernels read and write them as float8.
        self._kernel_dtype = torch.float8_e4m3fn if isinstance(pages, Float8Pages) else pages.dtype
        self._workspaces: dict[tuple[int, int, int], Tensor] = {}

    def block_shapes(self, layer: LayerShape, block_size: int) -> tuple[Shape, Shape]:
        return (block_size, layer.num_kv_heads, layer.key_dim), (block_size, layer.num_kv_heads, layer.value_dim)

    def prepare(self, metadata: AttentionMetadata) -> Any:
        """Return nothing: the kernels take the metadata as it is."""

    def attend(
        self, step: PagedStep, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        key_pages, value_pages = self._pages(step, layer)
        slot_mapping = step.metadata.slot_mapping
        triton_kernels.store(_with_dense_dims(keys), _with_dense_dims(values), key_pages, value_pages, slot_mapping)
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
        key_pages, value_pages = self._pages(step, layer)
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
            key_pages,
            value_pages,
            step.metadata.slot_mapping,
        )
        queries = qkv.view(qkv.shape[0], -1, shape.key_dim)[:, :num_heads]
        return self.attend_to_pages(step, layer, queries, params).flatten(1)

    def attend_to_pages(self, step: PagedStep, layer: int, queries: Tensor, params: AttentionParams) -> Tensor:
        """Attend to what the pages hold now, without storing anything. Returns [num_tokens, num_heads, value_dim]."""
        shape, metadata = step.cache.layers[layer], step.metadata
        key_pages, value_pages = self._pages(step, layer)
        output = queries.new_empty(*queries.shape[:2], shape.value_dim)
        triton_kernels.attend(
            queries,
            key_pages,
            value_pages,
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

    def _pages(self, step: PagedStep, layer: int) -> tuple[Tensor, Tensor]:
        return step.cache.keys[layer].view(self._kernel_dtype), step.cache.values[layer].view(self._kernel_dtype)

    def _workspace(self, num_heads: int, shape: LayerShape, device: torch.device) -> Tensor:
        """Return a workspace that all layers of one size share: they run one after the other, on one stream."""
        sizes = (num_heads, shape.num_kv_heads, shape.value_dim)
        if sizes not in self._workspaces:
            self._workspaces[sizes] = triton_kernels.make_workspace(*sizes, device)
        return self._workspaces[sizes]


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
