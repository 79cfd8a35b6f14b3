"""Tests of `servekit convert`: a checkpoint like facebook/opt-125m becomes one that is served with the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

from servekit.cli import main
from servekit.config import ServeConfig
from servekit.engine.conversion import run_conversion, tokenizer_job, weights_job
from servekit.engine.model_files import find_served_model
from servekit.engine.tokenizer import load_tokenizer
from servekit.engine.tokenizer_directory import with_tokenizer
from servekit.errors import ConfigError
from servekit.protocol.conversion_job import ConversionJob
from tests.support.inprocess import InProcessEngine, load
from tests.support.tiny_models import ARCHITECTURES, make_model

TEXTS = ["The sky is blue.", "Count from 3 to 9."]


def make_opt(directory: Path) -> PreTrainedModel:
    """Write a small checkpoint with the files of facebook/opt-125m: pickled weights, vocab.json and merges.txt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.model.save(str(directory))
    model_type, configuration = ARCHITECTURES["opt"]
    model = make_model(directory, model_type, {**configuration, "vocab_size": tokenizer.get_vocab_size()})
    (directory / "model.safetensors").unlink()
    # The names are those of 2022, without `model.` in front.
    weights = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    torch.save(weights, directory / "pytorch_model.bin")
    names = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def test_a_checkpoint_like_opt_125m_is_converted_and_served_with_the_same_tokens(
    tmp_path: Path,
) -> None:
    model = make_opt(tmp_path)
    with pytest.raises(ConfigError, match=f"run `servekit convert {tmp_path} OUT`"):
        find_served_model(ServeConfig(model=str(tmp_path)))
    output = tmp_path / "out"
    command = [sys.executable, "-m", "servekit", "convert", str(tmp_path), str(output)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert f"now run: servekit serve {output}" in ended.stderr
    written = {file.name for file in output.iterdir()}
    assert written >= {"config.json", "model.safetensors", "tokenizer.json", "vocab.json", "tokenizer_config.json"}
    assert not any(name.endswith(".bin") for name in written)
    assert find_served_model(ServeConfig(model=str(output))) == output
    (prompt,) = load_tokenizer(output).encode_blocking([TEXTS[0]])
    engine = InProcessEngine(load(output))
    sequence = engine.add(list(prompt), max_tokens=12, ignore_eos=True)
    engine.run()
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([list(prompt)]), do_sample=False, max_new_tokens=12, eos_token_id=[2**31],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        )  # fmt: skip
    assert sequence.output_token_ids == expected[0, len(prompt) :].tolist()


def test_what_cannot_be_converted_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: ConversionJob) -> None:
        raise ConfigError("pytorch_model.bin contains objects other")

    monkeypatch.setattr("servekit.engine.convert_command.run_conversion", refuse)
    model, output = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    assert main(["convert", str(model), str(output)]) == 2
    assert "there is nothing to convert" in capsys.readouterr().err
    (model / "pytorch_model.bin").touch()
    assert main(["convert", str(model), str(output)]) == 2
    assert "contains objects other" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    output.mkdir()
    (output / "mine").touch()
    assert main(["convert", str(model), str(output)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert main(["convert", "demo", str(tmp_path / "new")]) == 2
    assert "is neither a directory with pytorch_model*.bin" in capsys.readouterr().err


def test_a_model_gets_its_tokenizer_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[ConversionJob] = []

    def convert(job: ConversionJob) -> None:
        jobs.append(job)
        Path(job.output, "tokenizer.json").write_text("made")

    monkeypatch.setattr("servekit.engine.tokenizer_directory.run_conversion", convert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    assert with_tokenizer(model) == model, "there is nothing that it could be made of"
    (model / "vocab.json").touch()
    directory = with_tokenizer(model)
    assert (directory / "tokenizer.json").read_text() == "made"
    assert (directory / "config.json").resolve() == model / "config.json"
    assert not (model / "tokenizer.json").exists()
    assert with_tokenizer(model) == with_tokenizer(directory) == directory
    assert len(jobs) == 1, "it was there already"
    (model / "vocab.json").write_text("{}")
    changed = with_tokenizer(model)
    assert len(jobs) == 2, "its files have changed"
    assert changed != directory and directory.exists(), "a server may run with it"
    young, old = (directory.parent / f"incomplete-{name}" for name in ("young", "old"))
    young.mkdir()
    old.mkdir()
    two_days_ago_s = time.time() - 2 * 86_400
    for path in (directory, changed, old):
        os.utime(path, (two_days_ago_s, two_days_ago_s))
    assert with_tokenizer(model) == changed
    (model / "vocab.json").write_text("{ }")
    with_tokenizer(model)
    assert not directory.exists() and not old.exists(), "no server started with it for a day"
    assert changed.exists() and young.exists()


def test_a_link_to_a_file_that_is_gone_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").touch()
    (tmp_path / "merges.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"cannot read .*merges\.txt: No such file or directory; .* download"):
        with_tokenizer(tmp_path)


def test_a_conversion_ends_at_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped, and one that is killed, stand for files that take too long or too much."""

    def run(code: str) -> str:
        monkeypatch.setattr("servekit.engine.conversion.sys.executable", str(_program(tmp_path, code)))
        started_s = time.monotonic()
        job: Any = tokenizer_job(tmp_path, tmp_path)
        with pytest.raises(ConfigError) as caught:
            run_conversion(replace(job, cpu_s=0.1))
        assert time.monotonic() - started_s < 30
        return caught.value.message

    assert "took more than 1.0 s to convert, which is the limit" in run("sleep 60")
    assert "the process was killed; it may use 0.1 s" in run("kill -KILL $$")
    assert "the process crashed (SIGSEGV)" in run("kill -SEGV $$")
    assert "the process ended with code 3" in run("exit 3")


def _program(directory: Path, code: str) -> Path:
    program = directory / "program"
    program.write_text(f"#!/bin/sh\n{code}\n")
    program.chmod(0o700)
    return program


def test_the_process_gets_no_tokens_and_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "HF_TOKEN",
        "SERVEKIT_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "OPENAI_API_KEY",
        "PGPASSWORD",
    )
    for name in names:
        monkeypatch.setenv(name, "secret")
    seen = tmp_path / "seen"
    monkeypatch.setattr("servekit.engine.conversion.sys.executable", str(_program(tmp_path, f"env > {seen}")))
    with pytest.raises(ConfigError):
        run_conversion(tokenizer_job(tmp_path, tmp_path))
    assert "secret" not in seen.read_text() and "HF_HUB_OFFLINE=1" in seen.read_text()


def test_the_process_is_alone_in_its_session_and_starts_no_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "4")
    code = f"env > {tmp_path / 'seen'}; cut -d ' ' -f 1,6 /proc/$$/stat > {tmp_path / 'session'}"
    monkeypatch.setattr("servekit.engine.conversion.sys.executable", str(_program(tmp_path, code)))
    with pytest.raises(ConfigError):
        run_conversion(tokenizer_job(tmp_path, tmp_path))
    assert "OMP_NUM_THREADS=1\n" in (seen := (tmp_path / "seen").read_text()) and "OPENBLAS_NUM_THREADS=1\n" in seen
    pid, session = (tmp_path / "session").read_text().split()
    assert pid == session, "so it has no terminal, into which it could type"


def test_what_the_process_writes_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "head -c 50000000 /dev/zero; head -c 50000000 /dev/zero >&2"
    monkeypatch.setattr("servekit.engine.conversion.sys.executable", str(_program(tmp_path, code)))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="could not be converted"):
            run_conversion(tokenizer_job(tmp_path, tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_a_full_disk_is_reported_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files stands for a full disk."""
    model, output = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    output.mkdir()
    make_opt(model)
    code = f'ulimit -f 1; exec {sys.executable} "$@"'
    monkeypatch.setattr("servekit.engine.conversion.sys.executable", str(_program(tmp_path, code)))
    for job in (tokenizer_job(model, output), weights_job(model, output, [model / "pytorch_model.bin"], False)):
        with pytest.raises(ConfigError, match=r"nothing more can be written: .*File too large"):
            run_conversion(job)
