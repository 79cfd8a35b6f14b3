"""Make compressed_tensors_samples.safetensors: `pip install compressed-tensors==0.20.0`, then run this file.

The package is not a dependency: it takes ten seconds to import. It packs random matrices, and says which numbers the
packed ones stand for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-not-found]
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # type: ignore[import-not-found]
from compressed_tensors.quantization.utils import calculate_qparams  # type: ignore[import-not-found]
from safetensors.torch import save_file

SCHEMES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "w4_group": ("pack-quantized", torch.bfloat16, {"num_bits": 4, "strategy": "group", "group_size": 16}),
    "w4_group_asymmetric": (
        "pack-quantized",
        torch.float16,
        {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "w4_channel": ("pack-quantized", torch.float32, {"num_bits": 4, "strategy": "channel"}),
    "w8_group": ("pack-quantized", torch.bfloat16, {"num_bits": 8, "strategy": "group", "group_size": 16}),
    "w8_channel_asymmetric": (
        "pack-quantized",
        torch.float32,
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
    ),
    "int8_channel": ("int-quantized", torch.float32, {"num_bits": 8, "strategy": "channel"}),
    "int8_tensor": ("int-quantized", torch.bfloat16, {"num_bits": 8, "strategy": "tensor"}),
    "fp8_tensor": ("float-quantized", torch.float32, {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8_channel": ("float-quantized", torch.bfloat16, {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8_block": (
        "float-quantized",
        torch.float32,
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]},
    ),
}
# Not multiples of the sixteen rows and columns of a block where the layout allows it.
SHAPES = {"fp8_block": (40, 56), "w4_channel": (20, 36), "w8_channel_asymmetric": (20, 36)}


def extremes(matrix: torch.Tensor, arguments: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and greatest number of each scale's part."""
    rows, columns = matrix.shape
    match arguments.strategy:
        case "tensor":
            return matrix.amin().view(1), matrix.amax().view(1)
        case "channel":
            return matrix.amin(1, keepdim=True), matrix.amax(1, keepdim=True)
        case "group":
            groups = matrix.unflatten(1, (-1, arguments.group_size))
            return groups.amin(-1), groups.amax(-1)
    height, width = arguments.block_structure
    blocks = [[matrix[i : i + height, j : j + width] for j in range(0, columns, width)] for i in range(0, rows, height)]
    return (
        torch.stack([torch.stack([block.amin() for block in row]) for row in blocks]),
        torch.stack([torch.stack([block.amax() for block in row]) for row in blocks]),
    )


def main() -> None:
    torch.manual_seed(0)
    tensors = {}
    for name, (layout, dtype, fields) in SCHEMES.items():
        arguments = QuantizationArgs(**fields)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        matrix = torch.randn(SHAPES.get(name, (24, 32))).to(dtype)
        scale, zero_point = calculate_qparams(*extremes(matrix, arguments), arguments)
        state = {"weight": matrix, "weight_scale": scale.to(dtype)}
        if not arguments.symmetric:
            state["weight_zero_point"] = zero_point
        compressor = BaseCompressor.get_value_from_registry(layout)
        compressed = compressor.compress(state, scheme)
        expected = compressor.decompress(compressed, scheme)["weight"]
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in compressed.items() if tensor is not None}
        tensors[f"{name}.expected"] = expected.contiguous()
    schemes = {name: fields for name, (_, _, fields) in SCHEMES.items()}
    save_file(
        tensors, Path(__file__).parent / "compressed_tensors_samples.safetensors", {"schemes": json.dumps(schemes)}
    )


if __name__ == "__main__":
    main()
