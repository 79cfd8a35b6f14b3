"""Attention over KV pages, as a function that transformers' own layers call.

Every model that goes through transformers' AttentionInterface hands its queries, keys and values to the function
registered here, which stores keys and values in the pages of the step at hand, and lets each query look at its own
sequence's pages. The step travels along as a keyword argument; the models' code stays as it is. How it is done is up to
the device.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from workers.c_library import c_library
from workers.cpu_attention import MAX_HEAD_DIM, CpuAttention
from workers.kv_cache import LayerShape
from workers.page_dtype import Float8Pages, Int8Pages, PageDtype, PlainPages, page_dtype
from workers.paged_step import PagedAttention, PagedStep, Score
from workers.torch_attention import TorchAttention

log = logging.getLogger("servekit.worker")

PAGED_ATTENTION = "servekit_paged"


def choose_attention(
    device: torch.device,
    dtype: torch.dtype,
    layers: list[LayerShape],
    scores: list[Score],
    block_size: int,
    kv_cache_dtype: str = "auto",
) -> PagedAttention:
    """The fastest way that this device, these dtypes, layers and block size have; the log tells of those that lost."""
    pages = page_dtype(kv_cache_dtype, dtype)
    if device.type == "cuda" and _reads_on_gpu(pages):
        return _choose_on_gpu(layers, scores, block_size, pages)
    if not isinstance(pages, PlainPages):
        log.warning(
            "attention gathers pages of %s on this device, and is slow; they take a byte for each number", pages.name
        )
    elif device.type == "cpu" and _longest_head(layers) <= MAX_HEAD_DIM:
        library = c_library(str(dtype).removeprefix("torch."))
        if library is not None:
            return CpuAttention(library, dtype)
    return TorchAttention(pages)


def _reads_on_gpu(pages: PageDtype) -> bool:
    """Whether our kernels read them there: float8 is known to GPUs from compute capability 8.9 on."""
    if isinstance(pages, Float8Pages):
        return torch.cuda.get_device_capability() >= (8, 9)
    return not isinstance(pages, Int8Pages)


def _choose_on_gpu(layers: list[LayerShape], scores: list[Score], block_size: int, pages: PageDtype) -> PagedAttention:
    """flash-attn, the one within torch, Triton, in this order; without Triton, torch's own operations."""
    try:
        # Not at the top: it needs Triton, which comes with torch for CUDA and with no other.
        from workers import gpu_attention
    except ImportError as error:
        log.warning("attention gathers its pages, and is slow: %s", error)
        return TorchAttention(pages)
    if block_size & (block_size - 1):
        log.warning("attention gathers its pages, and is slow: --block-size %d is no power of two", block_size)
        return TorchAttention(pages)
    reasons = gpu_attention.reasons_against_flash(layers, scores, block_size, pages)
    if not reasons:
        for find in (gpu_attention.find_flash_attention, gpu_attention.find_varlen_attention):
            found = find(scores, pages)
            if not isinstance(found, str):
                return found
            reasons.append(found)
    log.info("attention: triton and not flash attention, for %s", "; ".join(reasons))
    return gpu_attention.TritonAttention(pages)


def _longest_head(layers: list[LayerShape]) -> int:
    return max(max(layer.key_dim, layer.value_dim) for layer in layers)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedStep,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend each query to its sequence's pages, the newly written ones included.

    query: [1, num_heads, num_tokens, head_dim]; key, value: [1, num_kv_heads, num_tokens, dim].
    Returns [1, num_tokens, num_heads, value_dim]. Writes the step's cells of `paged.cache`.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    return paged.attention.attend(paged, layer, queries, keys, values, score_of(query, options))[None], None


def score_of(query: Tensor, options: Mapping[str, Any]) -> Score:
    """What a layer asked for, by transformers' names for it. query: [..., head_dim]."""
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return Score(scale, options.get("sliding_window"), options.get("softcap"), options.get("s_aux"))


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
# Who may look where is ours to say, from positions and pages; a dense mask would be built for nothing.
AttentionMaskInterface.register(PAGED_ATTENTION, lambda *_, **__: None)
