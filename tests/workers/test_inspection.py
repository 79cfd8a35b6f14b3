"""What the worker's Python tells `servekit doctor`: of this machine, and of models in several formats."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.gguf.directory import directory_of
from servekit.protocol.worker_facts import WorkerFacts
from tests.support.quantized_checkpoints import write_q8_0
from workers.csrc.build import c_library
from workers.inspection import model_facts, worker_facts


@pytest.fixture
def own_log() -> Iterator[None]:
    """A process that tells of its machine does nothing else, so it takes the log of its kernels for itself."""
    log = logging.getLogger("servekit.worker")
    level, propagates, handlers = log.level, log.propagate, log.handlers[:]
    c_library.cache_clear()
    yield
    log.setLevel(level)
    log.propagate, log.handlers = propagates, handlers


@pytest.mark.usefixtures("own_log")
def test_this_machine_has_torch_and_kernels() -> None:
    facts = worker_facts(None)
    assert msgspec.json.decode(msgspec.json.encode(facts), type=WorkerFacts) == facts
    assert facts.torch.version == torch.__version__
    assert facts.torch.num_threads == torch.get_num_threads()
    assert facts.kernels.is_loaded == (facts.kernels.compiler is not None)
    assert facts.kernels.messages
    assert facts.model is None


def test_a_model_of_safetensors() -> None:
    facts = model_facts(DEMO_MODEL_PATH)
    assert facts.problem is None
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.weight_format == "safetensors, bfloat16"
    assert (facts.num_parameters, facts.file_number_bytes, facts.is_quantized) == (3_475_712, 2, False)
    assert facts.file_bytes == (DEMO_MODEL_PATH / "model.safetensors").stat().st_size
    assert facts.kv_numbers_per_token == 2 * 4 * 2 * 64  # keys and values of 4 layers with 2 heads of 64


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_q8_0(DEMO_MODEL_PATH, tmp_path / "demo-Q8_0.gguf")
    facts = model_facts(directory_of(file))
    assert facts.problem is None
    assert facts.weight_format == "GGUF, most of it Q8_0"
    assert facts.is_quantized and facts.file_bytes == file.stat().st_size


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "holds no model.safetensors"),
        ({"adapter_config.json": "{}"}, "serve its model, with --lora NAME="),
        ({"config.json": '{"quantization_config": {"quant_method": "aqlm"}}'}, "AQLM, which servekit does not read"),
        ({"model.safetensors": "damaged"}, "cannot be read"),
    ],
)
def test_what_cannot_be_served_has_a_problem(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    (tmp_path / "config.json").write_text((DEMO_MODEL_PATH / "config.json").read_text())
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert problem in (model_facts(tmp_path).problem or "")


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DEMO_MODEL_PATH / name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 2**20}))
    assert "do not belong together" in (model_facts(tmp_path).problem or "")
