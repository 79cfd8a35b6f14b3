"""Claims about the format compressed-tensors: its own package's numbers come back, and what is not read is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open

from servekit.errors import ConfigError
from tests.support.quantized_models import SCHEMES, pack, quantize
from workers.quantization.formats.compressed_tensors import CompressedTensors
from workers.quantization.formats.registry import format_of

# Made by compressed-tensors 0.20 itself; see make_samples.py beside it.
SAMPLES = Path(__file__).parent / "compressed_tensors_samples.safetensors"


def described(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **fields}


def samples() -> dict[str, dict[str, Any]]:
    with safe_open(SAMPLES, framework="pt") as file:
        found: dict[str, dict[str, Any]] = json.loads(file.metadata()["schemes"])
    return found


def read(weight_format: CompressedTensors, tensors: dict[str, torch.Tensor], name: str = "model.layers.0.a") -> Any:
    weight_format.check(tensors, name)
    return weight_format.read(tensors, name)


@pytest.mark.parametrize("name", samples())
def test_numbers_are_those_of_the_formats_own_package(name: str) -> None:
    prefix, tensors = f"{name}.", load_file(SAMPLES)
    expected = tensors.pop(f"{prefix}expected")
    parts = {f".{key.removeprefix(prefix)}": tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    weight_format = CompressedTensors.from_config(described(samples()[name]))
    assert weight_format.check(parts, name) == tuple(expected.shape)
    matrix = weight_format.read(parts, name)
    # The package multiplies in the scales' dtype.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[parts[".weight_scale"].dtype]
    torch.testing.assert_close(matrix.dequantize(), expected.float(), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_are_those_of_a_naive_packing(scheme: str) -> None:
    torch.manual_seed(1)
    weights, inputs = SCHEMES[scheme]
    parts, numbers = quantize(torch.randn(24, 40), weights)
    weight_format = CompressedTensors.from_config(described(weights, inputs))
    matrix = read(weight_format, {f".{key}": tensor for key, tensor in parts.items()})
    torch.testing.assert_close(matrix.dequantize(), numbers, rtol=1e-6, atol=1e-6)
    assert matrix.activations == {"w4a8": "int8", "w8a8": "int8", "w8a8_tensor": "int8"}.get(
        scheme, "float8" if scheme.startswith("fp8") else "float"
    )
    assert matrix.encoding == {"w4": "int4", "w8": "int8", "fp": "float8"}[scheme[:2]]


def test_columns_whose_groups_are_mixed_are_read() -> None:
    """`actorder: group`, which older versions of llm-compressor wrote."""
    torch.manual_seed(2)
    codes, scales = torch.randint(-8, 8, (16, 32)), torch.rand(16, 4)
    groups = (torch.arange(32) // 8)[torch.randperm(32)].int()
    tensors = {
        ".weight_packed": torch.from_numpy(pack(codes.numpy(), 4)),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([16, 32]),
        ".weight_g_idx": groups,
    }
    weight_format = CompressedTensors.from_config(described({"num_bits": 4, "strategy": "group", "group_size": 8}))
    matrix = read(weight_format, tensors)
    assert matrix.input_order is not None
    torch.testing.assert_close(matrix.dequantize(), codes * scales[:, groups.long()])
    unordered = read(weight_format, {**tensors, ".weight_g_idx": torch.full_like(groups, -1)})
    assert unordered.input_order is None


def test_each_module_has_the_scheme_that_targets_it() -> None:
    def group(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": {"num_bits": bits, "strategy": "channel", "symmetric": True}}

    groups = {"a": group(8, "Linear"), "b": group(4, r"re:.*layers\.\d+\.down$"), "c": group(8, "model.layers.1.down")}
    weight_format = format_of({"quant_method": "compressed-tensors", "config_groups": groups})
    for name, bits in {"model.layers.0.down": 4, "model.layers.1.down": 8, "model.layers.1.up": 8}.items():
        parts, numbers = quantize(torch.randn(8, 16), {"num_bits": bits, "strategy": "channel", "symmetric": True})
        tensors = {f".{key}": tensor for key, tensor in parts.items()}
        assert weight_format.check(tensors, name) == (8, 16)
        torch.testing.assert_close(weight_format.read(tensors, name).dequantize(), numbers)
    nobody = format_of(
        {"quant_method": "compressed-tensors", "config_groups": {"a": group(8, "x"), "b": group(8, "y")}}
    )
    with pytest.raises(ConfigError, match="no group in config_groups"):
        nobody.check({}, "model.layers.0.up")


def test_a_pattern_that_would_be_matched_for_ever_is_refused() -> None:
    pattern = "re:(a|aa)+$"
    groups = {
        name: {"targets": [target], "weights": {"num_bits": 8}}
        for name, target in {"a": pattern, "b": "Linear"}.items()
    }
    weight_format = CompressedTensors.from_config({"config_groups": groups})
    with pytest.raises(ConfigError, match="targets"):
        weight_format.check({}, "a" * 200 + "b")


INT8 = {"num_bits": 8, "strategy": "channel"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (described({"num_bits": 3}), "num_bits = 3"),
    (described({"num_bits": True}), "num_bits = True"),
    (described({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}), "num_bits = 4"),
    (described({"num_bits": 4, "strategy": "group", "group_size": 0}), "group_size = 0"),
    (described({"num_bits": 4, "strategy": "group", "group_size": 2**40}), "group_size"),
    (described({"num_bits": 4, "strategy": "tensor_group", "group_size": 16}), "strategy = 'tensor_group'"),
    (described({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [0, 1]}), "block_structure"),
    (described({"num_bits": 8, "type": "float", "strategy": "block"}), "block_structure = None"),
    (described({"num_bits": 8, "type": "float", "symmetric": False}), "symmetric = False"),
    (described({"num_bits": 8}, {"num_bits": 4}), "num_bits = 4"),
    (described(INT8, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    (described(INT8, sparsity_config="x" * 10**6), "sparsity_config"),
    (described(INT8, transform_config={"config_groups": {}}), "transform_config"),
    (described(INT8, format="nvfp4-pack-quantized"), "format = 'nvfp4-pack-quantized'"),
    (described(INT8, format="marlin-24"), "format = 'marlin-24'"),
    (described(INT8) | {"config_groups": {}}, "config_groups"),
    (described(INT8) | {"config_groups": None}, "config_groups"),
    (described(INT8) | {"config_groups": {"W8A8": ["Linear"]}}, "config_groups"),
    (described(INT8) | {"config_groups": {"a": {"targets": "Linear", "weights": INT8}}}, "targets"),
    (described(INT8) | {"config_groups": {"a": {"targets": ["re:" + "x" * 10**5], "weights": INT8}}}, "targets"),
]


@pytest.mark.parametrize(("config", "named"), REFUSED, ids=lambda value: str(value)[:60])
def test_variants_that_are_not_read_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        format_of(config)
    assert named in refusal.value.message and "compressed-tensors" in refusal.value.message
    assert "serve another checkpoint" in refusal.value.message and len(refusal.value.message) < 400


W4: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 8, "symmetric": False}
DAMAGES: list[tuple[str, torch.Tensor | None, str]] = [
    (".weight_packed", None, "lack"),
    (".weight_packed", torch.zeros(16, 4), "must be int32"),
    (".weight_packed", torch.zeros(16, 3, dtype=torch.int32), "weight_shape"),
    (".weight_packed", torch.zeros(0, 4, dtype=torch.int32), "must be int32"),
    (".weight_packed", torch.zeros(16, dtype=torch.int32), "must be int32"),
    (".weight_shape", None, "lack"),
    (".weight_shape", torch.tensor([16, 2**40]), "weight_shape"),
    (".weight_shape", torch.tensor([2**40, 32]), "weight_shape"),
    (".weight_shape", torch.tensor([16, -32]), "weight_shape"),
    (".weight_shape", torch.tensor([16, 31]), "whole|two codes"),
    (".weight_shape", torch.tensor([16, 32, 1]), "must be int64"),
    (".weight_scale", None, "lack"),
    (".weight_scale", torch.ones(16, 5), "must be"),
    (".weight_scale", torch.ones(16, 4, dtype=torch.int32), "must be"),
    (".weight_scale", torch.full((16, 4), torch.inf), "not finite"),
    (".weight_scale", torch.full((16, 4), torch.nan, dtype=torch.float16), "not finite"),
    (".weight_zero_point", None, "lack"),
    (".weight_zero_point", torch.zeros(16, 4), "must be int8"),
    (".weight_zero_point", torch.zeros(3, 4, dtype=torch.int32), "must be int32"),
    (".weight_g_idx", torch.zeros(32, dtype=torch.int32), "g_idx"),
    (".weight_g_idx", torch.full((32,), 2**31 - 1, dtype=torch.int32), "g_idx"),
    (".weight_g_idx", torch.full((32,), -7, dtype=torch.int32), "g_idx"),
    (".weight_g_idx", torch.zeros(31, dtype=torch.int32), "must be"),
]


@pytest.mark.parametrize(("suffix", "tensor", "named"), DAMAGES, ids=lambda value: str(value)[:30])
def test_tensors_that_contradict_each_other_are_refused_in_a_sentence(
    suffix: str, tensor: torch.Tensor | None, named: str
) -> None:
    parts, _ = quantize(torch.randn(16, 32), W4)
    tensors = {f".{key}": part for key, part in parts.items()}
    tensors.pop(suffix, None)
    if tensor is not None:
        tensors[suffix] = tensor
    with pytest.raises(ConfigError, match=named) as refusal:
        read(CompressedTensors.from_config(described(W4)), tensors, "model.layers.0.mlp.up_proj")
    assert "model.layers.0.mlp.up_proj" in refusal.value.message
    assert len(refusal.value.message) < 400 and "\n" not in refusal.value.message


def test_codes_beyond_four_bits_are_refused() -> None:
    tensors = {".weight": torch.full((8, 16), 9, dtype=torch.int8), ".weight_scale": torch.ones(8, 1)}
    with pytest.raises(ConfigError, match="four bits"):
        read(CompressedTensors.from_config(described({"num_bits": 4, "strategy": "channel"})), tensors)
