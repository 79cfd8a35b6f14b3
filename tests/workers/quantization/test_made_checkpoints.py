"""Claims about the checkpoints that tests and benchmarks make: their codes stand for the numbers they were made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.k_quants import blocks_of, type_in_q4_k_m
from tests.support.quantized_checkpoints import SAFETENSORS, write_q4_k_m, write_q8_0, write_safetensors
from workers.loading.checkpoint import quantization_config
from workers.quantization.formats.registry import format_of

# Of a matrix of normal numbers, whatever their scale: the error of rounding, relative to its norm.
ERRORS = {4: 0.13, 8: 0.03}


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", SAFETENSORS)
def test_codes_of_safetensors_stand_for_the_matrix(name: str, tmp_path: Path) -> None:
    pack, write_description = SAFETENSORS[name]
    matrix = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) / 50
    (tmp_path / "config.json").write_text("{}")
    write_description(tmp_path, 64)
    described = quantization_config(tmp_path)
    assert described is not None
    weight_format = format_of(described)
    tensors = pack(matrix, 64)
    layer = "model.layers.0.mlp.up_proj"
    assert weight_format.check(tensors, layer) == matrix.shape
    found = weight_format.read(tensors, layer).dequantize()
    assert relative_error(found, matrix) < ERRORS[8 if "8" in name and name != "w4a8" else 4]


@pytest.mark.parametrize(("type_name", "limit"), [("Q4_K", 0.09), ("Q6_K", 0.025), ("Q8_0", 0.01)])
@pytest.mark.parametrize("scale", [1.0, 0.02, 0.0])
def test_blocks_stand_for_the_matrix(type_name: str, limit: float, scale: float) -> None:
    """The package gguf, which is llama.cpp's, reads them."""
    matrix = (np.random.default_rng(0).normal(size=(8, 512)) * scale).astype(np.float32)
    blocks = blocks_of(matrix, type_name)
    numbers, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    assert blocks.dtype == np.uint8 and blocks.shape == (8, 512 // numbers * num_bytes)
    error = np.abs(dequantize(blocks, GGMLQuantizationType[type_name]) - matrix)
    assert float(np.linalg.norm(error)) <= limit * float(np.linalg.norm(matrix))


def test_half_of_some_matrices_get_six_bits() -> None:
    """llama.cpp's use_more_bits: the first and the last eighth of the layers, and each third one between them."""
    layers = [layer for layer in range(32) if type_in_q4_k_m("ffn_down", layer, 32, 4096) == "Q6_K"]
    assert layers == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert type_in_q4_k_m("attn_q", 0, 32, 4096) == "Q4_K"
    assert type_in_q4_k_m("ffn_down", 0, 32, 704) == "Q8_0" and type_in_q4_k_m("attn_q", 0, 32, 704) == "Q5_0"


def test_a_checkpoint_is_as_large_as_its_bits(tmp_path: Path) -> None:
    unquantized = (DEMO_MODEL_PATH / "model.safetensors").stat().st_size
    for name, share in (("w8a8", 0.59), ("w4a16", 0.4), ("gptq", 0.4), ("awq", 0.4)):
        path = write_safetensors(DEMO_MODEL_PATH, tmp_path / name, name)
        assert (path / "model.safetensors").stat().st_size == pytest.approx(share * unquantized, rel=0.1)
    for write, share in ((write_q8_0, 0.53), (write_q4_k_m, 0.37)):
        file = write(DEMO_MODEL_PATH, tmp_path / f"{write.__name__}.gguf")
        assert file.stat().st_size == pytest.approx(share * unquantized, rel=0.15)
