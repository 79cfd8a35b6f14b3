"""Claim: a model in each format answers with the tokens of the numbers that its codes stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from servekit.errors import ConfigError
from tests.support.inprocess import load
from tests.support.tiny_models import ARCHITECTURES, make_model
from tests.workers.loading.test_quantized_weights import answers, answers_of
from tests.workers.quantization.formats.packing import packed_across, packed_down
from workers.quantization.formats.bitsandbytes import FP4_LEVELS
from workers.quantization.formats.mxfp4 import E2M1_LEVELS
from workers.quantization.quantized_tensor import NF4_LEVELS

pytestmark = pytest.mark.long  # it loads many models

GROUP_SIZE = 16
Encoded = tuple[dict[str, Tensor], Tensor]  # the tensors by suffix, and the numbers that they stand for


def asymmetric(matrix: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and zero points of four bits, scales of each group of inputs, and the numbers."""
    num_groups = int(groups.max()) + 1
    codes, numbers = torch.empty(matrix.shape, dtype=torch.int64), torch.empty_like(matrix)
    zero_points, scales = torch.empty(2, num_groups, len(matrix))
    for group in range(num_groups):
        part = matrix[:, groups == group]
        low, high = part.amin(dim=1).clamp(max=0), part.amax(dim=1).clamp(min=0)
        scale = ((high - low) / 15).half().float()
        zero_point = (-low / scale).round()
        code = (part / scale[:, None] + zero_point[:, None]).round().clamp(0, 15)
        scales[group], zero_points[group] = scale, zero_point
        codes[:, groups == group] = code.long()
        numbers[:, groups == group] = (code - zero_point[:, None]) * scale[:, None]
    return codes, zero_points, scales, numbers


def gptq(matrix: Tensor, *, has_desc_act: bool = False, is_v2: bool = False) -> Encoded:
    groups = torch.arange(matrix.shape[1]) // GROUP_SIZE
    if has_desc_act:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(matrix.shape[1]))]
    codes, zero_points, scales, numbers = asymmetric(matrix, groups)
    tensors = {
        ".qweight": packed_down(codes.T, 4),
        ".qzeros": packed_across(zero_points, 4, subtract_from_each=0 if is_v2 else 0x11111111),
        ".scales": scales.half(),
        ".g_idx": groups.int(),
    }
    return tensors, numbers


def awq(matrix: Tensor) -> Encoded:
    codes, zero_points, scales, numbers = asymmetric(matrix, torch.arange(matrix.shape[1]) // GROUP_SIZE)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        ".qweight": packed_across(codes.T, 4, order),
        ".qzeros": packed_across(zero_points, 4, order),
        ".scales": scales.half(),
    }
    return tensors, numbers


def fp8_by_block(matrix: Tensor) -> Encoded:
    num_outputs, num_inputs = matrix.shape
    scales = torch.empty(-(-num_outputs // 32), -(-num_inputs // 32))
    of_numbers = torch.empty_like(matrix)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = slice(32 * row, 32 * row + 32), slice(32 * column, 32 * column + 32)
            scales[row, column] = of_numbers[block] = matrix[block].abs().max() / 448
    codes = (matrix / of_numbers).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale_inv": scales}, codes.float() * of_numbers


def fp8_by_row(matrix: Tensor) -> Encoded:
    scales = matrix.abs().amax(dim=1, keepdim=True) / 448
    codes = (matrix / scales).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales


def fp8(matrix: Tensor) -> Encoded:
    scale = matrix.abs().max() / 448
    codes = (matrix / scale).to(torch.float8_e4m3fn)
    tensors = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.tensor(0.5)}
    return tensors, codes.float() * scale


def int8(matrix: Tensor) -> Encoded:
    largest = matrix.abs().amax(dim=1)
    codes = (matrix / largest[:, None] * 127).round()
    tensors = {".weight": codes.to(torch.int8), ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes * (largest[:, None] / 127)


def four_bits(matrix: Tensor, kind: str, levels: tuple[float, ...]) -> Encoded:
    blocks = nn.functional.pad(matrix.flatten(), (0, -matrix.numel() % 64)).reshape(-1, 64)
    largest = blocks.abs().amax(dim=1)
    known = torch.tensor(levels)
    codes = ((blocks / largest[:, None])[..., None] - known).abs().argmin(dim=-1)
    numbers = (known[codes] * largest[:, None]).flatten()[: matrix.numel()].reshape(matrix.shape)
    codes = codes.flatten()[: matrix.numel()]
    state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(matrix.shape)}
    tensors = {
        ".weight": (codes[0::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
        ".weight.absmax": largest,
        ".weight.quant_map": known,
        f".weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return tensors, numbers


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "sym": False}
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Encoded]]] = {
    "gptq": (GPTQ | {"desc_act": False}, gptq),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda matrix: gptq(matrix, is_v2=True)),
    "gptq with desc_act": (GPTQ | {"desc_act": True}, lambda matrix: gptq(matrix, has_desc_act=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm", "zero_point": True}, awq),
    "fp8 by block": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, fp8_by_block),
    "fp8 by row": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_by_row),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, int8),
    "nf4": (FOUR_BITS | {"bnb_4bit_quant_type": "nf4"}, lambda matrix: four_bits(matrix, "nf4", NF4_LEVELS)),
    "fp4": (FOUR_BITS | {"bnb_4bit_quant_type": "fp4"}, lambda matrix: four_bits(matrix, "fp4", FP4_LEVELS)),
}


def rewrite(directory: Path, tensors: dict[str, Tensor], described: dict[str, Any] | None) -> None:
    """Replace a model's tensors, and the description of their format."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "new", {"format": "pt"})  # the other file is mapped into memory
    (directory / "new").rename(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": described}))


def make_quantized(directory: Path, described: dict[str, Any], encode: Callable[[Tensor], Encoded]) -> PreTrainedModel:
    """Save a model with quantized layers; return it with the numbers of their codes."""
    model = make_model(directory, *ARCHITECTURES["llama"])
    tensors = load_file(directory / "model.safetensors")
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in prefix:
            parts, numbers = encode(tensors.pop(f"{prefix}.weight"))
            tensors |= {prefix + suffix: tensor for suffix, tensor in parts.items()}
            with torch.no_grad():
                module.weight.copy_(numbers)
    rewrite(directory, tensors, described)
    return model


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    model = make_quantized(tmp_path, *FORMATS[name])
    assert answers(load(tmp_path)) == answers_of(model)


def test_experts_of_gpt_oss_are_read_as_numbers(tmp_path: Path) -> None:
    architecture, sizes = ARCHITECTURES["gpt_oss"]
    model = make_model(tmp_path, architecture, {**sizes, "hidden_size": 64})
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    experts = [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
    assert len(experts) == 6
    for name in experts:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        shape = num_experts, num_outputs, num_inputs // 32
        codes = torch.randint(16, (*shape, 32), generator=generator)
        exponents = torch.randint(-5, -2, shape, generator=generator)
        tensors[f"{name}_blocks"] = (codes[..., 0::2] + codes[..., 1::2] * 16).to(torch.uint8)
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        numbers = torch.tensor(E2M1_LEVELS)[codes] * exponents[..., None].float().exp2()
        with torch.no_grad():
            model.get_parameter(name).copy_(numbers.flatten(2).transpose(1, 2))
    rewrite(tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    assert answers(load(tmp_path)) == answers_of(model)


@pytest.mark.parametrize(("name", "suffix"), [("fp8", ".weight_scale"), ("int8", ".SCB"), ("gptq", ".scales")])
def test_a_matrix_without_its_scales_is_refused(name: str, suffix: str, tmp_path: Path) -> None:
    """Its codes would be taken for numbers."""
    described, encode = FORMATS[name]
    make_quantized(tmp_path, described, encode)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.1.mlp.up_proj{suffix}"]
    rewrite(tmp_path, tensors, described)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj"):
        load(tmp_path)


def test_experts_with_scales_by_block_are_read_as_numbers(tmp_path: Path) -> None:
    """The files have a matrix for each expert, as DeepSeek's have, and the model one parameter for all of a layer."""
    for name in ("dense", "quantized"):
        (tmp_path / name).mkdir()
        make_model(tmp_path / name, *ARCHITECTURES["mixtral"])
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    quantized = dict(dense)
    experts = [name for name in dense if ".experts." in name]
    assert len(experts) == 3 * 4 * 3  # layers, experts, matrices
    for name in experts:
        parts, dense[name] = fp8_by_block(quantized.pop(name))
        quantized |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in parts.items()}
    rewrite(tmp_path / "quantized", quantized, FORMATS["fp8 by block"][0])
    rewrite(tmp_path / "dense", dense, None)
    assert answers(load(tmp_path / "quantized")) == answers(load(tmp_path / "dense"))
