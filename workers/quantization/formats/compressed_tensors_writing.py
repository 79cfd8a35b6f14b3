"""Write matrices in the format compressed-tensors, which vLLM, transformers and servekit read.

compressed_tensors.py reads it, and names its tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.quantization.formats.compressed_tensors import NAME
from workers.quantization.methods.grid import Grid, RoundedMatrix
from workers.quantization.quantized_tensor import Activations, pack_nibbles


def layout_of(grid: Grid, activations: Activations) -> str:
    """Return the layout of the codes. vLLM reads packed ones for weights alone, plain ones with 8-bit activations."""
    if grid.is_float:
        return "float-quantized"
    return "pack-quantized" if activations == "float" else "int-quantized"


def pack_matrix(matrix: RoundedMatrix, grid: Grid, layout: str) -> dict[str, Tensor]:
    """Return the tensors of a matrix by suffix."""
    parts = {".weight_scale": matrix.scales}
    if layout != "pack-quantized":
        assert matrix.zero_points is None
        return parts | {".weight": matrix.codes}
    parts[".weight_packed"] = _pack(matrix.codes, grid.num_bits)
    parts[".weight_shape"] = torch.tensor(matrix.codes.shape)
    if matrix.zero_points is not None:  # rows lie side by side in a word
        parts[".weight_zero_point"] = _pack(matrix.zero_points.T, grid.num_bits).T.contiguous()
    return parts


def describe(
    layout: str, grids: Mapping[str, Grid], activations: Activations, ignored: Iterable[str]
) -> dict[str, Any]:
    """Return the `quantization_config` of config.json.

    `grids` are those of the quantized modules, by name, and `ignored` those of other matrices. If there is one grid,
    its modules are targeted by their class; if there are several, by their names, so that no module has two.
    """
    modules: dict[Grid, list[str]] = {}
    for name, grid in grids.items():
        modules.setdefault(grid, []).append(name)
    by_frequency = sorted(modules.items(), key=lambda item: -len(item[1]))
    groups = {
        f"group_{index}": {
            "targets": ["Linear"] if len(modules) == 1 else _patterns(names, grids.keys() - set(names)),
            "weights": _weights(grid),
            "input_activations": _inputs(activations),
            "output_activations": None,
        }
        for index, (grid, names) in enumerate(by_frequency)
    }
    return {
        "quant_method": NAME,
        "format": layout,
        "config_groups": groups,
        "ignore": _patterns(ignored, grids),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _weights(grid: Grid) -> dict[str, Any]:
    return {
        "num_bits": grid.num_bits,
        "type": "float" if grid.is_float else "int",
        "symmetric": grid.is_symmetric,
        "strategy": "channel" if grid.group_size is None else "group",
        "group_size": grid.group_size,
        "dynamic": False,
    }


def _inputs(activations: Activations) -> dict[str, Any] | None:
    if activations == "float":
        return None
    kind = "float" if activations == "float8" else "int"
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}


def _patterns(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return patterns of names. Those that differ in numbers only, as layers and experts do, become one.

    None of them matches one of the others.
    """
    patterns_of_others = {_pattern(name) for name in others}
    found = set()
    for name in names:
        pattern = _pattern(name)
        has_number = pattern != re.escape(name)
        found.add(f"re:{pattern}$" if has_number and pattern not in patterns_of_others else name)
    return sorted(found)


def _pattern(name: str) -> str:
    """Return a pattern of all names that differ from this one in numbers only."""
    return re.sub(r"\d+", lambda _: r"\d+", re.escape(name))


def _pack(codes: Tensor, num_bits: int) -> Tensor:
    """Return signed codes, int8 [num_rows, num_columns], side by side in int32 words, from the lowest bits on."""
    per_word = 32 // num_bits
    missing = math.ceil(codes.shape[1] / per_word) * per_word - codes.shape[1]
    if num_bits == 8:
        octets = F.pad(codes.contiguous().view(torch.uint8) ^ 0x80, (0, missing))
    else:
        octets = pack_nibbles(F.pad((codes + 8).view(torch.uint8), (0, missing)))
    return octets.flatten().view(torch.int32).view(len(codes), -1)
