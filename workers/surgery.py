"""What a CPU is faster with, in the place of transformers' own layers."""

from __future__ import annotations

import logging

from torch import nn
from transformers import PreTrainedModel

from workers.c_library import c_library
from workers.cpu_layers import CpuLayers
from workers.fused_layers import fuse_layers
from workers.packed_linear import can_pack, pack_linears
from workers.paged_step import Score

log = logging.getLogger("servekit.worker")


def operate(model: PreTrainedModel, decoder: nn.Module, scores: list[Score]) -> nn.Module:
    """Change the model's layers, each of which attends with its score; returns what is its decoder from now on."""
    if not can_pack(model.dtype):
        return decoder
    library = c_library(model.dtype)
    fused = None if library is None else fuse_layers(model, decoder, scores, CpuLayers(library))
    num_packed = pack_linears(model)
    log.info("%d layers, %s; %d weights by themselves", len(scores), "fused" if fused else "as they are", num_packed)
    return fused or decoder
