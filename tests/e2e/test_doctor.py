"""`servekit doctor` on this machine: what it says is true, and its exit code tells whether the server would start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from servekit.config import ServeConfig
from servekit.doctor.checks import weight_bytes
from servekit.engine.model_files import DEMO_MODEL_PATH


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "servekit", "doctor", *arguments]
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **offline, **environment}
    )


def test_the_demo_model_can_be_served_here() -> None:
    done = doctor("--json", "--port", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    found = {check["name"]: check["found"] for check in report["checks"]}
    assert report["can_serve"] is True
    assert "3,475,712 parameters, safetensors, bfloat16" in found["model"]
    assert f"{len(os.sched_getaffinity(0))}" in found["cores"]
    assert found["Hugging Face"] == "not used, because HF_HUB_OFFLINE is set"


@pytest.mark.long
def test_what_keeps_the_server_from_starting_is_broken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        done = doctor("/no-such-model", "--port", port, "--device", "cuda:7")
    assert done.returncode == 1, done.stderr
    broken = [line for line in done.stdout.splitlines() if line.startswith("broken")]
    assert [line.split()[1] for line in broken] == ["GPU", "model", "port"]
    assert f"process {os.getpid()} " in broken[2]
    assert done.stdout.splitlines()[-1].startswith("servekit cannot serve here: 3 broken")


def test_a_wrong_setting_is_refused_as_by_serve() -> None:
    done = doctor("--prot", "9000")
    assert done.returncode == 2
    assert "did you mean --port?" in done.stderr


@pytest.mark.long
def test_the_size_of_the_weights_is_that_of_the_files() -> None:
    from workers.inspection import model_facts

    facts = model_facts(DEMO_MODEL_PATH)
    estimate = weight_bytes(facts, ServeConfig(dtype="bfloat16"), on_gpu=False)
    assert estimate == pytest.approx(facts.file_bytes, rel=0.01)
