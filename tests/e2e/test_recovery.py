"""Tests of a server whose workers fail: what clients, load balancers and operators see."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.support.server_process import ServerProcess, events, serving

POISON = 777


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose workers crash on a certain token."""
    environment = {"PYTHONPATH": str(Path(__file__).parent / "poison"), "POISON_TOKEN": str(POISON)}
    log = tmp_path_factory.mktemp("poisoned") / "log"
    with serving("--log-level", "debug", log=log, environment=environment) as server:
        yield server


@pytest.mark.long
def test_only_the_request_that_crashes_workers_fails(poisoned: ServerProcess) -> None:
    fields = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.0}
    prompts = [f"Count from {number}." for number in range(6)]
    with ThreadPoolExecutor(6) as threads:
        undisturbed = list(threads.map(lambda prompt: poisoned.generate(prompt, **fields)["generated_text"], prompts))
    with ThreadPoolExecutor(8) as threads:
        others = [threads.submit(poisoned.generate, prompt, **fields) for prompt in prompts]
        time.sleep(0.2)
        body = {"prompt": [5, 6, POISON, 8], "max_tokens": 5, "n": 3}
        asked = threads.submit(poisoned.client.post, "/v1/completions", json=body)
        answer = asked.result()
        assert [each.result()["generated_text"] for each in others] == undisturbed
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "request_crashes_worker"
    assert answer.headers["x-should-retry"] == "false", "or OpenAI's clients retry"
    assert "the model worker was lost 3 times while this request ran" in answer.json()["error"]["message"]
    assert poisoned.metric("servekit_worker_restarts_total") == 3
    poisoned.wait_until_at_rest()
    assert poisoned.client.get("/ready").status_code == 200


def test_ready_reports_recovering_while_a_worker_is_replaced(tmp_path: Path) -> None:
    with serving("sim:load=3s", "--worker-restart-timeout", "0.5", log=tmp_path / "log") as server:
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        killed_s = time.monotonic()
        while (answer := server.client.get("/ready")).status_code == 200:
            assert time.monotonic() < killed_s + 30, "the kernel takes a moment to end a process on a busy machine"
        assert answer.status_code == 503 and answer.json()["status"] == "recovering"
        assert server.client.get("/health").status_code == 200
        waiting = server.client.post("/generate", json={"prompt": "a", "max_tokens": 1})
        assert waiting.status_code == 503 and "no model worker for 0.5 s" in waiting.json()["error"]["message"]
        assert int(waiting.headers["retry-after"]) > 0
        assert server.client.get("/health").status_code == 200, "a new process would have to load the model as well"
        server.wait_until_ready()
        assert server.generate("a", max_tokens=1)["finish_reason"] == "length"


def test_a_frozen_container_costs_no_worker_and_changes_no_answer(tmp_path: Path) -> None:
    """The server and its worker are stopped for longer than a step may take, while a request runs."""
    fields = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0}
    with serving("sim:step=10ms", "--step-timeout", "3", log=tmp_path / "log") as server:
        undisturbed = server.generate("Once", **fields)["generated_text"]
        (worker,) = server.worker_pids()
        processes = (server.process.pid, worker)
        body = {"prompt": "Once", **fields}
        with server.client.stream("POST", "/generate_stream", json=body) as response:
            lines = events(response.iter_lines())
            pieces = [next(lines)["token"]["text"]]
            for pid in processes:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(4)
            for pid in processes:
                os.kill(pid, signal.SIGCONT)
            pieces += [event["token"]["text"] for event in lines]
        assert "".join(pieces) == undisturbed
        assert server.worker_pids() == [worker] and server.metric("servekit_worker_restarts_total") == 0


def test_a_draining_server_listens_and_rejects_new_requests(tmp_path: Path) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"  # refused after 2 s
    slow = {"messages": [{"role": "user", "content": "a"}], "chat_template": endless}
    flags = ("--trust-request-chat-template", "--sandbox-timeout", "2", "--shutdown-timeout", "120")
    with serving("sim:step=10ms", *flags, log=tmp_path / "log") as server, ThreadPoolExecutor(1) as threads:
        in_preparation = threads.submit(server.client.post, "/v1/chat/completions", json=slow)
        server.wait_until_a_request_is_in_preparation()
        body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True}
        with server.client.stream("POST", "/generate_stream", json=body) as running:
            lines = running.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_log("draining: 2 requests get 120 s")
            with httpx2.Client(base_url=server.url, timeout=60) as newcomer:
                ready = newcomer.get("/ready")
                assert ready.status_code == 503 and ready.json()["status"] == "draining"
                refusal = newcomer.post("/generate", json={"prompt": "a"})
                assert refusal.status_code == 503 and "shutting down" in refusal.json()["error"]["message"]
                assert int(refusal.headers["retry-after"]) > 0
            assert '"finish_reason":"length"' in [line for line in lines if line.startswith("data:")][-1]
        answer = in_preparation.result()
        assert answer.status_code == 400 or "too busy" in answer.text, "a request that was accepted is answered"
        assert server.process.wait(60) == 0


def test_a_second_signal_ends_the_server_at_once(tmp_path: Path) -> None:
    with serving("sim:step=50ms", "--shutdown-timeout", "600", log=tmp_path / "log") as server:
        reader = threading.Thread(target=_read_to_the_end, args=(server,))
        reader.start()
        server.wait_for_metric("servekit_num_requests_running", 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("draining: 1 requests get 600 s")
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, "the stream would have 600 s"
        reader.join(60)
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", server.port)):
            pass


def _read_to_the_end(server: ServerProcess) -> None:
    body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}
    try:
        with server.client.stream("POST", "/generate_stream", json=body) as response:
            list(response.iter_lines())
    except httpx2.TransportError:
        pass


def test_the_readiness_probe_is_not_counted_in_metrics(server: ServerProcess) -> None:
    before = server.metric("servekit_request_success_total")
    assert server.client.get("/ready").json()["status"] == "ready"
    assert server.metric("servekit_request_success_total") == before
