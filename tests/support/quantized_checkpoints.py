"""Whole checkpoints in the formats that people download, of models of any size.

A checkpoint of bfloat16 is read, its matrices are rounded to the nearest code, and packed as the tool of the format
packs them. Nothing is calibrated. tests/support/quantized_models.py packs code by code, for tests of the readers; here
whole matrices are packed at once, so 0.4 billion parameters take seconds.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig

from tests.support.gguf_files import interleaved, metadata_of, write_file
from tests.support.k_quants import blocks_of, type_in_q4_k_m
from tests.support.quantized import NF4_LEVELS
from tests.support.quantized_models import describe

LARGEST_GROUP = 128
FLOAT8_MAX, FLOAT8_BLOCK = 448.0, 128  # the block is DeepSeek's: 128 rows and 128 columns
NF4_BLOCK = 64
_IN_A_LAYER = re.compile(r"layers\.(\d+)\..*proj\.weight$")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in a word


def group_size_of(config: Mapping[str, Any]) -> int:
    """Return the largest group, up to 128, that divides the inputs of all layers of a Llama."""
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    return math.gcd(LARGEST_GROUP, config["hidden_size"], config["intermediate_size"], heads * head_size)


# -- safetensors -------------------------------------------------------------------------------------------------------

Parts = dict[str, Tensor]  # the tensors of a matrix, by their suffix


def symmetric(matrix: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return codes from -8 to 7, int8 [rows, columns], and bfloat16 scales [rows, groups]."""
    groups = matrix.float().view(len(matrix), -1, group_size)
    scales = (groups.abs().amax(dim=2) / 7.5).bfloat16()
    codes = (groups / scales.float()[..., None]).round_().clamp_(-8, 7)
    return codes.to(torch.int8).flatten(1), scales


def asymmetric(matrix: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and zero points from 0 to 15, uint8, and float16 scales; the last two [rows, groups].

    No zero point is 0, because `gptq` stores each of them minus one.
    """
    groups = matrix.float().view(len(matrix), -1, group_size)
    low, high = groups.amin(dim=2).clamp_(max=0), groups.amax(dim=2).clamp_(min=0)
    scales = ((high - low) / 15).half()
    zero_points = (-low / scales.float()).round_().clamp_(1, 15)
    codes = (groups / scales.float()[..., None] + zero_points[..., None]).round_().clamp_(0, 15)
    return codes.to(torch.uint8).flatten(1), zero_points.to(torch.uint8), scales


def packed(codes: Tensor) -> Tensor:
    """Return codes of four bits, uint8 [rows, columns], eight in a word: int32 [rows, columns / 8], lowest first."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32)


def pack_quantized(matrix: Tensor, group_size: int) -> Parts:
    codes, scales = symmetric(matrix, group_size)
    words = packed((codes + 8).to(torch.uint8))
    return {".weight_packed": words, ".weight_scale": scales, ".weight_shape": torch.tensor(matrix.shape)}


def int_quantized(matrix: Tensor, group_size: int) -> Parts:
    scales = (matrix.float().abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    codes = (matrix.float() / scales.float()).round_().clamp_(-127, 127)
    return {".weight": codes.to(torch.int8), ".weight_scale": scales}


def gptq(matrix: Tensor, group_size: int) -> Parts:
    codes, zero_points, scales = asymmetric(matrix, group_size)
    return {
        ".qweight": packed(codes).T.contiguous(),
        ".qzeros": packed(zero_points.T - 1),
        ".scales": scales.T.contiguous(),
        ".g_idx": torch.arange(matrix.shape[1], dtype=torch.int32) // group_size,
    }


def awq(matrix: Tensor, group_size: int) -> Parts:
    codes, zero_points, scales = asymmetric(matrix, group_size)
    return {
        ".qweight": packed(_in_awq_order(codes.T)),
        ".qzeros": packed(_in_awq_order(zero_points.T)),
        ".scales": scales.T.contiguous(),
    }


def fp8_by_row(matrix: Tensor, group_size: int) -> Parts:
    scales = matrix.float().abs().amax(dim=1, keepdim=True) / FLOAT8_MAX
    return {".weight": (matrix.float() / scales).to(torch.float8_e4m3fn), ".weight_scale": scales}


def fp8_by_block(matrix: Tensor, group_size: int) -> Parts:
    blocks = matrix.float().unflatten(1, (-1, FLOAT8_BLOCK)).unflatten(0, (-1, FLOAT8_BLOCK))
    scales = blocks.abs().amax(dim=(1, 3)) / FLOAT8_MAX
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return {".weight": codes.reshape(matrix.shape), ".weight_scale_inv": scales}


def llm_int8(matrix: Tensor, group_size: int) -> Parts:
    largest = matrix.float().abs().amax(dim=1)
    codes = (matrix.float() / largest[:, None] * 127).round_().to(torch.int8)
    return {".weight": codes, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}


def nf4(matrix: Tensor, group_size: int) -> Parts:
    blocks = matrix.float().reshape(-1, NF4_BLOCK)
    largest = blocks.abs().amax(dim=1)
    levels = torch.tensor(NF4_LEVELS)
    codes = torch.bucketize(blocks / largest[:, None], (levels[1:] + levels[:-1]) / 2).flatten().to(torch.uint8)
    state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": "bfloat16", "shape": list(matrix.shape)}
    return {
        ".weight": (codes[0::2] << 4 | codes[1::2])[:, None],
        ".weight.absmax": largest,
        ".weight.quant_map": levels,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _in_awq_order(codes: Tensor) -> Tensor:
    return codes.reshape(len(codes), -1, len(_AWQ_ORDER))[..., _AWQ_ORDER].flatten(1)


def _described_by(scheme: str, **fields: Any) -> Callable[[Path, int], None]:
    """Return what writes a scheme of compressed-tensors into config.json."""

    def write(directory: Path, group_size: int) -> None:
        describe(directory, scheme, **(fields | ({"group_size": group_size} if "w4" in scheme else {})))

    return write


def _described_as(method: str, **fields: Any) -> Callable[[Path, int], None]:
    """Return what writes another tool's description into config.json."""

    def write(directory: Path, group_size: int) -> None:
        config = json.loads((directory / "config.json").read_text())
        groups = {"group_size": group_size} if "bits" in fields else {}
        config["quantization_config"] = {"quant_method": method, **groups, **fields}
        (directory / "config.json").write_text(json.dumps(config))

    return write


# name -> how a matrix is packed, and what writes the format into config.json
SAFETENSORS: dict[str, tuple[Callable[[Tensor, int], Parts], Callable[[Path, int], None]]] = {
    "w4a16": (pack_quantized, _described_by("w4a16")),
    "w4a8": (pack_quantized, _described_by("w4a8")),
    "w8a8": (int_quantized, _described_by("w8a8")),
    "fp8": (fp8_by_row, _described_by("fp8_channel")),
    "gptq": (gptq, _described_as("gptq", bits=4, sym=False, desc_act=False)),
    "awq": (awq, _described_as("awq", bits=4, version="gemm", zero_point=True)),
    "fp8_block": (fp8_by_block, _described_as("fp8", weight_block_size=[FLOAT8_BLOCK, FLOAT8_BLOCK])),
    "llm_int8": (llm_int8, _described_as("bitsandbytes", load_in_8bit=True, load_in_4bit=False)),
    "nf4": (nf4, _described_as("bitsandbytes", load_in_8bit=False, load_in_4bit=True, bnb_4bit_quant_type="nf4")),
}


def write_safetensors(source: Path, target: Path, name: str) -> Path:
    """Write the checkpoint in `source`, one file of bfloat16, in a format of SAFETENSORS. Returns `target`.

    Embeddings, norms and the output head stay as they are.
    """
    pack, write_description = SAFETENSORS[name]
    target.mkdir(parents=True)
    for file in [*source.glob("*.json"), *source.glob("*.jinja")]:
        shutil.copy(file, target)
    group_size = group_size_of(json.loads((source / "config.json").read_text()))
    tensors: dict[str, Tensor] = {}
    with safe_open(source / "model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118 - it is no dictionary
            if _IN_A_LAYER.search(key):
                parts = pack(file.get_tensor(key), group_size)
                tensors |= {key.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
            else:
                tensors[key] = file.get_tensor(key)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    write_description(target, group_size)
    return target


# -- GGUF --------------------------------------------------------------------------------------------------------------


def write_gguf(source: Path, file: Path, type_of: Callable[[str, int, int, int], str]) -> Path:
    """Write the checkpoint of a Llama in `source`, one file of bfloat16, as a GGUF file. Returns `file`.

    `type_of` chooses the type of a matrix; it takes what `type_in_q4_k_m` takes. The file contains the tokenizer.json.
    """
    config = AutoConfig.from_pretrained(source)
    assert config.model_type == "llama"
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    with safe_open(source / "model.safetensors", "pt") as checkpoint:
        for key in checkpoint.keys():  # noqa: SIM118 - it is no dictionary
            array = checkpoint.get_tensor(key).float().numpy()
            for part, num_heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
                if part in key:
                    array = interleaved(array, num_heads)
            name = names.get_name(key.removesuffix(".weight"))
            assert name is not None
            if array.ndim == 1:
                tensors[f"{name}.weight"] = array, "F32"
                continue
            of_layer = _IN_A_LAYER.search(key)
            layer = int(of_layer[1]) if of_layer else 0
            type_name = type_of(name.rpartition(".")[2], layer, config.num_hidden_layers, array.shape[1])
            tensors[f"{name}.weight"] = blocks_of(array, type_name), type_name
    metadata = metadata_of(SimpleNamespace(config=config)) | tokenizer_metadata(source)  # type: ignore[arg-type]
    return write_file(file, metadata, tensors)


def write_q8_0(source: Path, file: Path) -> Path:
    return write_gguf(source, file, lambda *_: "Q8_0")


def write_q4_k_m(source: Path, file: Path) -> Path:
    return write_gguf(source, file, type_in_q4_k_m)


def tokenizer_metadata(source: Path) -> dict[str, Any]:
    """Return a checkpoint's tokenizer and its special tokens, as keys of a GGUF file."""
    whole = (source / "tokenizer.json").read_text()
    tokenizer, merges = Tokenizer.from_str(whole), json.loads(whole)["model"]["merges"]
    size, special = tokenizer.get_vocab_size(), tokenizer.get_added_tokens_decoder()
    config = json.loads((source / "config.json").read_text())
    described = source / "tokenizer_config.json"
    template = json.loads(described.read_text()).get("chat_template") if described.exists() else None
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokenizer.id_to_token(number) for number in range(size)],
        "tokenizer.ggml.token_type": [3 if number in special else 1 for number in range(size)],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": config.get("bos_token_id"),
        "tokenizer.ggml.eos_token_id": config.get("eos_token_id"),
        "tokenizer.huggingface.json": whole,
        "tokenizer.chat_template": template,
    }
