"""Tests of the fingerprint of a model's files: what changes it, and what does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from servekit.errors import ConfigError
from workers.loading.fingerprint import fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    tensors = {"a": np.arange(100_000, dtype=np.float32), "b": np.zeros((3, 4), np.float32)}
    save_file(tensors, path / "model.safetensors")
    return path


def test_a_copy_in_another_place_has_the_same(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert fingerprint(tmp_path / "copy", True) == fingerprint(model, True)
    assert len(fingerprint(model, True)) == 64


def test_other_weights_of_the_same_shapes_have_another(model: Path) -> None:
    before = fingerprint(model, True)
    tensors = {"a": np.arange(100_000, dtype=np.float32) * 1.001, "b": np.zeros((3, 4), np.float32)}
    save_file(tensors, model / "model.safetensors")
    assert fingerprint(model, True) != before


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_another_configuration_or_tokenizer_has_another(model: Path, name: str) -> None:
    before = fingerprint(model, True), fingerprint(model, False)
    (model / name).write_text('{"changed": true}')
    after = fingerprint(model, True), fingerprint(model, False)
    assert before[0] != after[0] and before[1] != after[1]


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, (50).to_bytes(8, "little") + b"x" * 50])
def test_weights_that_are_no_safetensors_are_refused(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        fingerprint(model, True)
