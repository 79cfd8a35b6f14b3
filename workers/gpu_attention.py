"""Attention on a GPU, every way over pages [num_blocks, block_size, num_kv_heads, dim], as flash-attn's are.

Triton's is our own and serves everything. flash-attn, and what torch has of it, read pages of 256 tokens only, and know
no attention sinks. Whoever reads them, the pages are written by our own kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workers import triton_attention, triton_layers
from workers.kv_cache import LayerShape, Shape
from workers.page_dtype import Float8Pages, PageDtype, PlainPages
from workers.paged_step import HeadNorms, PagedStep, Rotation, Score, StepRows

FLASH_BLOCK_SIZE = 256  # pages of flash-attn 2 are multiples of it
FLASH_HEAD_DIM = 256


class TritonAttention:
    """All that layers ask, by triton_attention.py; also what a CUDA graph of a decode step is captured with."""

    name = "triton"
    captures = True

    def __init__(self, pages: PageDtype) -> None:
        """Pages hold the model's own dtype or float8."""
        self.stored = pages.stored
        self._seen_as = torch.float8_e4m3fn if isinstance(pages, Float8Pages) else pages.stored
        self._workspaces: dict[tuple[int, int, int], Tensor] = {}

    def block_shapes(self, layer: LayerShape, block_size: int) -> tuple[Shape, Shape]:
        return (block_size, layer.num_kv_heads, layer.key_dim), (block_size, layer.num_kv_heads, layer.value_dim)

    def prepare(self, rows: StepRows) -> Any:
        """Nothing: the kernels take the rows as they are."""

    def attend(
        self, step: PagedStep, layer: int, queries: Tensor, keys: Tensor, values: Tensor, score: Score
    ) -> Tensor:
        pages = self._pages(step, layer)
        triton_attention.store(_with_dense_dims(keys), _with_dense_dims(values), *pages, step.rows.slot_mapping)
        return self.look(step, layer, _with_dense_dims(queries), score)

    def attend_rotated(
        self, step: PagedStep, layer: int, qkv: Tensor, rotation: Rotation, norms: HeadNorms | None, score: Score
    ) -> Tensor:
        shape = step.cache.layers[layer]
        num_heads = qkv.shape[1] // shape.key_dim - 2 * shape.num_kv_heads
        weights = (None, None, 0.0) if norms is None else (norms.query_weight, norms.key_weight, norms.epsilon)
        pages = self._pages(step, layer)
        triton_layers.rotate_and_store(
            *(qkv, num_heads, shape.num_kv_heads, shape.key_dim, *rotation, *weights, *pages, step.rows.slot_mapping)
        )
        queries = qkv.view(qkv.shape[0], -1, shape.key_dim)[:, :num_heads]
        return self.look(step, layer, queries, score).flatten(1)

    def look(self, step: PagedStep, layer: int, queries: Tensor, score: Score) -> Tensor:
        """[num_tokens, num_heads, value_dim], over what is in the pages now."""
        shape, rows = step.cache.layers[layer], step.rows
        output = queries.new_empty(*queries.shape[:2], shape.value_dim)
        triton_attention.attend(
            queries,
            *self._pages(step, layer),
            rows.query_starts,
            rows.lengths,
            rows.block_table,
            output,
            score.scale,
            self._workspace(queries.shape[1], shape, queries.device),
            score.window,
            score.softcap,
            score.sinks,
        )
        return output

    def _pages(self, step: PagedStep, layer: int) -> tuple[Tensor, Tensor]:
        return step.cache.keys[layer].view(self._seen_as), step.cache.values[layer].view(self._seen_as)

    def _workspace(self, num_heads: int, shape: LayerShape, device: torch.device) -> Tensor:
        """Shared by all layers of a size: they come one after the other."""
        sizes = (num_heads, shape.num_kv_heads, shape.value_dim)
        if sizes not in self._workspaces:
            self._workspaces[sizes] = triton_attention.make_workspace(*sizes, device)
        return self._workspaces[sizes]


class _Lengths:
    """What flash attention wants to know of a step besides its rows."""

    def __init__(self, rows: StepRows) -> None:
        self.most_queries, self.most_keys = int(rows.num_queries.max()), int(rows.num_keys.max())
        self.key_starts = F.pad(rows.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        self.is_decode = self.most_queries == 1


class FlashAttention(TritonAttention):
    """The flash-attn package, version 2. Dao, "FlashAttention-2", ICLR 2024."""

    name = "flash_attn"

    def __init__(self, pages: PageDtype, varlen: Callable[..., Tensor], with_kvcache: Callable[..., Tensor]) -> None:
        super().__init__(pages)
        self._varlen, self._with_kvcache = varlen, with_kvcache

    def prepare(self, rows: StepRows) -> _Lengths:
        return _Lengths(rows)

    def look(self, step: PagedStep, layer: int, queries: Tensor, score: Score) -> Tensor:
        rows, lengths, pages = step.rows, step.prepared, (step.cache.keys[layer], step.cache.values[layer])
        options = {
            "softmax_scale": score.scale,
            "causal": True,
            "window_size": (-1 if score.window is None else score.window - 1, 0),
            "softcap": score.softcap or 0.0,
            "block_table": rows.block_table,
        }
        if lengths.is_decode:  # which splits the keys of a row where rows are few
            output = self._with_kvcache(queries[:, None], *pages, cache_seqlens=rows.lengths, **options)
            return output[:, 0]
        starts = (rows.query_starts, lengths.key_starts)
        return self._varlen(queries, *pages, *starts, lengths.most_queries, lengths.most_keys, **options)


class VarlenAttention(TritonAttention):
    """torch's own flash attention, from 2.12 on, where it takes a block table."""

    name = "torch_varlen"

    def __init__(self, pages: PageDtype, varlen: Callable[..., Any]) -> None:
        super().__init__(pages)
        self._varlen = varlen

    def prepare(self, rows: StepRows) -> _Lengths:
        return _Lengths(rows)

    def look(self, step: PagedStep, layer: int, queries: Tensor, score: Score) -> Tensor:
        rows, lengths = step.rows, step.prepared
        output: Tensor = self._varlen(
            *(queries, step.cache.keys[layer], step.cache.values[layer], rows.query_starts, lengths.key_starts),
            *(lengths.most_queries, lengths.most_keys),
            scale=score.scale,
            window_size=(-1 if score.window is None else score.window - 1, 0),
            enable_gqa=True,
            seqused_k=rows.lengths,
            block_table=rows.block_table,
        )
        return output


class TritonLayers:
    """What a decoder layer does between its multiplications, by triton_layers.py."""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return triton_layers.add_norm(x, None, weight, epsilon)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return triton_layers.swiglu(gate_up)


def reasons_against_flash(
    layers: list[LayerShape], scores: list[Score], block_size: int, pages: PageDtype
) -> list[str]:
    """Why flash attention, from wherever it comes, cannot serve these layers; nothing if it can."""
    reasons = []
    if block_size % FLASH_BLOCK_SIZE:
        reasons.append(f"its pages are multiples of {FLASH_BLOCK_SIZE} tokens, and --block-size is {block_size}")
    if not isinstance(pages, PlainPages):
        reasons.append(f"its pages are not {pages.name}")
    elif pages.stored not in (torch.bfloat16, torch.float16):
        reasons.append(f"it does not compute in {str(pages.stored).removeprefix('torch.')}")
    if any(score.sinks is not None for score in scores):
        reasons.append("it knows no attention sinks")
    if any(layer.key_dim != layer.value_dim or layer.key_dim > FLASH_HEAD_DIM or layer.key_dim % 8 for layer in layers):
        reasons.append(f"its heads have multiples of 8 dimensions, {FLASH_HEAD_DIM} at most, keys as many as values")
    return reasons


def find_flash_attention(_: list[Score], pages: PageDtype) -> FlashAttention | str:
    """The package's; or why not."""
    try:
        # Built for another torch it fails as it is loaded; flash-attn 4 alone has the package and not these functions.
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # type: ignore[import-not-found]
    except (ImportError, OSError) as error:
        return f"flash-attn cannot be imported: {error}"
    return FlashAttention(pages, flash_attn_varlen_func, flash_attn_with_kvcache)


def find_varlen_attention(scores: list[Score], pages: PageDtype) -> VarlenAttention | str:
    """torch's own; or why not."""
    if any(score.softcap for score in scores):
        return "torch's own knows no soft caps"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return f"torch {torch.__version__} has none of its own: {error}"
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return f"that of torch {torch.__version__} takes no block table"
    return VarlenAttention(pages, varlen_attn)


def _with_dense_dims(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
