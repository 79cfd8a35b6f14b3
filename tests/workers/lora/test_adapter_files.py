"""Adapters that cannot be served are refused in a sentence, soon, and before their numbers are read."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from servekit.errors import ConfigError
from workers.lora.adapter_files import CONFIG, WEIGHTS, ModuleShape, file_state, fingerprint, read_adapter

MODULE = "model.layers.0.self_attn.q_proj"
MODULES = {MODULE: ModuleShape(32, 16)}
KEY = f"base_model.model.{MODULE}.lora_"


def write(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    (directory / CONFIG).write_text(json.dumps(fields))
    pair = {f"{KEY}A.weight": torch.ones(4, 32), f"{KEY}B.weight": torch.ones(16, 4)}
    save_file(pair if tensors is None else tensors, directory / WEIGHTS)
    return directory


def read(directory: Path) -> Any:
    return read_adapter(directory, MODULES, max_rank=8)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 12}}, 3.0),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 12}}, 3.0),
        ({"alpha_pattern": {"j_proj": 12, "k_proj": 3}}, 2.0),
        ({"r": 2, "rank_pattern": {"q_proj": 4}}, 2.0),
    ],
)
def test_the_scale_is_in_b(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    matrices = read(write(tmp_path, **config))[MODULE]
    assert matrices.a.shape == (4, 32)
    assert torch.equal(matrices.b, torch.full((16, 4), scale))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "IA3"}, "only LORA is served"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "bias of its own"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"trainable_token_indices": [1]}, "embeddings"),
        ({"r": 9}, "takes 1 to 8"),
        ({"r": 0}, "takes 1 to 8"),
        ({"r": 3}, "has another rank"),
        ({"r": "4"}, "not an adapter's configuration"),
        ({"lora_alpha": 1e300}, "below a million"),
        ({"init_lora_weights": "PiSSA_niter_16"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "corda"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "lora_ga"}, "path_initial_model_for_weight_conversion"),
        ({"rank_pattern": {"(a+)+$": 4}}, "regular expression"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(write(tmp_path, **config))


A, B = torch.ones(4, 32), torch.ones(16, 4)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({f"{KEY}A.weight": A}, "only one of lora_A and lora_B"),
        ({f"{KEY}A.weight": A, f"{KEY}B.weight": torch.ones(17, 4)}, "of another model"),
        ({f"{KEY}A.weight": A[:, :31].contiguous(), f"{KEY}B.weight": B}, "of another model"),
        ({f"{KEY}A.weight": A[0], f"{KEY}B.weight": B}, "of another model"),
        ({f"{KEY}A.weight": A, f"{KEY}B.weight": B, f"{KEY}magnitude_vector": torch.ones(16)}, "no magnitudes"),
        ({"base_model.model.lm_head.lora_A.weight": A, "base_model.model.lm_head.lora_B.weight": B}, "no linear layer"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": A}, "no embeddings"),
        ({"model.layers.0.self_attn.q_proj.weight": A}, "only lora_A and lora_B"),
        ({f"{KEY}A.weight": A.to(torch.int8), f"{KEY}B.weight": B}, "stored as I8"),
        ({f"{KEY}A.weight": A * torch.inf, f"{KEY}B.weight": B}, "not finite"),
        ({f"{KEY}A.weight": A, f"{KEY}B.weight": B * torch.nan}, "not finite"),
        ({}, "no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(write(tmp_path, tensors))


def _huge_header(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes((2**40).to_bytes(8, "little") + b"{}")


def _long_header(directory: Path) -> None:
    header = b"{" + b" " * (9 * 2**20) + b"}"
    (directory / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)


def _pipe(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    os.mkfifo(directory / WEIGHTS)


def _pipe_as_config(directory: Path) -> None:
    (directory / CONFIG).unlink()
    os.mkfifo(directory / CONFIG)


def _deep_config(directory: Path) -> None:
    (directory / CONFIG).write_text('{"x":' + "[" * 500_000)


def _large_config(directory: Path) -> None:
    (directory / CONFIG).write_text('{"x": "' + "a" * 2**21 + '"}')


def _no_object(directory: Path) -> None:
    (directory / CONFIG).write_text("[1]")


def _empty(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes(b"")


def _beyond_the_end(directory: Path) -> None:
    header = json.dumps({f"{KEY}A.weight": {"dtype": "F32", "shape": [2**40, 32], "data_offsets": [0, 2**47]}})
    (directory / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header.encode())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_huge_header, "its header has more than"),
        (_long_header, "its header has more than"),
        (_pipe, "has no adapter_model.safetensors"),
        (_pipe_as_config, "there is no file adapter_config.json"),
        (_deep_config, "not an adapter's configuration"),
        (_large_config, "are allowed"),
        (_no_object, "not an adapter's configuration"),
        (_empty, "not a safetensors file"),
        (_beyond_the_end, "cannot be read"),
    ],
)
def test_hostile_files_are_refused_within_a_second(tmp_path: Path, damage: Any, reason: str) -> None:
    damage(write(tmp_path))
    started = time.monotonic()
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path)
    assert time.monotonic() - started < 1.0


def test_files_that_are_written_anew_are_in_another_state(tmp_path: Path) -> None:
    before = file_state(write(tmp_path))
    assert file_state(tmp_path) == before
    write(tmp_path, r=3)
    assert file_state(tmp_path) != before
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match="holds no adapter: adapter_model"):
        file_state(tmp_path)


def test_a_copy_on_another_machine_has_the_same_fingerprint_and_whatever_computes_otherwise_another(
    tmp_path: Path,
) -> None:
    first = fingerprint(read(write(tmp_path)))
    copied = shutil.copytree(tmp_path, tmp_path / "copy")
    assert file_state(copied) != file_state(tmp_path) and fingerprint(read(copied)) == first
    tensors = {f"{KEY}A.weight": A, f"{KEY}B.weight": B}
    changed = {f"{KEY}A.weight": A, f"{KEY}B.weight": B.clone().index_fill_(0, torch.tensor([0]), 0.5)}
    others = [write(tmp_path, changed), write(tmp_path / "scaled", tensors, lora_alpha=7)]
    assert len({first, *(fingerprint(read(other)) for other in others)}) == 3


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_files_that_may_not_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write(tmp_path)

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *args, **kwargs)

    for method in ("open", "stat"):
        original = getattr(Path, method)
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refuse)
            with pytest.raises(ConfigError, match="Permission denied"):
                read(tmp_path)


def test_a_path_that_the_system_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="File name too long"):
        read(Path("/" + "a" * 300))


def test_files_from_before_1970_have_a_state(tmp_path: Path) -> None:
    new = file_state(write(tmp_path))
    os.utime(tmp_path / WEIGHTS, (-1, -1))
    assert file_state(tmp_path) != new


def test_numbers_that_the_data_type_of_the_model_does_not_hold_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {f"{KEY}A.weight": A, f"{KEY}B.weight": B * 4e4})  # twice that, with the scale
    read(tmp_path)
    with pytest.raises(ConfigError, match="not finite in float16"):
        read_adapter(tmp_path, MODULES, 8, torch.float16)
