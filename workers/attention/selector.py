"""Register paged attention with transformers, and select its backend.

Every model that uses transformers' AttentionInterface passes its queries, keys and values to the function registered
here. It stores keys and values in the step's pages, and each query attends to the pages of its own sequence. The step
is a keyword argument of the forward pass, so the models' code stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from workers.attention.cpu_backend import CpuAttention
from workers.attention.interface import AttentionBackend, AttentionParams, PagedStep
from workers.attention.tiles_check import disable_wrong_tiles
from workers.attention.torch_backend import TorchAttention
from workers.csrc.bindings import MAX_HEAD_DIM
from workers.csrc.build import c_library
from workers.device.triton_support import triton_failure
from workers.kv_cache.kv_quantization import FLOAT8_PAGES, PageFormat, PlainPages, page_format
from workers.kv_cache.pages import LayerShape

log = logging.getLogger("servekit.worker")

PAGED_ATTENTION = "servekit_paged"
# Why a GPU's backend cannot be used, by all that decides which kernels it launches. A worker chooses several times: to
# measure memory, to serve, for a draft model.
_failures: dict[tuple[object, ...], str | None] = {}


def choose_attention(
    device: torch.device,
    dtype: torch.dtype,
    layers: list[LayerShape],
    params: list[AttentionParams],
    block_size: int,
    kv_cache_dtype: str = "auto",
) -> AttentionBackend:
    """Return the fastest backend for this device, dtype, layers and block size; log why faster ones cannot be used."""
    pages = page_format(kv_cache_dtype, dtype)
    if device.type == "cuda":
        return _choose_on_gpu(device, dtype, layers, params, block_size, pages)
    if device.type == "cpu" and _largest_head_dim(layers) <= MAX_HEAD_DIM:
        library = c_library(str(dtype).removeprefix("torch."))
        if library is not None:
            disable_wrong_tiles(library, zip(layers, params, strict=False), dtype, pages, block_size)
            return CpuAttention(library, dtype, pages)
    if not isinstance(pages, PlainPages):
        log.warning("attention is slow: without the C kernels, every step decodes its pages (%s)", pages.name)
    return TorchAttention(pages)


def _choose_on_gpu(
    device: torch.device,
    dtype: torch.dtype,
    layers: list[LayerShape],
    params: list[AttentionParams],
    block_size: int,
    pages: PageFormat,
) -> AttentionBackend:
    """Prefer flash-attn 3, then version 2, then torch's own, then Triton; torch's operations where no kernel runs."""
    why_slow = _reason_against_triton(block_size, pages)
    if why_slow is not None:
        log.warning("attention is slow: every step gathers its pages, because %s", why_slow)
        return TorchAttention(pages)
    # Not at the top: it needs Triton, which only torch for CUDA brings.
    from workers.attention import gpu_backends

    checked = dict.fromkeys(gpu_backends.CheckedLayer.of(*each) for each in zip(layers, params, strict=True))

    def failure_of(backend: gpu_backends.TritonAttention) -> str | None:
        for layer in checked:
            key = (backend.name, pages.name, layer, block_size, dtype, device)
            if key not in _failures:
                _failures[key] = gpu_backends.failure_of(backend, layer, block_size, dtype, device)
            if (failure := _failures[key]) is not None:
                return failure
        return None

    backend: gpu_backends.TritonAttention
    reasons = gpu_backends.reasons_against_flash(layers, params, pages)
    if not reasons:
        loads = gpu_backends.load_flash_attention_3, gpu_backends.load_flash_attention
        for load in (*loads, gpu_backends.load_varlen_attention):
            try:
                backend = load(params, block_size, pages)
            except gpu_backends.BackendUnavailableError as error:
                reasons.append(str(error))
                continue
            if (failure := failure_of(backend)) is None:
                return backend
            log.warning("%s is left out: %s", backend.name, failure)
            reasons.append(f"{backend.name}: {failure}")
    log.info("attention backend: triton; flash attention cannot be used: %s", "; ".join(reasons))
    backend = gpu_backends.TritonAttention(pages)
    if (failure := failure_of(backend)) is not None:
        log.warning("attention is slow: every step gathers its pages, because Triton's kernels fail here: %s", failure)
        return TorchAttention(pages)
    return backend


def _reason_against_triton(block_size: int, pages: PageFormat) -> str | None:
    """Return why Triton's kernels cannot store keys and values, as every backend of a GPU needs; None if they can."""
    if (failure := triton_failure()) is not None:
        return f"Triton's kernels do not run: {failure}"
    if block_size & (block_size - 1):
        return f"--block-size {block_size} is not a power of two"
    if pages is FLOAT8_PAGES and torch.cuda.get_device_capability() < (8, 9):
        return "this GPU has no float8; --kv-cache-dtype int8 is fast on it, and more exact"
    return None


def _largest_head_dim(layers: list[LayerShape]) -> int:
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
    """Attend each query to its sequence's pages, including the keys and values of this step.

    query: [1, num_heads, num_tokens, head_dim]; key, value: [1, num_kv_heads, num_tokens, dim].
    Returns [1, num_tokens, num_heads, value_dim], and no attention weights. Writes to `paged.cache`.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
    params = attention_params(query, options)
    return paged.backend.attend(paged, layer, queries, keys, values, params)[None], None


def attention_params(query: Tensor, options: Mapping[str, Any]) -> AttentionParams:
    """Return the parameters that a layer passed as `options`, by transformers' names. query: [..., head_dim]."""
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return AttentionParams(scale, options.get("sliding_window"), options.get("softcap"), options.get("s_aux"))


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
# Backends mask by positions and block tables. A dense mask would be built for nothing.
AttentionMaskInterface.register(PAGED_ATTENTION, lambda *_, **__: None)
