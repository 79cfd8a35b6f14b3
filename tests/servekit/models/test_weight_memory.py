"""How much memory weights take, by the headers of their files."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from servekit.config import ServeConfig
from servekit.models.read_file import PROCESS_BYTES, estimated_bytes
from servekit.models.weight_memory import weight_bytes

SHAPES = {
    "model.embed_tokens.weight": [100, 64],
    "model.norm.weight": [64],
    "model.layers.0.mlp.up_proj.weight": [1000, 64],
    "model.layers.0.mlp.experts.0.up_proj.weight": [10, 64],
    "lm_head.weight": [100, 64],
}
EMBEDDING, NORM, MATRIX, EXPERT, HEAD = map(prod, SHAPES.values())


def write_file(file: Path, shapes: dict[str, list[int]] = SHAPES, dtype: str = "BF16", num_bytes: int = 2) -> None:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        begin, end = end, end + num_bytes * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}  # type: ignore[dict-item]
    content = json.dumps(header).encode()
    file.write_bytes(len(content).to_bytes(8, "little") + content)


@pytest.mark.parametrize(
    ("quantization", "group_size", "matrix_bits"),
    [(None, None, 16), ("int8", None, 8), ("fp8", None, 8), ("int4", None, 4.5), ("w4a8", 128, 4.25), ("nf4", 32, 4.5)],
)
def test_quantized_matrices_take_their_bits_and_all_else_its_numbers(
    tmp_path: Path, quantization: str | None, group_size: int | None, matrix_bits: float
) -> None:
    write_file(tmp_path / "model.safetensors")
    head_bits = 16 if quantization is None else 8
    bits = 16 * (EMBEDDING + NORM + EXPERT) + head_bits * HEAD + matrix_bits * MATRIX
    assert weight_bytes(tmp_path, None, quantization, group_size) == bits / 8


def test_tied_embedding_has_the_bits_of_the_head(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    write_file(tmp_path / "model.safetensors", shapes)
    assert weight_bytes(tmp_path, None, "int8", None) == EMBEDDING + MATRIX + 2 * (NORM + EXPERT)
    write_file(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert weight_bytes(tmp_path, None, "int8", None) == EMBEDDING + MATRIX + HEAD + 2 * (NORM + EXPERT)


def test_numbers_become_longer_on_a_cpu_and_codes_of_a_quantized_checkpoint_do_not(tmp_path: Path) -> None:
    write_file(tmp_path / "model-1.safetensors")
    write_file(tmp_path / "model-2.safetensors", {"codes": [50, 10]}, "I32", 4)
    write_file(tmp_path / "consolidated.safetensors")
    (tmp_path / "other.gguf").write_bytes(b"x" * 7)
    assert weight_bytes(tmp_path, 4, None, None) == 4 * (EMBEDDING + NORM + MATRIX + EXPERT + HEAD) + 2000 + 7


@pytest.mark.parametrize("content", [b"", b"x" * 9, b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]"])
def test_file_without_a_header_counts_with_its_size(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weight_bytes(tmp_path, 4, None, None) == len(content)


def test_estimate_of_a_model_counts_the_bits_of_its_quantization() -> None:
    def weights(**settings: str) -> int:
        config = ServeConfig(model="demo", device="cpu", kv_cache_memory_bytes=10, **settings)  # type: ignore[arg-type]
        estimate = estimated_bytes(config)
        assert estimate is not None
        return estimate - PROCESS_BYTES - 10

    assert weights() == weights(dtype="float32") == 2 * weights(dtype="bfloat16")
    assert weights(quantization="int4") < 0.3 * weights(dtype="bfloat16") * 2
    assert weights(quantization="int8") < 0.6 * weights(dtype="bfloat16")
