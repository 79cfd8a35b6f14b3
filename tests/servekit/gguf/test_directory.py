"""Tests of the directory that is made of a GGUF file: once, whole, and again if the file has changed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from servekit.engine.model_files import find_chat_template, find_model
from servekit.engine.tokenizer import load_tokenizer
from servekit.errors import ConfigError
from servekit.gguf import directory
from servekit.gguf.directory import directory_of
from servekit.protocol.gguf_index import INDEX, WEIGHTS, GgufIndex
from tests.support.gguf_files import tokenizer_metadata, write_file

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.context_length": 100,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    **tokenizer_metadata(160),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "servekit" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "model.gguf")


def written(path: Path, context: int = 100) -> Path:
    rows = np.zeros((160, 32), np.float32)
    return write_file(path, METADATA | {"llama.context_length": context}, {"token_embd.weight": (rows, "F32")})


def context_of(made: Path) -> int:
    config: dict[str, int] = msgspec.json.decode((made / "config.json").read_bytes())
    return config["max_position_embeddings"]


def test_the_directory_has_what_a_checkpoint_has(file: Path, cache: Path) -> None:
    made = directory_of(file)
    assert made.parent == cache
    assert (made / WEIGHTS).resolve() == file
    assert context_of(made) == 100
    index = msgspec.json.decode((made / INDEX).read_bytes(), type=GgufIndex)
    assert list(index.tensors) == ["model.embed_tokens.weight"]
    load_tokenizer(made).close()
    assert find_chat_template(made).source == METADATA["tokenizer.chat_template"]
    assert list(cache.iterdir()) == [made], "nothing incomplete is left"


def test_a_file_is_read_once_until_it_changes(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = directory_of(file)
    link = tmp_path / "link.gguf"
    link.symlink_to(file)
    with monkeypatch.context() as patched:
        patched.setattr(directory, "read_header", None)  # a call would raise
        assert directory_of(file) == directory_of(link) == made
    written(file, 200)
    os.utime(file, ns=(1, 1))
    os.utime(made, ns=(1, 1))  # no server has started with it for a day
    changed = directory_of(file)
    assert context_of(changed) == 200
    assert list(cache.iterdir()) == [changed], "the old directory is removed"


def test_two_servers_may_make_it_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[Path] = []
    rename = os.rename

    def rename_later(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        first.append(directory_of(file))  # the other server is faster
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_later)
    assert directory_of(file) == first[0]


def test_a_model_is_named_by_the_file_or_by_the_folder_of_one(file: Path, tmp_path: Path) -> None:
    made = directory_of(file)
    assert find_model(str(file)) == find_model(str(file.parent)) == made == find_model(str(made))
    written(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=r"2 GGUF files, among them model\.gguf, other\.gguf; give the path of one"):
        find_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert find_model(str(tmp_path)) == tmp_path, "safetensors come first"


def test_a_folder_that_cannot_be_written_is_named_with_the_setting(file: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.touch()
    with pytest.raises(ConfigError, match="--cache-dir"):
        directory_of(file)


def test_a_file_that_cannot_be_served_leaves_nothing(file: Path, cache: Path) -> None:
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ConfigError, match="truncated"):
        directory_of(file)
    assert not cache.exists()


def test_tampered_files_are_made_directories_or_refused(file: Path) -> None:
    """A few bytes of the header are changed: numbers, types, lengths, names. Nothing but ConfigError may come of it."""
    content, rng = file.read_bytes(), random.Random(5)
    end = content.index(b"token_embd.weight") + 60
    counts = [position for position in range(end) if rng.random() < 0.02 or position < 900]
    outcomes = set()
    for _ in range(800):
        tampered = bytearray(content)
        for _ in range(rng.randrange(1, 3)):
            tampered[rng.choice(counts)] = rng.choice([0, 1, 2, 4, 6, 8, 9, 127, 255, rng.randrange(256)])
        file.write_bytes(tampered)
        try:
            directory_of(file)
            outcomes.add("made")
        except ConfigError as error:
            outcomes.add("refused" if len(error.message) < 1000 else error.message)
    assert outcomes == {"made", "refused"}
