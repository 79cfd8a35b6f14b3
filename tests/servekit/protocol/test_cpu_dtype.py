"""`--dtype auto` is bfloat16 on a CPU exactly where the checkpoint has it and the processor multiplies it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol import cpu_dtype as module
from servekit.protocol.cpu_dtype import cpu_dtype, multiplies_bfloat16, read_stored_numbers
from servekit.protocol.gguf_index import WEIGHTS


def test_the_processor_multiplies_bfloat16_as_torch_finds() -> None:
    assert multiplies_bfloat16() == torch.cpu._is_avx512_bf16_supported()


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", None])
def test_only_what_is_stored_as_bfloat16_is_computed_in_it(
    stored: str | None, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda: multiplies)
    assert cpu_dtype(stored) == ("bfloat16" if stored == "bfloat16" and multiplies else "float32")


@pytest.mark.parametrize(
    ("config", "stored", "computed"),
    [
        ({"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"torch_dtype": "float16"}, "float16", "float32"),
        ({"model_type": "gemma3", "text_config": {"dtype": "bfloat16"}}, "bfloat16", "bfloat16"),
        ({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, "float32", "float32"),
        ({"dtype": "bfloat16", "quantization_config": {"quant_method": "gptq"}}, "bfloat16", "float32"),
        ({"dtype": "bfloat16", "servekit_cpu_dtype": "float32"}, "bfloat16", "float32"),
        ({}, None, "float32"),
        ({"dtype": 3}, None, "float32"),
    ],
)
def test_the_configuration_says_how_numbers_are_stored(
    config: Any, stored: str | None, computed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda: True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_stored_numbers(tmp_path)
    assert (found.type, found.cpu_dtype) == (stored, computed)


def test_gguf_files_are_computed_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda: True)
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    assert read_stored_numbers(tmp_path).cpu_dtype == "bfloat16"
    (tmp_path / WEIGHTS).touch()
    assert read_stored_numbers(tmp_path).cpu_dtype == "float32"


def test_no_configuration_says_nothing(tmp_path: Path) -> None:
    assert read_stored_numbers(tmp_path).type is None


def test_the_demo_model_is_exact_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda: True)
    found = read_stored_numbers(DEMO_MODEL_PATH)
    assert (found.type, found.cpu_dtype) == ("bfloat16", "float32")
