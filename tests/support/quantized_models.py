"""Small quantized models in the layout of compressed-tensors, with the numbers that their codes stand for.

The packing is written by the published layout, one code after the other, and shares no code with servekit.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_models import ARCHITECTURES, make_model

GROUP_SIZE = 8  # which also divides the parts of two ranks
EXPERT = re.compile(r"\.experts\.\d+\.\w+$")  # in the files; transformers' model has one parameter for all of them
DYNAMIC = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}

# name -> what config.json says of weights, and of their inputs
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "w4a16": ({"num_bits": 4, "strategy": "group", "group_size": GROUP_SIZE, "symmetric": True}, None),
    "w4a16_asymmetric": ({"num_bits": 4, "strategy": "group", "group_size": GROUP_SIZE, "symmetric": False}, None),
    "w4a16_channel": ({"num_bits": 4, "strategy": "channel", "symmetric": True}, None),
    "w4a8": (
        {"num_bits": 4, "strategy": "group", "group_size": GROUP_SIZE, "symmetric": True},
        {**DYNAMIC, "type": "int"},
    ),
    "w8a16": ({"num_bits": 8, "strategy": "group", "group_size": GROUP_SIZE, "symmetric": True}, None),
    "w8a16_asymmetric": ({"num_bits": 8, "strategy": "channel", "symmetric": False}, None),
    "w8a8": ({"num_bits": 8, "strategy": "channel", "symmetric": True}, {**DYNAMIC, "type": "int"}),
    "w8a8_tensor": ({"num_bits": 8, "strategy": "tensor", "symmetric": True}, {**DYNAMIC, "type": "int"}),
    "fp8_tensor": ({"num_bits": 8, "type": "float", "strategy": "tensor"}, {**DYNAMIC, "type": "float"}),
    "fp8_channel": ({"num_bits": 8, "type": "float", "strategy": "channel"}, {**DYNAMIC, "type": "float"}),
    "fp8_block": (
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 20]},
        {**DYNAMIC, "type": "float"},
    ),
}


def make_quantized_model(directory: Path, scheme: str, architecture: str = "llama") -> PreTrainedModel:
    """Save a quantized model to `directory`; return it with the numbers of its codes, in float32."""
    model = make_model(directory, *ARCHITECTURES[architecture])
    modules = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in name]
    dense = load_file(directory / "model.safetensors")
    tensors = dict(dense)
    for name in dense:
        prefix = name.removesuffix(".weight")
        if prefix in modules or EXPERT.search(prefix):
            del tensors[name]
            parts, dense[name] = quantize(dense[name], SCHEMES[scheme][0])
            tensors |= {f"{prefix}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    with TemporaryDirectory() as dequantized:
        shutil.copy(directory / "config.json", dequantized)
        save_file(dense, Path(dequantized) / "model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(
            dequantized, dtype=torch.float32, attn_implementation="eager", disable_mmap=True
        ).eval()
    save_file(tensors, directory / "new", {"format": "pt"})  # the other file is mapped into memory
    (directory / "new").rename(directory / "model.safetensors")
    describe(directory, scheme)
    return model


def describe(directory: Path, scheme: str, **fields: Any) -> None:
    """Write the scheme into config.json; `fields` change its description of the weights."""
    weights, inputs = SCHEMES[scheme]
    config = json.loads((directory / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": weights | fields, "input_activations": inputs}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout_of(weights),
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    (directory / "config.json").write_text(json.dumps(config))


def layout_of(weights: dict[str, Any]) -> str:
    if weights.get("type") == "float":
        return "float-quantized"
    return "pack-quantized" if weights["num_bits"] == 4 or weights["strategy"] == "group" else "int-quantized"


def quantize(matrix: Tensor, weights: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a quantized matrix, and the numbers that they stand for, in float32."""
    numbers = matrix.double().numpy()
    num_outputs, num_inputs = numbers.shape
    rows, columns = {
        "tensor": (num_outputs, num_inputs),
        "channel": (1, num_inputs),
        "group": (1, weights.get("group_size", 0)),
        "block": tuple(weights.get("block_structure", (0, 0))),
    }[weights["strategy"]]
    is_float, bits = weights.get("type") == "float", weights["num_bits"]
    low, high = (-448.0, 448.0) if is_float else (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1)
    grid = (-(-num_outputs // rows), -(-num_inputs // columns))
    scales, zero_points = np.zeros(grid), np.zeros(grid)
    codes, values = np.zeros_like(numbers), np.zeros_like(numbers)
    for i in range(grid[0]):
        for j in range(grid[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            part = numbers[block]
            if weights.get("symmetric", True):
                scale, zero = np.abs(part).max() / high, 0.0
            else:
                least, most = min(part.min(), 0.0), max(part.max(), 0.0)
                scale = (most - least) / (high - low)
                zero = float(np.round(low - least / scale))
            scale = float(np.float32(scale))
            scales[i, j], zero_points[i, j] = scale, zero
            if is_float:
                codes[block] = torch.tensor(part / scale).to(torch.float8_e4m3fn).double().numpy()
            else:
                codes[block] = np.clip(np.round(part / scale + zero), low, high)
            values[block] = (codes[block] - zero) * scale
    parts = {"weight_scale": torch.tensor(scales, dtype=torch.float32)}
    if weights["strategy"] == "tensor":
        parts["weight_scale"] = parts["weight_scale"].flatten()
    is_packed = layout_of(weights) == "pack-quantized"
    if is_packed:
        parts["weight_packed"] = torch.from_numpy(pack(codes.astype(np.int64), bits))
        parts["weight_shape"] = torch.tensor(numbers.shape)
    else:
        parts["weight"] = torch.tensor(codes).to(torch.float8_e4m3fn if is_float else torch.int8)
    if not weights.get("symmetric", True):
        zeros = zero_points.astype(np.int64)
        parts["weight_zero_point"] = (
            torch.from_numpy(pack(zeros.T, bits).T.copy()) if is_packed else torch.from_numpy(zeros.astype(np.int8))
        )
    return parts, torch.tensor(values).float()


def pack(codes: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Return signed codes [rows, columns] side by side in int32 words, from the lowest bits on."""
    per_word = 32 // bits
    num_words = -(-codes.shape[1] // per_word)
    words = np.zeros((codes.shape[0], num_words), dtype=np.uint32)
    for (row, column), code in np.ndenumerate(codes):
        unsigned = np.uint32(int(code) + 2 ** (bits - 1))
        words[row, column // per_word] |= unsigned << np.uint32(bits * (column % per_word))
    return words.view(np.int32)
