"""Claims about processes: how they start, end, and what happens when one is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from servekit.model_files import DEMO_MODEL_PATH
from tests.raw_sockets import connect, post, read_answer
from tests.server_process import ServerProcess, events, free_port, serving


def wait_until_gone(pid: int, timeout_s: float = 3) -> None:
    deadline = time.monotonic() + timeout_s
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)


NUM_TOKENS = 600


def read_stream(server: ServerProcess, into: list[dict[str, Any]], started: threading.Event) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    with server.client.stream("POST", "/generate_stream", json=body) as response:
        for event in events(response.iter_lines()):
            into.append(event)
            started.set()


@pytest.fixture
def streaming(tmp_path: Path) -> Any:
    """(server, events so far, reader thread) with a stream under way."""
    with serving(log=tmp_path / "log") as server:
        received: list[dict[str, Any]] = []
        started = threading.Event()
        reader = threading.Thread(target=read_stream, args=(server, received, started))
        reader.start()
        assert started.wait(30)
        yield server, received, reader
        reader.join(30)


def test_sigterm_lets_streams_finish_and_exits_0(streaming: Any) -> None:
    server, received, reader = streaming
    (worker,) = server.worker_pids()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    reader.join(10)
    assert received[-1]["finish_reason"] == "length" and len(received) == NUM_TOKENS
    wait_until_gone(worker)


def test_when_its_terminal_is_gone_the_server_ends_in_good_order_unless_told_to_stay(tmp_path: Path) -> None:
    """While they load, which they need not have done for this."""
    serve = [sys.executable, "-m", "servekit", "serve", "--port", "0"]
    started = {}
    for name, command in (("ends", serve), ("stays", ["nohup", *serve])):
        with (tmp_path / name).open("wb") as log:
            started[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_heed_hangups
            )
    try:
        for name in started:
            deadline = time.monotonic() + 30
            while " loads demo" not in (tmp_path / name).read_text():
                assert time.monotonic() < deadline
                time.sleep(0.02)
        for process in started.values():
            process.send_signal(signal.SIGHUP)
        assert started["ends"].wait(10) == 0
        assert "draining: " in (tmp_path / "ends").read_text()
        assert started["stays"].poll() is None and "draining: " not in (tmp_path / "stays").read_text()
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def _heed_hangups() -> None:
    """Also where the tests themselves are run by nohup, which is inherited."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_supervisor_may_signal_every_process_of_the_service(streaming: Any) -> None:
    server, received, reader = streaming
    (worker,) = server.worker_pids()
    os.kill(worker, signal.SIGTERM)
    os.kill(worker, signal.SIGINT)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    reader.join(10)
    assert received[-1]["finish_reason"] == "length"


def test_at_the_shutdown_timeout_clients_are_told_and_those_who_are_in_the_midst_of_a_head(tmp_path: Path) -> None:
    received: list[dict[str, Any]] = []
    started = threading.Event()
    request = post("/generate", prompt="a", max_tokens=1)
    with serving("--shutdown-timeout", "0.1", log=tmp_path / "log") as server, ExitStack() as stack:
        reader = threading.Thread(target=read_stream, args=(server, received, started))
        reader.start()
        assert started.wait(30)
        silent, first, second, idle = (stack.enter_context(connect(server)) for _ in range(4))
        for client in (second, idle):
            client.sendall(request)
            assert read_answer(client)[0] == 200
        for client in (first, second):
            client.sendall(request[:20])
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.4)  # then it is closing
        for client in (silent, idle):
            assert client.recv(1) == b"", "nobody asked"
        for client in (first, second):
            client.sendall(request[20:])
            status, headers, body = read_answer(client)
            assert status == 503 and "shutting down" in json.loads(body)["error"]["message"]
            assert int(headers["retry-after"]) > 0 and headers["connection"] == "close"
            client.close()
        assert server.process.wait(10) == 0
        reader.join(10)
    assert "shutting down" in received[-1]["error"]["message"]
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_killed_worker_costs_its_clients_a_pause_and_no_token(streaming: Any) -> None:
    server, received, reader = streaming
    (worker,) = server.worker_pids()
    os.kill(worker, signal.SIGKILL)
    assert server.client.get("/health").status_code == 200, "a short outage is nothing to end the process for"
    reader.join(60)
    undisturbed = server.stream("Once upon a time", max_tokens=NUM_TOKENS, ignore_eos=True)
    assert [event["token"] for event in received] == [event["token"] for event in undisturbed]
    (successor,) = server.worker_pids()
    assert successor != worker
    server.wait_until_at_rest()
    assert server.metric("servekit_worker_restarts_total") == 1


def test_a_worker_that_will_not_come_back_ends_the_server(tmp_path: Path) -> None:
    """Nothing is left to be done here; whoever started the process gets its exit code, and each client the reason."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_PATH, model)
    received: list[dict[str, Any]] = []
    started = threading.Event()
    with serving(str(model), "--max-worker-restarts", "1", log=tmp_path / "log") as server:
        reader = threading.Thread(target=read_stream, args=(server, received, started))
        reader.start()
        assert started.wait(30)
        (model / "model.safetensors").unlink()
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        assert server.process.wait(60) == 1
        reader.join(10)
    assert received[-1]["error"]["code"] == "worker_unavailable"
    assert "1 others in a row did not start" in received[-1]["error"]["message"]


def test_a_worker_dies_with_its_server(tmp_path: Path) -> None:
    with serving(log=tmp_path / "log") as server:
        (worker,) = server.worker_pids()
        server.process.kill()
        wait_until_gone(worker)


def test_the_server_answers_while_it_loads(tmp_path: Path) -> None:
    server = ServerProcess(log=tmp_path / "log")
    try:
        seen = set()
        deadline = time.monotonic() + 60
        while "ready" not in seen and time.monotonic() < deadline:
            try:
                response = server.client.get("/ready")
            except Exception:
                time.sleep(0.01)
                continue
            status = response.json()["status"]
            seen.add(status)
            if status == "loading":
                assert response.status_code == 503
                refusal = server.client.post("/generate", json={"prompt": "a", "max_tokens": 1})
                assert refusal.status_code in (200, 503)
                assert server.client.get("/health").status_code == 200
        assert seen == {"loading", "ready"}
    finally:
        server.client.close()
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "99999"], "port = '99999'"),
        (["/no/such/model"], "there is no such directory"),
        (["--max-model-len", "100000"], "exceeds the model's context of 2048 tokens"),
        (["--device", "cuda:7"], "CUDA"),
        (["--kv-cache-memory-bytes", "100"], "one block takes"),
    ],
)
def test_what_the_operator_got_wrong_is_said_with_exit_code_2(arguments: list[str], expected: str) -> None:
    command = [sys.executable, "-m", "servekit", "serve", "--port", str(free_port()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert expected in done.stderr


def test_a_taken_port_is_an_operators_mistake(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "servekit", "serve", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{server.port}" in done.stderr


def test_a_tiny_pool_serves_everyone_in_turn(tmp_path: Path) -> None:
    """Eight blocks of four tokens for sixteen open ends: preemption through the whole stack, same answers."""
    arguments = [str(DEMO_MODEL_PATH), "--num-kv-blocks", "8", "--block-size", "4", "--max-num-batched-tokens", "7"]
    prompts = [f"{i} and" for i in range(16)]
    fields = {"prompts": prompts, "ignore_eos": True}
    with serving(*arguments, log=tmp_path / "log") as small:
        answers = small.client.post("/generate", json=fields).json()["generated_texts"]
        assert small.metric("servekit_num_preemptions_total") > 0
        small.wait_until_at_rest()
        refusal = small.client.post("/generate", json={"prompt": "a", "max_tokens": 50})
        assert refusal.json()["error"]["code"] == "context_length_exceeded"
        alone = [small.generate(prompt, ignore_eos=True)["generated_text"] for prompt in prompts]
    assert answers == alone


def test_whoever_is_being_made_ready_when_time_is_up_is_told_so(tmp_path: Path) -> None:
    """A grammar that compiles for seconds, another that waits for it, and a server that has one second left."""
    slow = {"type": "json_schema", "value": {"type": "integer", "multipleOf": 399_989}}
    with serving("--shutdown-timeout", "1", "--sandbox-timeout", "20", log=tmp_path / "log") as server:
        with ThreadPoolExecutor(2) as threads:
            asked = [
                threads.submit(server.client.post, "/generate", json={"prompt": "a", "grammar": slow}) for _ in range(2)
            ]
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            answers = [future.result() for future in asked]
        assert {answer.status_code for answer in answers} == {503}
        assert {answer.json()["error"]["code"] for answer in answers} == {"worker_unavailable"}
        assert server.process.wait(timeout=10) == 0
        assert "Traceback" not in server.log.read_text()
