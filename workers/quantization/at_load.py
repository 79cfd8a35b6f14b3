"""Quantize an unquantized checkpoint as it is read. The loader treats this as one more format.

Rounding depends on the weights only. There is no calibration. `--quantization` names the format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from servekit.errors import ConfigError
from workers.quantization.formats.checks import FLOATS, finite, tensor
from workers.quantization.formats.interface import WeightFormat
from workers.quantization.quantized_tensor import QuantizedTensor
from workers.quantization.rounding import round_float8, round_int4, round_int8, round_nf4

BY_ROW = {"int8": "int8, a scale for each row", "fp8": "float8, a scale for each row"}
BY_GROUP = {"int4": "int4", "w4a8": "int4 with int8 activations", "nf4": "NF4"}
GROUP_SIZE = 64
MIN_GROUP_SIZE = 16
# Small matrices that choose experts: a wrong choice costs more than their memory.
ROUTERS = {"gate", "router", "shared_expert_gate", "wg"}
_IN_A_LAYER = re.compile(r"\.\d+\.")


class QuantizedAtLoad(WeightFormat):
    """Unquantized weights that are rounded as they are read.

    Matrices outside of the numbered layers, such as the output head, get eight bits in every format: each logit is one
    row's product, so an error there is not averaged by later layers. They are a small part of a model.
    """

    markers: ClassVar[frozenset[str]] = frozenset({".weight"})
    suffixes: ClassVar[frozenset[str]] = frozenset({".weight"})
    is_stored: ClassVar[bool] = False

    def __init__(self, kind: str, group_size: int | None = None) -> None:
        """`kind` is one of BY_ROW and BY_GROUP. Raises ConfigError for a group size with one of BY_ROW."""
        if kind in BY_ROW:
            if group_size is not None:
                raise ConfigError(
                    f"quantization_group_size = {group_size}: {kind} has a scale for each row and no groups; leave out "
                    "--quantization-group-size"
                )
            self.name = BY_ROW[kind]
        else:
            group_size = group_size or GROUP_SIZE
            self.name = f"{BY_GROUP[kind]}, groups of {group_size}"
        self._kind, self._group_size = kind, group_size or 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(config["quantization"], config.get("group_size"))

    def takes(self, module_name: str) -> bool:
        return module_name.rpartition(".")[2] not in ROUTERS

    def check(self, tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
        num_outputs, num_inputs = tensor(tensors, ".weight", name, FLOATS, (None, None)).shape
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, Tensor], name: str) -> QuantizedTensor:
        # torch's threads would wait for each other after every small operation: alongside a busy process, two of them
        # took thirty times as long as one here. Trade-off: on an idle machine with many cores, one takes longer.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            matrix = self._round(tensors[".weight"], name)
        finally:
            torch.set_num_threads(num_threads)
        finite(matrix.scales.float(), ".weight", name)
        if matrix.offsets is not None:
            finite(matrix.offsets.float(), ".weight", name)
        return matrix

    def _round(self, matrix: Tensor, name: str) -> QuantizedTensor:
        if self._kind == "fp8":
            return round_float8(matrix)
        group_size = math.gcd(self._group_size, matrix.shape[1])
        if self._kind == "int8" or not _IN_A_LAYER.search(name) or group_size < MIN_GROUP_SIZE:
            return round_int8(matrix, "float" if self._kind in ("int4", "nf4") else "int8")
        if self._kind == "nf4":
            return round_nf4(matrix, group_size)
        return round_int4(matrix, group_size, "int8" if self._kind == "w4a8" else "float")
