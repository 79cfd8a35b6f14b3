"""The real vLLM as a model of a server: in processes of ours (kind `vllm`), with its death in the middle of an answer.

It runs where VLLM_COMMAND is the path of vLLM's program and VLLM_MODEL that of a model's directory:

    VLLM_COMMAND=/opt/vllm/bin/vllm VLLM_MODEL=/models/qwen pytest tests/e2e/test_vllm.py
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.server_process import ServerProcess, serving

COMMAND, MODEL = os.environ.get("VLLM_COMMAND"), os.environ.get("VLLM_MODEL")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(COMMAND is None or MODEL is None, reason="VLLM_COMMAND and VLLM_MODEL are not set"),
]
START_S = 400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "models.toml").write_text(f"""
        [[model]]
        id = "local"
        model = "demo"
        device = "cpu"
        [[model]]
        id = "vllm"
        kind = "vllm"
        model = "{MODEL}"
        dtype = "bfloat16"
        max_model_len = 1024
        keep = "on_demand"
        vllm = {{ command = ["{COMMAND}"], arguments = ["--enforce-eager"] }}
    """)
    with serving("--models", str(folder / "models.toml"), log=folder / "log") as started:
        started.client.timeout = httpx2.Timeout(START_S)
        yield started


def complete(server: ServerProcess, **fields: Any) -> httpx2.Response:
    body = {"model": "vllm", "prompt": "The sky is", "max_tokens": 12, "temperature": 0, **fields}
    return server.client.post("/v1/completions", json=body)


def processes_of_vllm() -> list[int]:
    """Process ids of the API server of vLLM, and of its engine core."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and (b"VLLM::EngineCore" in command or (b"--uds\0/" in command and b"launcher" not in command)):
            found.append(int(folder.name))
    return found


def test_vllm_serves_streams_refuses_dies_and_is_started_again(server: ServerProcess) -> None:
    whole = complete(server)
    assert whole.status_code == 200, whole.text
    assert int(whole.headers["x-model-wait-ms"]) > 0
    text = whole.json()["choices"][0]["text"]
    assert whole.json()["usage"]["completion_tokens"] == 12
    with server.client.stream(
        "POST",
        "/v1/completions",
        json={"model": "vllm", "prompt": "The sky is", "max_tokens": 12, "temperature": 0, "stream": True},
    ) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert len(events) > 6 and "".join(each["choices"][0]["text"] for each in events) == text
    refused = complete(server, logit_bias={"999999999": 1})
    assert refused.status_code == 400 and "vocab" in refused.text
    refused = complete(server, prompt="word " * 3000)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert complete(server, structured_outputs={"regex": "[0-9]{3}"}).json()["choices"][0]["text"].isdigit()

    pids = processes_of_vllm()
    assert len(pids) == 2
    body = {"model": "vllm", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    killed_s = 0.0
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            lines += [line] if line else []
            if len(lines) == 5:
                os.kill(pids[-1], signal.SIGKILL)
                killed_s = time.monotonic()
    assert any('"error"' in line for line in lines[-2:]), lines[-3:]
    print(f"the stream ended {time.monotonic() - killed_s:.2f} s after the kill: {lines[-2]}")  # noqa: T201
    body = {"model": "local", "prompt": "The sky is", "max_tokens": 3}
    assert server.client.post("/v1/completions", json=body).status_code == 200, "other models are not affected"
    deadline = time.monotonic() + START_S
    while (again := complete(server)).status_code != 200:
        assert again.status_code in (502, 503) and time.monotonic() < deadline, again.text
        time.sleep(1)
    assert again.json()["choices"][0]["text"] == text
    assert not set(pids) & set(processes_of_vllm())
    server.client.post("/v1/models/vllm/unload").raise_for_status()
    while processes_of_vllm():
        assert time.monotonic() < deadline
        time.sleep(0.1)
