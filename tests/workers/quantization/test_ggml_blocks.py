"""Tests of ggml's blocks: what they mean is what llama.cpp's own Python package says."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from servekit.errors import ConfigError
from servekit.protocol.gguf_index import BLOCK_SIZES
from tests.support.gguf_files import HALVES, random_blocks
from workers.quantization import ggml_blocks
from workers.quantization.formats.gguf import BLOCK_TYPE, BLOCKS, ROWS, Gguf
from workers.quantization.ggml_blocks import BLOCK_TYPES, dequantize, unpack

GROUPS = {"Q2_K": 16, "Q3_K": 16, "Q6_K": 16}  # of the others: 32
FOUR_BITS = {"Q4_0", "Q4_1", "Q4_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"}


def oracle(type_name: str, blocks: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks, GGMLQuantizationType[type_name]))


def matrix(type_name: str, num_rows: int = 6, num_columns: int = 512) -> tuple[np.ndarray, torch.Tensor]:
    blocks = random_blocks(type_name, num_rows, num_columns)
    return blocks, torch.from_numpy(blocks)


def test_every_type_that_is_read_is_tested_here() -> None:
    packed = {name for name, (numbers, _) in BLOCK_SIZES.items() if numbers > 1}
    assert packed == set(BLOCK_TYPES) == set(HALVES)
    for name, sizes in BLOCK_SIZES.items():
        assert sizes == gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]


@pytest.mark.parametrize("type_name", sorted(BLOCK_TYPES))
def test_blocks_mean_what_llama_cpp_says(type_name: str) -> None:
    blocks, tensor = matrix(type_name)
    expected, unpacked = oracle(type_name, blocks), unpack(type_name, tensor)
    assert (unpacked.num_outputs, unpacked.num_inputs) == (6, 512)
    assert unpacked.encoding == ("int4" if type_name in FOUR_BITS else "int8")
    assert unpacked.group_size == GROUPS.get(type_name, 32)
    assert torch.equal(unpacked.dequantize(), expected)
    assert torch.equal(dequantize(type_name, tensor, torch.float32), unpacked.dequantize())


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0", "Q2_K"])
def test_a_matrix_is_unpacked_in_parts_that_fit_together(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tensor = matrix(type_name, 7)
    whole = unpack(type_name, tensor)
    monkeypatch.setattr(ggml_blocks, "NUMBERS_AT_ONCE", 1024)  # two rows
    parts = unpack(type_name, tensor)
    assert all(map(torch.equal, parts.row_tensors(), whole.row_tensors()))
    assert torch.equal(parts.dequantize(), whole.dequantize())


def of_type(type_name: str) -> torch.Tensor:
    return torch.tensor(list(type_name.encode()), dtype=torch.uint8)


def test_rows_are_put_into_the_order_that_is_given() -> None:
    _, blocks = matrix("Q4_K")
    rows = torch.tensor([3, 1, 0, 2, 5, 4])
    tensors = {BLOCKS: blocks, BLOCK_TYPE: of_type("Q4_K"), ROWS: rows}
    assert Gguf.from_config({}).check(tensors, "q") == (6, 512)
    expected = unpack("Q4_K", blocks).dequantize()[rows]
    assert torch.equal(Gguf().read(tensors, "q").dequantize(), expected)
    assert torch.equal(Gguf().dequantize(tensors, "q", torch.float32), expected)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({BLOCKS: torch.zeros(2, 144, dtype=torch.uint8)}, "blocks of type ''"),
        ({BLOCKS: torch.zeros(2, 144, dtype=torch.uint8), BLOCK_TYPE: of_type("Q9_K")}, "'Q9_K'"),
        ({BLOCKS: torch.zeros(2, 145, dtype=torch.uint8), BLOCK_TYPE: of_type("Q4_K")}, "a block has 144 bytes"),
        ({BLOCKS: torch.zeros(2, 144), BLOCK_TYPE: of_type("Q4_K")}, "a block has 144 bytes"),
        ({BLOCKS: torch.zeros(2, 144, dtype=torch.uint8), BLOCK_TYPE: of_type("Q4_K"), ROWS: torch.arange(3)}, "2 row"),
    ],
)
def test_tensors_that_contradict_each_other_are_refused(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gguf().check(tensors, "q")


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_scales_that_are_not_finite_are_refused(type_name: str) -> None:
    _, blocks = matrix(type_name)
    offset = HALVES[type_name][-1]
    blocks[2, offset : offset + 2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # infinity
    tensors = {BLOCKS: blocks, BLOCK_TYPE: of_type(type_name)}
    with pytest.raises(ConfigError, match="not finite"):
        Gguf().read(tensors, "q")
    with pytest.raises(ConfigError, match="not finite"):
        Gguf().dequantize(tensors, "q", torch.float32)
