"""Tests of processes: how they start and exit, and what happens when one is killed.

Tests that depend on no computation serve a simulated model, whose worker starts without importing torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support import proc
from tests.support.default_signals import heed_hangups
from tests.support.raw_sockets import connect, post, read_answer
from tests.support.server_process import ServerProcess, events, free_port, serving

NUM_TOKENS = 300
SLOW_MODEL = "sim:step=5ms"  # streams for 1.5 s


def read_stream(server: ServerProcess, into: list[dict[str, Any]], started: threading.Event) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    with server.client.stream("POST", "/generate_stream", json=body) as response:
        for event in events(response.iter_lines()):
            into.append(event)
            started.set()


@pytest.fixture
def streaming(tmp_path: Path) -> Any:
    """(server, events so far, reader thread) with a stream in progress, of a simulated model."""
    with _streaming(tmp_path, SLOW_MODEL) as started:
        yield started


@contextmanager
def _streaming(tmp_path: Path, model: str) -> Iterator[tuple[ServerProcess, list[dict[str, Any]], threading.Thread]]:
    with serving(model, log=tmp_path / "log") as server:
        received: list[dict[str, Any]] = []
        started = threading.Event()
        reader = threading.Thread(target=read_stream, args=(server, received, started))
        reader.start()
        assert started.wait(60)
        yield server, received, reader
        reader.join(60)


def test_sigterm_lets_streams_finish_and_exits_with_0(streaming: Any) -> None:
    server, received, reader = streaming
    (worker,) = server.worker_pids()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    reader.join(60)
    assert received[-1]["finish_reason"] == "length" and len(received) == NUM_TOKENS
    proc.wait_until_gone(worker)


def test_sighup_drains_the_server_unless_nohup_started_it(tmp_path: Path) -> None:
    """Also while the model loads."""
    serve = [sys.executable, "-m", "servekit", "serve", "--port", "0", "--model", "sim:load=60s"]
    started = {}
    for name, command in (("ends", serve), ("stays", ["nohup", *serve])):
        with (tmp_path / name).open("wb") as log:
            started[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=heed_hangups
            )
    try:
        for name in started:
            deadline = time.monotonic() + 60
            while ": loading sim:load=60s" not in (tmp_path / name).read_text():
                assert time.monotonic() < deadline
                time.sleep(0.02)
        for process in started.values():
            process.send_signal(signal.SIGHUP)
        assert started["ends"].wait(60) == 0
        assert "draining: " in (tmp_path / "ends").read_text()
        assert started["stays"].poll() is None and "draining: " not in (tmp_path / "stays").read_text()
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_workers_ignore_the_signals_that_a_supervisor_sends_to_every_process(streaming: Any) -> None:
    server, received, reader = streaming
    (worker,) = server.worker_pids()
    os.kill(worker, signal.SIGTERM)
    os.kill(worker, signal.SIGINT)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    reader.join(60)
    assert received[-1]["finish_reason"] == "length"


def test_all_processes_are_in_the_servers_session_and_none_in_its_process_group(tmp_path: Path) -> None:
    """Linux gives each session the same share of a core, whatever the priority of its processes (sched(7), autogroup).

    So a process of low priority must not have a session of its own. Ctrl-C in a terminal reaches one process group.
    """
    with serving(SLOW_MODEL, "--api-processes", "2", log=tmp_path / "log") as server:
        started = _descendants(server.process.pid)
        assert len(started) >= 4, "two API processes, a worker, and processes for bodies or grammars"
        assert {os.getsid(pid) for pid in started} == {os.getsid(server.process.pid)}
        assert os.getpgid(server.process.pid) not in {os.getpgid(pid) for pid in started}


def _descendants(pid: int) -> list[int]:
    return [each for child in proc.children(pid) for each in (child, *_descendants(child))]


def test_at_the_shutdown_timeout_streams_get_an_error_and_started_requests_a_503(tmp_path: Path) -> None:
    received: list[dict[str, Any]] = []
    started = threading.Event()
    request = post("/generate", prompt="a", max_tokens=1)
    with serving(SLOW_MODEL, "--shutdown-timeout", "0.1", log=tmp_path / "log") as server, ExitStack() as stack:
        reader = threading.Thread(target=read_stream, args=(server, received, started))
        reader.start()
        assert started.wait(60)
        silent, first, second, idle = (stack.enter_context(connect(server)) for _ in range(4))
        for client in (second, idle):
            client.sendall(request)
            assert read_answer(client)[0] == 200
        for client in (first, second):
            client.sendall(request[:20])
        server.process.send_signal(signal.SIGTERM)
        for client in (silent, idle):
            assert client.recv(1) == b"", "no request was started"
        for client in (first, second):
            client.sendall(request[20:])
            status, headers, body = read_answer(client)
            assert status == 503 and "shutting down" in json.loads(body)["error"]["message"]
            assert int(headers["retry-after"]) > 0 and headers["connection"] == "close"
            client.close()
        assert server.process.wait(60) == 0
        reader.join(60)
    assert "shutting down" in received[-1]["error"]["message"]
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_drain_ends_although_clients_ask_again_and_again(tmp_path: Path) -> None:
    """Refusals are not work: each of these clients always has some more requests under way."""
    request, statuses = post("/generate", prompt="a", max_tokens=1), set[int]()

    def keep_asking(server: ServerProcess) -> None:
        with suppress(ConnectionRefusedError):
            while True:
                with socket.create_connection(("127.0.0.1", server.port)) as client, suppress(ConnectionError):
                    client.sendall(4 * request)
                    while received := client.recv(2**16):
                        answers = re.findall(rb"HTTP/1.1 (\d+)", received)
                        statuses.update(map(int, answers))
                        client.sendall(len(answers) * request)

    with serving("sim:instant", "--shutdown-timeout", "600", log=tmp_path / "log") as server:
        clients = [threading.Thread(target=keep_asking, args=(server,)) for _ in range(16)]
        for client in clients:
            client.start()
        deadline = time.monotonic() + 60
        while 200 not in statuses:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    for client in clients:
        client.join()
    assert statuses == {200, 503}
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_after_a_killed_worker_a_stream_continues_token_for_token(tmp_path: Path) -> None:
    with _streaming(tmp_path, "demo") as (server, received, reader):
        (worker,) = server.worker_pids()
        os.kill(worker, signal.SIGKILL)
        assert server.client.get("/health").status_code == 200, "no supervisor should restart the server for this"
        reader.join(300)  # a worker that imports torch on a busy machine takes its time
        undisturbed = server.stream("Once upon a time", max_tokens=NUM_TOKENS, ignore_eos=True)
        assert [event["token"] for event in received] == [event["token"] for event in undisturbed]
        (successor,) = server.worker_pids()
        assert successor != worker
        server.wait_until_at_rest()
        assert server.metric("servekit_worker_restarts_total") == 1


@pytest.mark.long
def test_the_server_exits_with_1_when_no_replacement_worker_starts(tmp_path: Path) -> None:
    """The supervisor gets the exit code, and each client the reason."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_PATH, model)
    received: list[dict[str, Any]] = []
    started = threading.Event()
    with serving(str(model), "--max-worker-restarts", "1", log=tmp_path / "log") as server:
        reader = threading.Thread(target=read_stream, args=(server, received, started))
        reader.start()
        assert started.wait(60)
        (model / "model.safetensors").unlink()
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        assert server.process.wait(60) == 1
        reader.join(60)
    assert received[-1]["error"]["code"] == "worker_unavailable"
    assert "1 replacements in a row did not start" in received[-1]["error"]["message"]


def test_a_worker_exits_when_its_server_is_killed(tmp_path: Path) -> None:
    with serving(SLOW_MODEL, log=tmp_path / "log") as server:
        (worker,) = server.worker_pids()
        server.process.kill()
        proc.wait_until_gone(worker)


def test_the_server_answers_while_the_model_loads(tmp_path: Path) -> None:
    server = ServerProcess("sim:load=2s", log=tmp_path / "log")
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
                time.sleep(0.05)
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
        # Each of these starts a worker to learn what it refuses.
        pytest.param(["--device", "cuda:7"], "CUDA", marks=pytest.mark.long),
        pytest.param(["--kv-cache-memory-bytes", "100"], "one block takes", marks=pytest.mark.long),
    ],
)
def test_configuration_errors_are_reported_with_exit_code_2(arguments: list[str], expected: str) -> None:
    command = [sys.executable, "-m", "servekit", "serve", "--port", str(free_port()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)  # a worker imports torch
    assert done.returncode == 2
    assert expected in done.stderr


def test_a_port_in_use_is_a_configuration_error(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "servekit", "serve", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{server.port}" in done.stderr


@pytest.mark.parametrize("model", ["sim:instant", pytest.param("demo", marks=pytest.mark.long)])
def test_a_tiny_kv_pool_preempts_and_gives_the_same_answers(model: str, tmp_path: Path) -> None:
    """Eight blocks of four tokens for sixteen answers of unknown length, through the whole stack.

    A simulated model computes each token from what is in its blocks, so a wrong block gives wrong tokens there, too.
    """
    arguments = [model, "--num-kv-blocks", "8", "--block-size", "4", "--max-num-batched-tokens", "7"]
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


def test_requests_in_preparation_get_a_503_at_the_shutdown_timeout(tmp_path: Path) -> None:
    """One chat renders for seconds, another one waits for it, and the shutdown timeout is one second."""
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    slow = {"messages": [{"role": "user", "content": "a"}], "chat_template": endless}
    flags = ("--trust-request-chat-template", "--shutdown-timeout", "1", "--sandbox-timeout", "20")
    with serving("sim:instant", *flags, log=tmp_path / "log") as server:
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(server.client.post, "/v1/chat/completions", json=slow) for _ in range(2)]
            server.wait_until_a_sandbox_works()
            server.process.send_signal(signal.SIGTERM)
            answers = [future.result() for future in asked]
        assert {answer.status_code for answer in answers} == {503}
        assert {answer.json()["error"]["code"] for answer in answers} == {"worker_unavailable"}
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log.read_text()


def test_a_log_that_nobody_reads_delays_no_request(tmp_path: Path) -> None:
    """The pipe is full after some twenty lines; the others wait, and are there when the log is read again."""
    log = tmp_path / "log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    server = ServerProcess("sim:instant", log=log)
    try:
        server.wait_until_ready()
        for _ in range(200):
            assert server.client.get("/no/such/route").status_code == 404
        assert server.metric("servekit_log_lines_dropped_total") == 0
        os.set_blocking(reader, True)
        lines = b""
        while lines.count(b"/no/such/route") < 200:
            lines += os.read(reader, 2**16)
    finally:
        os.close(reader)
        server.client.close()
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("redirections", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_it_serves_with_standard_streams_closed(redirections: str, tmp_path: Path) -> None:
    port = free_port()
    command = f"exec {sys.executable} -m servekit serve sim:instant --port {port} {redirections}"
    process = subprocess.Popen(["/bin/sh", "-c", command])
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None and time.monotonic() < deadline
                with suppress(httpx2.TransportError):
                    if client.get("/ready").status_code == 200:
                        break
                time.sleep(0.02)
            answer = client.post("/generate", json={"prompt": "a", "max_tokens": 3})
            assert answer.json()["finish_reason"] == "length"
        for number in range(3):
            if f"{number}" in redirections:
                assert os.readlink(f"/proc/{process.pid}/fd/{number}") == os.devnull
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_it_serves_without_docstrings_and_assertions(tmp_path: Path) -> None:
    """The server, its worker and its sandboxes, as under `python -OO`."""
    environment = {"PYTHONOPTIMIZE": "2"}
    # Python compiles every module again for this mode; where its cache is cold, that takes as long as torch is large.
    server = ServerProcess("demo", log=tmp_path / "log", environment=environment)
    try:
        server.wait_until_ready(timeout_s=300)
        answer = server.generate("What color is the sky?", max_tokens=8, grammar={"type": "regex", "value": "[a-z]{3}"})
        assert len(answer["generated_text"]) == 3
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
        assert server.client.post("/v1/chat/completions", json=chat).status_code == 200
    finally:
        server.client.close()
        server.process.kill()
        server.process.wait()
