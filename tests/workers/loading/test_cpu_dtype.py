"""A checkpoint of bfloat16 is computed in it where the processor can, and in float32 where the operator wants it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol import cpu_dtype
from tests.support.tiny_models import ARCHITECTURES, make_model
from workers.layers.linear import can_pack
from workers.loading.model_config import read_config
from workers.loading.model_manager import ModelManager


@pytest.fixture
def stored_in_bfloat16(tmp_path: Path) -> Path:
    make_model(tmp_path, *ARCHITECTURES["llama"]).to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this build of torch packs no bfloat16")
def test_bfloat16_is_computed_where_the_processor_multiplies_it(
    stored_in_bfloat16: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "servekit.worker")
    monkeypatch.setattr(cpu_dtype, "multiplies_bfloat16", lambda: True)
    loaded = ModelManager("cpu").load(stored_in_bfloat16, "auto", None)
    assert loaded.dtype is torch.bfloat16
    assert "computing in bfloat16, the checkpoint's data type; --dtype float32 gives exact tokens" in caplog.text
    assert ModelManager("cpu").load(stored_in_bfloat16, "float32", None).dtype is torch.float32


def test_float32_is_computed_where_it_does_not(stored_in_bfloat16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_dtype, "multiplies_bfloat16", lambda: False)
    assert ModelManager("cpu").load(stored_in_bfloat16, "auto", None).dtype is torch.float32


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this build of torch packs no bfloat16")
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("multiplies", [True, False])
def test_ranks_compute_in_bfloat16_only_if_all_of_them_can(
    multiplies: bool, others: int, stored_in_bfloat16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_dtype, "multiplies_bfloat16", lambda: multiplies)
    ranks: Any = SimpleNamespace(minimum=lambda value: min(value, others))
    dtype = ModelManager("cpu")._resolve_dtype("auto", read_config(stored_in_bfloat16), False, ranks)
    assert dtype is (torch.bfloat16 if multiplies and others else torch.float32)


@pytest.mark.parametrize("multiplies", [True, False])
def test_float32_files_and_quantized_weights_are_computed_in_float32(
    multiplies: bool, stored_in_bfloat16: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "servekit.worker")
    monkeypatch.setattr(cpu_dtype, "multiplies_bfloat16", lambda: multiplies)
    quantized = ModelManager("cpu").load(stored_in_bfloat16, "auto", None, quantization="int8")
    assert quantized.dtype is torch.float32
    says_why = "computing in float32, because the weights are quantized" in caplog.text
    assert says_why == (multiplies and can_pack(torch.bfloat16))
    make_model(stored_in_bfloat16, *ARCHITECTURES["llama"])
    assert ModelManager("cpu").load(stored_in_bfloat16, "auto", None).dtype is torch.float32


def test_the_demo_model_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_dtype, "multiplies_bfloat16", lambda: True)
    assert ModelManager("cpu").load(DEMO_MODEL_PATH, "auto", None).dtype is torch.float32
