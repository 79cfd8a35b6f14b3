"""Tests of reading pickled weights: every tensor arrives, and nothing else than tensors is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from servekit.errors import ConfigError
from workers.conversion.pickled_weights import convert_weights, find_pickled_weights

FILE = "pytorch_model.bin"


def converted(directory: Path) -> dict[str, Tensor]:
    output = directory / "out"
    output.mkdir()
    num_tensors, num_bytes, _ = convert_weights(find_pickled_weights(directory), output)
    tensors = load_file(output / "model.safetensors")
    assert (num_tensors, num_bytes) == (len(tensors), sum(tensor.nbytes for tensor in tensors.values()))
    return tensors


@pytest.mark.parametrize("is_zip", [True, False])
def test_all_tensors_are_written_as_they_are(tmp_path: Path, is_zip: bool) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    saved = {
        "embedding": matrix,
        "head": matrix,  # shares the embedding's memory
        "transposed": matrix.T,
        "row": matrix[1],
        "halves": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "buffer": torch.tensor([[True, False]]),
        "scalar": torch.tensor(7),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    }
    torch.save(saved, tmp_path / FILE, _use_new_zipfile_serialization=is_zip)
    tensors = converted(tmp_path)
    assert tensors.keys() == saved.keys()
    for name, tensor in saved.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)


def test_several_files_are_found_by_their_index(tmp_path: Path) -> None:
    files = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for number, file in enumerate(files):
        torch.save({f"tensor {number}": torch.full((2,), number)}, tmp_path / file)
    index = {"weight_map": {"tensor 0": files[0], "tensor 1": files[1]}}
    (tmp_path / f"{FILE}.index.json").write_text(json.dumps(index))
    assert {name: tensor.tolist() for name, tensor in converted(tmp_path).items()} == {
        "tensor 0": [0, 0],
        "tensor 1": [1, 1],
    }
    (tmp_path / files[1]).unlink()
    with pytest.raises(ConfigError, match=r"names pytorch_model-00002-of-00002\.bin, which does not exist"):
        find_pickled_weights(tmp_path)
    for name in ("../pytorch_model.bin", "model.safetensors"):
        (tmp_path / f"{FILE}.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(ConfigError, match="not a file of weights in this directory"):
            find_pickled_weights(tmp_path)


class _Attack:
    """Runs a command where it is unpickled without care."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self._command,)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_runs_a_command_is_refused_and_the_command_does_not_run(tmp_path: Path, is_zip: bool) -> None:
    trace = tmp_path / "ran"
    attack = {"weight": torch.ones(2), "other": _Attack(f"touch {trace}")}
    torch.save(attack, tmp_path / FILE, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(
        ConfigError, match=r"contains objects other than weights, so it is not read: .*system"
    ) as caught:
        converted(tmp_path)
    assert not trace.exists()
    assert len(caught.value.message) < 700


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "holds a list, and not tensors by name"),
        ({"epoch": 3, "model": {"weight": torch.ones(2)}}, "'epoch', which is a int and not a tensor"),
        ({"weight": torch.ones(2, 2).to_sparse()}, "sparse, quantized or empty tensor"),
        ({"weight": torch.ones(1).expand(2**40)}, r"4,398,046,511,104 bytes, which the files do not hold"),
        ({}, "holds no tensors"),
    ],
)
def test_what_is_no_model_is_refused_in_a_sentence(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / FILE)
    with pytest.raises(ConfigError, match=message):
        converted(tmp_path)


def test_a_damaged_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1000)}, tmp_path / FILE)
    content = (tmp_path / FILE).read_bytes()
    for index, damaged in enumerate((content[:-200], content[:100], b"", b"not a pickle", content[200:])):
        directory = tmp_path / str(index)
        directory.mkdir()
        (directory / FILE).write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin"):
            converted(directory)
