"""Tests of the reader of GGUF headers: what it reads is what was written, and a damaged file is refused."""

from __future__ import annotations

import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from servekit.errors import ConfigError
from servekit.gguf.directory import directory_of
from servekit.gguf.header import MAX_ARRAY_ELEMENTS, MAX_KEYS, MAX_TENSORS, TYPE_NAMES, read_header
from tests.support.gguf_files import random_blocks, write_file

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["<s>", "é", ""],
    "tokenizer.ggml.scores": [0.0, -1.5, 2.0],
    "tokenizer.ggml.token_type": [3, 1, 1],
    "tokenizer.ggml.add_bos_token": False,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {
        "token_embd.weight": (np.arange(6, dtype=np.float32).reshape(3, 2), "F32"),
        "blk.0.attn_q.weight": (random_blocks("Q4_K", 4, 256), "Q4_K"),
        "output_norm.weight": (np.ones(2, np.float16), "F16"),
    }
    return write_file(tmp_path / "model.gguf", METADATA, tensors)


def test_a_file_reads_as_llama_cpp_reads_it(file: Path) -> None:
    header, expected = read_header(file), gguf.GGUFReader(file)
    assert header.metadata == METADATA
    assert len(header.tensors) == len(expected.tensors) == 3
    for tensor in expected.tensors:
        found = header.tensors[tensor.name]
        assert (found.type, found.offset) == (tensor.tensor_type.name, tensor.data_offset)
        assert list(found.shape) == tensor.shape.tolist()[::-1]


def test_types_have_the_names_that_ggml_gives_them() -> None:
    assert {int(number): number.name for number in gguf.GGMLQuantizationType} == TYPE_NAMES


def kinds_of_values() -> dict[str, tuple[str, object, gguf.GGUFValueType]]:
    numbers = {"UINT8": 255, "INT8": -128, "UINT16": 65535, "INT16": -5, "UINT32": 2**32 - 1, "INT32": -(2**31)}
    numbers |= {"UINT64": 2**64 - 1, "INT64": -(2**63), "FLOAT32": 0.5, "FLOAT64": 0.1, "BOOL": True, "STRING": "é"}
    return {name: (f"x.{name}", value, gguf.GGUFValueType[name]) for name, value in numbers.items()}


def test_every_type_of_value_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value, kind in kinds_of_values().values():
        writer.add_key_value(key, value, kind)
        writer.add_key_value(f"{key}.array", [value, value], gguf.GGUFValueType.ARRAY, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_header(tmp_path / "model.gguf").metadata
    for key, value, _ in kinds_of_values().values():
        assert metadata[key] == value and metadata[f"{key}.array"] == [value, value]


def refused(file: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_header(file)
    assert len(caught.value.message) < 1000


def test_a_file_that_ends_anywhere_is_refused(file: Path) -> None:
    content = file.read_bytes()
    for end in [*range(0, 400, 7), *range(400, len(content) - 40, 61), len(content) - 40]:
        file.write_bytes(content[:end])
        refused(file, "truncated|does not begin with GGUF")


CHANGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another magic": (lambda content: b"GGML" + content[4:], "does not begin with GGUF"),
    "version 1": (lambda content: content[:4] + struct.pack("<I", 1) + content[8:], "version 1 of GGUF"),
    "big-endian": (lambda content: content[:4] + struct.pack(">I", 3) + content[8:], "big-endian"),
    "many tensors": (lambda content: content[:8] + struct.pack("<Q", 2**63) + content[16:], f"at most {MAX_TENSORS}"),
    "many keys": (lambda content: content[:16] + struct.pack("<Q", 2**40) + content[24:], f"at most {MAX_KEYS}"),
    "a long key": (lambda content: content[:24] + struct.pack("<Q", 2**62) + content[32:], "text of 4611686018427"),
    "another tensor type": (lambda content: with_type(content, 16), "IQ2_XXS, which servekit does not read.*Q4_K_M"),
    "an unknown tensor type": (lambda content: with_type(content, 99), "type number 99"),
}


def with_type(content: bytes, number: int) -> bytes:
    """Change the type of blk.0.attn_q.weight, which has two dimensions."""
    position = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    return content[:position] + struct.pack("<I", number) + content[position + 4 :]


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_is_not_what_it_claims_is_refused(file: Path, name: str) -> None:
    change, message = CHANGES[name]
    file.write_bytes(change(file.read_bytes()))
    refused(file, message)


def test_an_array_that_claims_many_elements_takes_no_memory(file: Path) -> None:
    content = file.read_bytes()
    position = content.index(b"tokenizer.ggml.scores") + len(b"tokenizer.ggml.scores") + 8
    for count in (MAX_ARRAY_ELEMENTS, 2**62, 2**64 - 1):
        file.write_bytes(content[:position] + struct.pack("<Q", count) + content[position + 8 :])
        refused(file, "truncated|arrays of more than")


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    ones = np.ones((2, 64), np.float32)
    file = write_file(tmp_path / "model.gguf", METADATA, {"a": (ones, "F32"), "b": (ones, "F32")})
    content = file.read_bytes()
    position = content.rindex(struct.pack("<Q", 512))  # b's offset
    file.write_bytes(content[:position] + struct.pack("<Q", 256) + content[position + 8 :])
    refused(file, "overlap, among them 'b'")


def test_tampered_files_are_read_or_refused_at_once(file: Path) -> None:
    content, rng = file.read_bytes(), random.Random(3)
    end = content.index(b"output_norm.weight") + 64  # of the header
    outcomes: set[str] = set()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s = time.process_time()
    for _ in range(1500):
        tampered = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            position = rng.randrange(end)
            match rng.randrange(4):
                case 0:
                    tampered[position] = rng.randrange(256)
                case 1:
                    tampered[position : position + 8] = rng.choice([2**64 - 1, 2**63, 2**32, 2**20, 0]).to_bytes(
                        8, "little"
                    )
                case 2:
                    del tampered[position : position + rng.randrange(1, 40)]
                case 3:
                    tampered[position:position] = bytes(tampered[position : position + rng.randrange(1, 40)])
        file.write_bytes(tampered)
        try:
            read_header(file)
            outcomes.add("read")
        except ConfigError as error:
            outcomes.add("refused" if len(error.message) < 1000 else error.message)
    assert outcomes == {"read", "refused"}
    assert time.process_time() - started_s < 60, "a thousandth of it for each file"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 256, "MiB, for all of them"


def test_a_file_that_is_missing_or_not_readable_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere.gguf", "cannot read .*nowhere")
    with pytest.raises(ConfigError, match="No such file"):
        directory_of(tmp_path / "nowhere.gguf")
