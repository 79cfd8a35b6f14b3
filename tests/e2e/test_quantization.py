"""--quantization: the weights of the demo model are rounded as a worker reads them, the same way each time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.quantized_models import make_quantized_model
from tests.support.server_process import serving

pytestmark = pytest.mark.long  # tests/workers/loading/test_quantized_weights.py has the same claims in one process

FIELDS = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0}


def test_weights_are_quantized_at_load_and_again_in_the_next_worker(tmp_path: Path) -> None:
    with serving("--quantization", "int4", "--quantization-group-size", "32", log=tmp_path / "log") as server:
        worker = server.client.get("/info").json()["worker"]
        assert worker["model"]["quantization"] == "int4, groups of 32"
        assert worker["num_weight_bytes"] < (DEMO_MODEL_PATH / "model.safetensors").stat().st_size
        before = server.generate("What color is the sky?", **FIELDS)["generated_text"]
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        server.wait_for_metric("servekit_worker_restarts_total", 1)
        assert server.generate("What color is the sky?", **FIELDS)["generated_text"] == before
    assert "(int4, groups of 32, " in (tmp_path / "log").read_text()


def test_quantizing_twice_is_refused_with_the_remedy(tmp_path: Path) -> None:
    make_quantized_model(tmp_path, "w8a8")
    (tmp_path / "tokenizer.json").write_bytes((DEMO_MODEL_PATH / "tokenizer.json").read_bytes())
    command = [sys.executable, "-m", "servekit", "serve", str(tmp_path), "--quantization", "int8", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2 and "leave out --quantization" in ended.stderr
