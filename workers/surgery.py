"""What is faster, in the place of transformers' own layers."""

from __future__ import annotations

import logging

from torch import nn
from transformers import PreTrainedModel

from workers.c_library import c_library
from workers.cpu_layers import CpuLayers
from workers.few_rows import FewRows
from workers.fused_layers import fuse_layers
from workers.packed_linear import DenseWeight, can_pack, pack_linears
from workers.paged_step import Score

log = logging.getLogger("servekit.worker")


def operate(model: PreTrainedModel, decoder: nn.Module, scores: list[Score]) -> nn.Module:
    """Change the model's layers, each of which attends with its score; returns what is its decoder from now on."""
    change = {"cpu": _operate_on_cpu, "cuda": _operate_on_gpu}.get(model.device.type)
    fused = None if change is None else change(model, decoder, scores)
    log.info("%d layers, %s", len(scores), "fused" if fused else "as transformers has them")
    return fused or decoder


def _operate_on_cpu(model: PreTrainedModel, decoder: nn.Module, scores: list[Score]) -> nn.Module | None:
    if not can_pack(model.dtype):
        return None
    library = c_library(str(model.dtype).removeprefix("torch."))
    if library is None:
        pack_linears(model)
        return None
    weight = FewRows(library).weight
    fused = fuse_layers(model, decoder, scores, CpuLayers(library), weight)
    pack_linears(model, weight)
    return fused


def _operate_on_gpu(model: PreTrainedModel, decoder: nn.Module, scores: list[Score]) -> nn.Module | None:
    try:
        from workers.gpu_attention import TritonLayers  # not at the top: Triton comes with torch for CUDA only
    except ImportError:
        return None
    return fuse_layers(model, decoder, scores, TritonLayers(), DenseWeight)
