"""Claims about written checkpoints: they are whole or absent, and their files have what was given."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from servekit.errors import ConfigError
from workers.compression.checkpoint_writer import CheckpointWriter, copy_companions, new_directory
from workers.loading.checkpoint import find_weights


def tensors(num: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layer.{index}.weight": torch.randn(10, 100) for index in range(num)}  # 4,000 bytes each


@pytest.mark.parametrize(("shard_bytes", "num_files"), [(10**6, 1), (8500, 3), (100, 5)])
def test_tensors_are_in_as_many_files_as_their_size_needs(tmp_path: Path, shard_bytes: int, num_files: int) -> None:
    writer = CheckpointWriter(tmp_path, shard_bytes)
    for name, tensor in tensors().items():
        writer.add(name, tensor)
    writer.finish()
    files = find_weights(tmp_path)
    assert len(files) == writer.num_files == num_files and writer.num_bytes == 20_000
    assert sorted(tmp_path.glob("*.safetensors")) == files
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == tensors().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())
    if num_files > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 20_000 and index["weight_map"].keys() == found.keys()
        assert files[0].name == f"model-00001-of-{num_files:05}.safetensors"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, OSError])
def test_nothing_is_left_of_a_directory_that_was_not_finished(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with new_directory(tmp_path / "out") as directory:
            (directory / "half").write_text("half")
            raise error

    with pytest.raises(ConfigError if error is OSError else error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_finished_directory_has_the_name_and_the_permissions_of_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    for name in ("new", "empty"):
        if name == "empty":
            (tmp_path / name).mkdir()
        with new_directory(tmp_path / name) as directory:
            assert not (tmp_path / name / "file").exists()
            (directory / "file").write_text("all")
        assert (tmp_path / name / "file").read_text() == "all"
        assert (tmp_path / name).stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert sorted(os.listdir(tmp_path)) == ["empty", "new", "plain"]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_exists_is_never_written_over(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    match kind:
        case "file":
            out.write_text("mine")
        case "folder":
            out.mkdir()
            (out / "mine").write_text("mine")
        case "link":
            out.symlink_to(tmp_path / "nowhere")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigError, match="exists and is not empty"), new_directory(out):
        raise AssertionError
    assert sorted(os.listdir(tmp_path)) == before


def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing can be written"), new_directory(tmp_path / "none" / "out"):
        raise AssertionError


def test_tokenizer_and_templates_are_copied_and_weights_and_programs_are_not(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    out.mkdir()
    copied = [
        "LICENSE",
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
        "tokenizer.json",
        "tokenizer.model",
    ]
    others = ["config.json", "model.safetensors", "model.safetensors.index.json", "modeling.py", "pytorch_model.bin"]
    for name in [*copied, *others]:
        (model / name).write_text(name)
    copy_companions(model, out)
    assert sorted(os.listdir(out)) == sorted(copied)
