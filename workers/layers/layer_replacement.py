"""Replace transformers' layers with faster equivalents: fused decoder layers, and packed linear layers."""

from __future__ import annotations

import ctypes
import logging
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.attention.interface import AttentionParams
from workers.csrc.build import c_library
from workers.device.triton_support import triton_failure
from workers.layers.compact_gemm import make_compact_weight
from workers.layers.cpu_decoder import make_cpu_decoder
from workers.layers.cpu_ops import CpuOps
from workers.layers.fused_decoder import fuse_layers
from workers.layers.fused_experts import FusedExperts
from workers.layers.linear import LinearMethod, Weight, can_pack, pack_for_cpu, pack_linears
from workers.layers.lora_weight import add_hooks
from workers.layers.quantized_gemm import QuantizedGemm
from workers.layers.quantized_linear import QuantizedLinear
from workers.layers.skinny_gemm import SkinnyGemm
from workers.lora.lora_pool import LoraPool
from workers.parallel.ranks import Ranks
from workers.quantization.quantized_tensor import QuantizedTensor

log = logging.getLogger("servekit.worker")


def replace_layers(
    model: PreTrainedModel,
    decoder: nn.Module,
    params: list[AttentionParams],
    ranks: Ranks | None = None,
    lora: LoraPool | None = None,
) -> nn.Module:
    """Replace the layers of `model` in place, and return its decoder, which may be a new module.

    `params` says how each layer attends. `ranks` is given where other processes hold other parts of the model.
    Layers for which there is no faster equivalent stay as they are. With `lora`, adapters may change the linear layers.
    """
    replace = {"cpu": _replace_on_cpu, "cuda": _replace_on_gpu}.get(model.device.type)
    fused = None if replace is None else replace(model, decoder, params, ranks, lora)
    if lora is not None:
        add_hooks(model, lora)
    log.info("%d layers: %s", len(params), "fused" if fused else "transformers' own")
    return fused or decoder


def _replace_on_cpu(
    model: PreTrainedModel,
    decoder: nn.Module,
    params: list[AttentionParams],
    ranks: Ranks | None,
    lora: LoraPool | None,
) -> nn.Module | None:
    library = c_library(str(model.dtype).removeprefix("torch.")) if can_pack(model.dtype) else None
    may_fuse = _all_ranks_can_fuse(ranks, library is not None)
    if library is None:
        if can_pack(model.dtype):
            pack_linears(model)
        return None
    method = make_cpu_method(library)
    # With one call for all layers, the ranks could not exchange anything between layers.
    make_decoder = make_cpu_decoder if ranks is None or ranks.group is None else None
    ops = CpuOps(library, model.dtype)
    make_experts = partial(FusedExperts, method=method, ops=ops)
    fused = None
    if may_fuse:
        fused = fuse_layers(model, decoder, params, ops, method, make_decoder, ranks, lora, make_experts)
    pack_linears(model, method)
    return fused


def replace_linears(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace the linear layers of a module that runs alongside a model, such as a head that makes drafts, in place."""
    if device.type == "cpu" and can_pack(dtype):
        library = c_library(str(dtype).removeprefix("torch."))
        pack_linears(module, pack_for_cpu if library is None else make_cpu_method(library))


def make_cpu_method(library: ctypes.CDLL) -> LinearMethod:
    """Return how a CPU with C kernels multiplies by dense and by quantized weights."""
    dense, quantized = SkinnyGemm(library), QuantizedGemm(library)

    def make_weight(matrix: Tensor | QuantizedTensor, bias: Tensor | None) -> Weight:
        if isinstance(matrix, QuantizedTensor):
            return quantized.make_weight(matrix, bias)
        return make_compact_weight(library, matrix, bias) or dense.make_weight(matrix, bias)

    return make_weight


def _replace_on_gpu(
    model: PreTrainedModel,
    decoder: nn.Module,
    params: list[AttentionParams],
    ranks: Ranks | None,
    lora: LoraPool | None,
) -> nn.Module | None:
    may_fuse = _all_ranks_can_fuse(ranks, triton_failure() is None)
    if triton_failure() is not None:
        return None
    from workers.layers.triton_ops import TritonOps  # not at the top: only torch for CUDA brings Triton
    from workers.layers.triton_quantized import make_weight

    fused = None
    if may_fuse:
        fused = fuse_layers(model, decoder, params, TritonOps(), make_weight, ranks=ranks, lora=lora)
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):  # dense layers would not become faster
        pack_linears(model, make_weight)
    return fused


def _all_ranks_can_fuse(ranks: Ranks | None, can_fuse: bool) -> bool:
    """Return whether the machines of all ranks of the stage can compute fused layers. Call it on each of them.

    One may have no compiler, or an older processor. Ranks with and without fused layers would exchange other tensors.
    """
    if ranks is None or ranks.group is None:
        return can_fuse
    all_can = ranks.group.all_can(can_fuse)
    if can_fuse and not all_can:
        log.warning("layers are not fused: another rank's machine cannot (`servekit doctor` there says why)")
    return all_can
