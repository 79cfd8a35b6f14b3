"""Compute attention on a GPU.

All backends share the page layout [num_blocks, block_size, num_kv_heads, dim] of flash-attn.

A block of codes has them in that order, too, and after them their scales [block_size, num_kv_heads].

Triton's kernels are our own and serve every model. flash-attn 3, for GPUs of the Hopper generation, takes pages of any
size. flash-attn 2, and torch's version of it, need pages of a multiple of 256 tokens. None of these three has attention
sinks. All of them use our own kernel to store keys and values.

Before a backend is used, each of its kernels is launched once, and their results are compared: see `failure_of`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.attention import triton_kernels, triton_rotary
from workers.attention.interface import AttentionMetadata, AttentionParams, HeadNorms, PagedStep, Rotation
from workers.attention.triton_kernels import LayerPages
from workers.device.triton_support import kernel_errors, raise_device_failure
from workers.kv_cache.kv_quantization import SCALE_BYTES, PageFormat, PlainPages, QuantizedPages
from workers.kv_cache.pages import KVCache, LayerShape, Shape

FLASH_BLOCK_SIZE = 256  # flash-attn 2 needs a multiple of it
FLASH_HEAD_DIM = 256  # the largest that flash-attn 2 has kernels for
ALIGNMENT_BYTES = 16  # of codes and of scales, for loads of that width
HOPPER = (9, 0)  # the compute capability that flash-attn 3 is written for
CHECKED_KEYS = 4096  # so many keys are divided among programs; they take some 16 MB
CHECKED_PARTS = (2, 7, 32)
MAX_POWER = 9  # of two: sequences of a step whose division is compiled at load
# Relative distance of two kernels' results. Half precision rounds weights, in an order of each kernel's own: some 1 %.
# A wrong page, position or part of the keys gives values near 1.
CHECK_TOLERANCE = 0.05
# What importing a flash package raises that was built for another torch, or looks for what this torch does not have.
IMPORT_ERRORS = (ImportError, OSError, AttributeError, RuntimeError)


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
        # By layer: the key pages, and views of these and of the value pages.
        self._layer_pages: dict[int, tuple[Tensor, LayerPages]] = {}

    def block_shapes(self, layer: LayerShape, block_size: int) -> tuple[Shape, Shape]:
        keys, values = _vectors_of(layer, block_size)
        if isinstance(self._format, QuantizedPages):
            return (_first_scale(keys) + _scale_bytes(keys),), (_first_scale(values) + _scale_bytes(values),)
        return keys, values

    def prepare(self, metadata: AttentionMetadata) -> Any:
        """Return the fewest and the most queries of a sequence, by which tiles are chosen, and the work lists."""
        queries_each = int(metadata.num_queries.min()), int(metadata.num_queries.max())
        return queries_each, triton_kernels.WorkLists(metadata.query_starts, metadata.lengths)

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
        if norms is not None and norms.spans_heads:
            _norm_all_heads(qkv, num_heads * shape.key_dim, norms)
            norms = None
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
        queries_each, work_lists = step.prepared
        triton_kernels.attend(
            queries,
            self._pages(step.cache, layer),
            metadata.query_starts,
            metadata.lengths,
            metadata.block_table,
            output,
            params.scale,
            params.window,
            params.softcap,
            params.sinks,
            queries_each=queries_each,
            work_lists=work_lists,
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


def _norm_all_heads(qkv: Tensor, query_size: int, norms: HeadNorms) -> None:
    """Normalise the queries of each token together, in place, and so its keys."""
    queries, keys, _ = qkv.tensor_split((query_size, query_size + len(norms.key_weight)), dim=1)
    for part, weight in ((queries, norms.query_weight), (keys, norms.key_weight)):
        part.copy_(F.rms_norm(part.float(), weight.shape, weight, norms.epsilon))


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

    def window_size(self, params: AttentionParams) -> tuple[int, int]:
        """Return (keys before a query that it sees, keys after it), as flash attention counts; -1 is all of them."""
        if params.window is not None:
            return params.window - 1, 0
        # A single query is the last of its sequence, so there are no keys after it. Only with -1 on both sides does
        # flash-attn 2 put the query heads that share a key head into one tile, and split the keys among programs.
        # Otherwise each head reads the keys itself.
        return (-1, -1) if self.max_queries == 1 else (-1, 0)


class FlashAttention(TritonAttention):
    """The flash-attn package, version 2. Dao, "FlashAttention-2", ICLR 2024."""

    name = "flash_attn"

    def __init__(self, pages: PageFormat, varlen: Callable[..., Tensor]) -> None:
        """`varlen` is the package's `flash_attn_varlen_func`.

        Decodes call it, too, and not `flash_attn_with_kvcache`. It splits the keys of single queries as that one does.
        From version 2.9 on, the other one reads the lengths on the host, which waits for the device in every layer, and
        which no CUDA graph can hold.
        """
        super().__init__(pages)
        self._varlen = varlen

    def prepare(self, metadata: AttentionMetadata) -> _FlashMetadata:
        return _FlashMetadata(metadata)

    def attend_to_pages(self, step: PagedStep, layer: int, queries: Tensor, params: AttentionParams) -> Tensor:
        metadata, flash = step.metadata, step.prepared
        return self._varlen(
            queries,
            step.cache.keys[layer],
            step.cache.values[layer],
            metadata.query_starts,
            flash.key_starts,
            flash.max_queries,
            flash.max_keys,
            softmax_scale=params.scale,
            causal=True,
            window_size=flash.window_size(params),
            softcap=params.softcap or 0.0,
            block_table=metadata.block_table,
        )


class FlashAttention3(TritonAttention):
    """flash-attn 3. Shah et al., "FlashAttention-3", NeurIPS 2024.

    It is built from the folder `hopper` of flash-attn's repository; no package index has it.
    """

    name = "flash_attn_3"

    def __init__(self, pages: PageFormat, with_kvcache: Callable[..., Tensor]) -> None:
        """`with_kvcache` is the package's `flash_attn_with_kvcache`, which takes chunks and single tokens alike."""
        super().__init__(pages)
        self._with_kvcache = with_kvcache

    def prepare(self, metadata: AttentionMetadata) -> _FlashMetadata:
        return _FlashMetadata(metadata)

    def attend_to_pages(self, step: PagedStep, layer: int, queries: Tensor, params: AttentionParams) -> Tensor:
        metadata, flash = step.metadata, step.prepared
        return self._with_kvcache(
            queries,
            step.cache.keys[layer],
            step.cache.values[layer],
            cache_seqlens=metadata.lengths,
            page_table=metadata.block_table,
            cu_seqlens_q=metadata.query_starts,
            max_seqlen_q=flash.max_queries,
            softmax_scale=params.scale,
            causal=True,
            window_size=(-1, -1) if params.window is None else (params.window - 1, 0),
            softcap=params.softcap or 0.0,
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
            window_size=flash.window_size(params),
            enable_gqa=True,
            seqused_k=metadata.lengths,
            block_table=metadata.block_table,
        )
        return output


def reasons_against_flash(layers: list[LayerShape], params: list[AttentionParams], pages: PageFormat) -> list[str]:
    """Return why no version of flash attention can serve these layers; empty if all of them can."""
    reasons = []
    if not isinstance(pages, PlainPages):
        reasons.append(f"flash attention cannot read {pages.name} pages")
    elif pages.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"flash attention does not compute in {str(pages.dtype).removeprefix('torch.')}")
    if any(each.sinks is not None for each in params):
        reasons.append("flash attention has no attention sinks")
    if any(layer.key_dim != layer.value_dim or layer.key_dim > FLASH_HEAD_DIM or layer.key_dim % 8 for layer in layers):
        reasons.append(f"flash attention needs key_dim = value_dim, a multiple of 8 and at most {FLASH_HEAD_DIM}")
    return reasons


def load_flash_attention_3(_: list[AttentionParams], block_size: int, pages: PageFormat) -> FlashAttention3:
    """Return flash-attn 3 as a backend, for blocks of any size. Raises BackendUnavailableError."""
    if torch.cuda.get_device_capability() != HOPPER:
        raise BackendUnavailableError("flash-attn 3 is for GPUs of the Hopper generation only")
    try:
        from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]
    except IMPORT_ERRORS as error:
        raise BackendUnavailableError(f"flash-attn 3 cannot be imported: {error}") from error
    return FlashAttention3(pages, flash_attn_with_kvcache)


def load_flash_attention(_: list[AttentionParams], block_size: int, pages: PageFormat) -> FlashAttention:
    """Return the flash-attn package as a backend. Raises BackendUnavailableError."""
    _check_block_size(block_size)
    try:
        # flash-attn 4 alone lacks this function.
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    except IMPORT_ERRORS as error:
        raise BackendUnavailableError(f"the flash-attn package cannot be imported: {error}") from error
    return FlashAttention(pages, flash_attn_varlen_func)


def _check_block_size(block_size: int) -> None:
    if block_size % FLASH_BLOCK_SIZE:
        raise BackendUnavailableError(
            f"flash-attn 2 needs pages of a multiple of {FLASH_BLOCK_SIZE} tokens, and --block-size is {block_size}"
        )


def load_varlen_attention(params: list[AttentionParams], block_size: int, pages: PageFormat) -> VarlenAttention:
    """Return torch's own flash attention as a backend. Raises BackendUnavailableError."""
    _check_block_size(block_size)
    if any(each.softcap for each in params):
        raise BackendUnavailableError("torch's own flash attention has no soft caps")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except IMPORT_ERRORS as error:
        raise BackendUnavailableError(
            f"torch {torch.__version__} has no flash attention of its own: {error}"
        ) from error
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise BackendUnavailableError(f"the flash attention of torch {torch.__version__} takes no block table")
    return VarlenAttention(pages, varlen_attn)


# -- the check at load ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckedLayer:
    """What decides which kernels a layer launches."""

    shape: LayerShape
    num_heads: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool

    @classmethod
    def of(cls, shape: LayerShape, params: AttentionParams) -> CheckedLayer:
        num_heads = params.num_heads or shape.num_kv_heads
        # A kernel depends on whether a layer has scales of its own, and not on what they are.
        ones = (1.0,) * shape.num_kv_heads
        shape = replace(
            shape,
            key_scales=None if shape.key_scales is None else ones,
            value_scales=None if shape.value_scales is None else ones,
        )
        return cls(shape, num_heads, params.scale, params.window, params.softcap, params.sinks is not None)


def failure_of(
    backend: TritonAttention, layer: CheckedLayer, block_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Launch every kernel that steps may need for such a layer, and compare their results. Returns what is wrong.

    The kernels differ in how many queries a program takes and in how many programs share a sequence's keys. Each of
    them computes the last query of the same sequence, so all results are the same but for rounding. The self-check of
    the whole model compares one of them with transformers; it would meet few of the others, and none that splits keys.

    Triton compiles a kernel at its first launch, which takes about a second. After this, no request waits for that.

    Raises what says nothing about the kernels: a device that failed, and our own mistakes.
    """
    # A package of another version may have other arguments, and raise anything. Our own kernels serve in its place.
    errors = kernel_errors() if type(backend) is TritonAttention else (Exception,)
    try:
        expected, results = _last_query_by_each_kernel(backend, layer, block_size, dtype, device)
        for kernel, result in results.items():
            distance = float((result.float() - expected.float()).norm() / expected.float().norm())
            if not distance <= CHECK_TOLERANCE:  # NaN fails, too
                return f"{kernel} gives other results: their relative distance is {distance:.2g}"
    except errors as error:
        raise_device_failure(error)
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def _last_query_by_each_kernel(
    backend: TritonAttention, layer: CheckedLayer, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a query's attention by the plainest kernel, and by each other one, under its name."""
    shape, num_heads, group_size = layer.shape, layer.num_heads, layer.num_heads // layer.shape.num_kv_heads
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    num_keys = -(-CHECKED_KEYS // block_size) * block_size
    cache = KVCache([shape], backend.block_shapes, num_keys // block_size, block_size, backend.page_dtype, device)
    pages = backend._pages(cache, 0)
    keys = numbers(num_keys, shape.num_kv_heads, shape.key_dim)
    values = numbers(num_keys, shape.num_kv_heads, shape.value_dim)
    triton_kernels.store(keys, values, pages, torch.arange(num_keys, device=device))
    queries = numbers(triton_kernels.MAX_TILE_ROWS + 1, num_heads, shape.key_dim)
    sinks = numbers(num_heads) if layer.has_sinks else None
    params = AttentionParams(layer.scale, layer.window, layer.softcap, sinks)
    table = torch.arange(cache.num_blocks, dtype=torch.int32, device=device)[None]
    lengths = torch.full((1,), num_keys, dtype=torch.int32, device=device)

    def metadata_of(num_queries: int) -> AttentionMetadata:
        starts = torch.tensor([0, num_queries], dtype=torch.int32, device=device)
        slots = torch.full((num_queries,), -1, device=device)
        counts = np.array([num_queries]), np.array([num_keys])
        return AttentionMetadata(block_size, *counts, starts, lengths, table, slots)

    def attend(num_queries: int, num_parts: int = 1) -> Tensor:
        """Return what our own kernels compute for the last query; of a single one, with its keys in so many parts."""
        metadata, asked = metadata_of(num_queries), queries[-num_queries:]
        output = asked.new_empty(num_queries, num_heads, shape.value_dim)
        work_lists = triton_kernels.WorkLists(metadata.query_starts, lengths, num_parts * shape.num_kv_heads)
        triton_kernels.attend(
            asked, pages, metadata.query_starts, lengths, table, output, params.scale, params.window, params.softcap,
            params.sinks, (num_queries, num_queries), work_lists,
        )  # fmt: skip
        return output[-1]

    padded_dim = triton_kernels.padded_head_dim(shape.key_dim, shape.value_dim)
    few = triton_kernels.choose_tiles(1, group_size, padded_dim, queries.itemsize)
    num_few = triton_kernels.max_few_queries(group_size, few)
    for num_sequences in (2**power for power in range(4, MAX_POWER + 1)):  # each of them is a kernel of its own
        none = torch.zeros(num_sequences + 1, dtype=torch.int32, device=device)
        work_lists = triton_kernels.WorkLists(none, none[1:])
        work_lists.of_keys(1, shape.num_kv_heads, params.window, few.keys)
        work_lists.of_queries(2, num_sequences, 16)
    of_tiles = {
        triton_kernels.choose_tiles(count, group_size, padded_dim, queries.itemsize): count
        for count in range(len(queries), num_few, -1)
    }
    results = {
        f"attention of {count} queries with keys in {num_parts} parts": attend(count, num_parts)
        for count in {1, num_few}
        for num_parts in CHECKED_PARTS
    }
    results |= {f"attention in tiles of {tiles.rows} rows": attend(count) for tiles, count in of_tiles.items()}
    if type(backend).attend_to_pages is not TritonAttention.attend_to_pages:
        for count in (1, 2, len(queries)):
            step = PagedStep(backend, cache, metadata_of(count))
            result = backend.attend_to_pages(step, 0, queries[-count:], params)[-1]
            results[f"{backend.name} with {count} queries"] = result
    return attend(1), results


def _with_dense_dims(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
