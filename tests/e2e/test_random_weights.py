"""--load-format dummy: a configuration is served with random weights, the same ones each time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.server_process import ServerProcess, serving


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """A directory with no weights in it."""
    (tmp_path / "shape").mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO_MODEL_PATH / name, tmp_path / "shape")
    return tmp_path / "shape"


@pytest.mark.long
def test_random_weights_are_the_same_in_the_next_worker(shape: Path, tmp_path: Path) -> None:
    with serving("--model", str(shape), "--load-format", "dummy", log=tmp_path / "log") as server:
        worker = server.client.get("/info").json()["worker"]
        assert worker["num_weight_bytes"] == 4 * worker["model"]["num_parameters"]
        assert 0 < worker["weights_time_s"] <= worker["load_time_s"]
        fields = {"max_tokens": 32, "ignore_eos": True, "temperature": 0.0}
        before = [server.generate(prompt, **fields)["generated_text"] for prompt in ("Hello", "The sky")]
        assert before[0] != before[1]
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        server.wait_for_metric("servekit_worker_restarts_total", 1)
        assert [server.generate(prompt, **fields)["generated_text"] for prompt in ("Hello", "The sky")] == before
    assert "the weights are random" in (tmp_path / "log").read_text()


def test_model_without_a_tokenizer_is_refused(shape: Path) -> None:
    (shape / "tokenizer.json").unlink()
    command = [sys.executable, "-m", "servekit", "serve", str(shape), "--load-format", "dummy", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and "has no tokenizer.json" in ended.stderr


def test_info_names_the_source_of_the_weights(server: ServerProcess) -> None:
    worker = server.client.get("/info").json()["worker"]
    assert worker["num_weight_bytes"] == (DEMO_MODEL_PATH / "model.safetensors").stat().st_size
    assert "GB/s" in server.log.read_text()
