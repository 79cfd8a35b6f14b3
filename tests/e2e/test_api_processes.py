"""Tests of a server with two API processes: clients, limits and operators see no difference to one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support import proc
from tests.support.server_process import ONE_THREAD, ServerProcess, events, serving
from tests.support.streams import NUM_STREAMS, Streams, from_all, new_client, read_all

pytestmark = pytest.mark.long  # it starts many servers

TWO = ("--api-processes", "2")


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("one") / "log"
    with serving(log=log, environment=ONE_THREAD) as server:
        yield server


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("two") / "log"
    with serving(*TWO, log=log, environment=ONE_THREAD) as server:
        yield server
        assert "Traceback" not in server.log.read_text()


SKY = "What color is the sky?"
CHAT = {"messages": [{"role": "user", "content": SKY}], "max_tokens": 12, "temperature": 0}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("/generate", {"prompt": SKY, "max_tokens": 12, "temperature": 0}),
    "prompts": ("/generate", {"prompts": [SKY, "Who are you?"], "max_tokens": 8, "seed": 3}),
    "n": ("/generate", {"prompt": SKY, "n": 3, "max_tokens": 8, "seed": 5}),
    "best_of": ("/generate", {"prompt": SKY, "n": 1, "best_of": 3, "max_tokens": 8, "seed": 5}),
    "stop string": ("/generate", {"prompt": SKY, "max_tokens": 40, "temperature": 0, "stop": ["e", "."]}),
    "stop string in text": (
        "/generate",
        {"prompt": SKY, "max_tokens": 40, "temperature": 0, "stop": ["e"], "include_stop_str_in_output": True},
    ),
    "logprobs": ("/generate", {"prompt": SKY, "max_tokens": 8, "temperature": 0, "logprobs": 3, "prompt_logprobs": 2}),
    "stream": ("/generate_stream", {"prompt": SKY, "max_tokens": 12, "temperature": 0}),
    "stream by four": ("/generate_stream", {"prompt": SKY, "max_tokens": 12, "temperature": 0, "stream_interval": 4}),
    "stream with stop": ("/generate_stream", {"prompt": SKY, "max_tokens": 40, "temperature": 0, "stop": "is"}),
    "TGI": ("/generate_stream", {"inputs": SKY, "parameters": {"max_new_tokens": 8}}),
    "completion": ("/v1/completions", {"prompt": SKY, "max_tokens": 8, "temperature": 0, "logprobs": 2, "echo": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "n": 2, "seed": 1, "stream_options": {"include_usage": True}},
    ),
    "grammar": (
        "/v1/chat/completions",
        {
            **CHAT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
            },
        },
    ),
    "tokenize": ("/tokenize", {"prompt": SKY}),
    "detokenize": ("/detokenize", {"tokens": [72, 105]}),
    "large body": ("/tokenize", {"prompt": SKY, "model": "demo", "x-padding": "x" * 100_000}),
    "unknown field": ("/generate", {"prompt": SKY, "max_token": 1}),
    "too long": ("/generate", {"prompt": SKY, "max_tokens": 10**6}),
    "too many answers": ("/generate", {"prompt": SKY, "n": 128, "best_of": 128, "max_tokens": 10**6}),
    "no model": ("/v1/completions", {"prompt": SKY, "model": "other"}),
    "no route": ("/v1/nothing", {}),
}
TEXT = r'"(?:text|content)":"((?:[^"\\]|\\.)*)"'


def comparable(text: str) -> str:
    """An answer without random ids, and without times. How a stream puts tokens together depends on times, too."""
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    if lines:
        texts: dict[str, str] = defaultdict(str)  # by answer
        for line in lines:
            answer = re.search(r'"choices":\[\{"index":(\d+)', line)
            texts[answer[1] if answer else ""] += "".join(re.findall(TEXT, line))
        text = json.dumps(texts, sort_keys=True) + re.sub(TEXT, "", lines[-1])
    text = re.sub(r'"(id|created|request_id)":("[^"]*"|\d+)', r'"\1":0', text)
    return re.sub(r'"(\w+_ms|\w*time\w*)":[\d.e-]+', r'"\1":0', text)


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_of_one_process(one: ServerProcess, two: ServerProcess, name: str) -> None:
    path, body = REQUESTS[name]
    expected = one.client.post(path, json=body)
    with new_client(two) as client:
        answer = client.post(path, json=body)
    assert (answer.status_code, comparable(answer.text)) == (expected.status_code, comparable(expected.text))
    assert answer.headers["content-type"] == expected.headers["content-type"]


def test_every_process_serves_the_same_information(two: ServerProcess) -> None:
    infos = from_all(two, "GET", "/info")
    assert {each.status_code for each in infos} == {200} and len({each.text for each in infos}) == 1
    assert infos[0].json()["settings"]["api_processes"] == 2
    assert {each.text for each in from_all(two, "GET", "/ready")} == {'{"status":"ready"}'}
    assert len({each.text for each in from_all(two, "GET", "/v1/models")}) == 1


def series(text: str) -> set[str]:
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}


def test_a_request_is_aborted_through_any_process(two: ServerProcess) -> None:
    body = {"prompt": SKY, "max_tokens": 1500, "ignore_eos": True, "temperature": 1}
    for _ in range(4):  # a new connection each time, so that both processes get some
        with two.client.stream("POST", "/generate_stream", json=body, headers={"x-request-id": "long"}) as response:
            stream = events(response.iter_lines())
            next(stream)
            with new_client(two) as other:
                assert other.post("/abort_request", json={"rid": "long"}).json() == {"num_aborted": 1}
            *_, last = stream
        assert last["finish_reason"] == "abort" and last["usage"]["completion_tokens"] < 1500


def test_every_process_serves_the_metrics_of_the_server(two: ServerProcess) -> None:
    from_all(two, "POST", "/generate", json={"prompt": SKY, "max_tokens": 3})
    two.wait_until_at_rest()
    from_all(two, "GET", "/metrics")  # the first one of each process makes a series
    texts = [each.text for each in from_all(two, "GET", "/metrics")]
    for text in texts[1:]:
        assert series(text) == series(texts[0])
    name = "servekit_generation_tokens_total"
    assert len({line for text in texts for line in text.splitlines() if line.startswith(name)}) == 1
    served = 'servekit_http_requests_total{handler="/generate",method="POST",model_name="demo",status="200"}'
    counted = [float(line.split()[-1]) for line in texts[-1].splitlines() if line.startswith(served)]
    assert counted[0] >= NUM_STREAMS
    assert texts[0].count("servekit_api_process_resident_memory_bytes{") == 2


def test_every_process_shows_the_scheduler(two: ServerProcess) -> None:
    for answer in from_all(two, "GET", "/ui/state"):
        frame = answer.json()
        assert frame["state"] == "ready" and frame["num_generated_tokens"] > 0


def test_every_process_streams_the_live_feed(two: ServerProcess) -> None:
    for _ in range(NUM_STREAMS):
        with new_client(two) as client, client.stream("GET", "/ui/events") as response:
            frame = next(events(response.iter_lines()))
            assert frame["state"] == "ready" and frame["workers"]


def test_processes_that_an_api_process_starts_have_none_of_its_sockets(two: ServerProcess) -> None:
    """A drain closes the listening socket, and the end of a process closes its connection: nobody else has a copy."""
    num_children = 0
    for pid in two.api_process_pids():
        sockets = {file for file in proc.open_files(pid) if file.startswith("socket:")}
        assert sockets
        for child in proc.children(pid):
            num_children += 1
            assert not sockets.intersection(proc.open_files(child)), proc.read(child, "cmdline")
    assert num_children >= 2


def test_memory_of_ended_requests_is_given_back(two: ServerProcess) -> None:
    """Logprobs of a whole answer are reserved until it is written: of both processes, against one limit."""
    for _ in range(6):  # each reserves 2 of 8 million
        with new_client(two) as client:
            body = {"prompts": [SKY] * 8, "max_tokens": 1, "logprobs": 5, "prompt_logprobs": 5}
            assert client.post("/generate", json=body).status_code == 200
    two.wait_until_at_rest()


# -- limits ------------------------------------------------------------------------------------------------------------

KEYS = """
[[key]]
key = "six"
tenant = "a"
requests_per_minute = 6
[[key]]
key = "few-tokens"
tenant = "b"
tokens_per_minute = 10
[[key]]
key = "free"
tenant = "c"
"""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("limited")
    (folder / "keys.toml").write_text(KEYS)
    flags = ("--api-keys-file", str(folder / "keys.toml"), "--max-num-seqs", "1", "--max-num-queued-reqs", "4")
    with serving("sim:step=10ms", *flags, *TWO, log=folder / "log") as server:
        server.client.headers.update(bearer("free"))
        yield server


def test_rate_limits_are_counted_over_all_processes(limited: ServerProcess) -> None:
    began_s = time.monotonic()
    statuses = [each.status_code for each in from_all(limited, "GET", "/version", headers=bearer("six"))]
    assert statuses[:6] == [200] * 6 and set(statuses) == {200, 429}
    num_refilled = (time.monotonic() - began_s) / 10
    assert statuses.count(200) <= 6 + num_refilled


def test_tokens_are_charged_to_the_key_over_all_processes(limited: ServerProcess) -> None:
    body = {"prompt": "0123456789", "max_tokens": 60, "ignore_eos": True}
    answers = from_all(limited, "POST", "/generate", headers=bearer("few-tokens"), json=body)
    assert [each.status_code for each in answers] == [200] + [429] * (NUM_STREAMS - 1)
    assert "tokens per minute" in answers[-1].text


def test_the_queue_is_one_for_all_processes(limited: ServerProcess) -> None:
    """One sequence runs, four wait, and no more are admitted, whichever process they come to."""
    done = threading.Event()
    numbers = {"admitted": 0, "refused": 0}
    changed = threading.Condition()

    def ask(number: int) -> None:
        body = {"prompt": f"number {number}", "max_tokens": 4000, "ignore_eos": True}
        headers = bearer("free")
        with (
            new_client(limited) as client,
            client.stream("POST", "/generate_stream", json=body, headers=headers) as response,
        ):
            with changed:
                numbers["admitted" if response.status_code == 200 else "refused"] += 1
                changed.notify_all()
            done.wait(timeout=60)

    def wait_for(condition: Any) -> None:
        with changed:
            assert changed.wait_for(condition, timeout=60), numbers

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        try:
            threads.submit(ask, 0)
            limited.wait_for_metric("servekit_num_requests_running", 1)
            for number in range(1, 12):
                threads.submit(ask, number)
            wait_for(lambda: sum(numbers.values()) == 12)
            assert numbers == {"admitted": 5, "refused": 7}
        finally:
            done.set()
    limited.wait_until_at_rest()


def test_keys_are_read_again_for_all_processes(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    with serving("sim:step=10ms", "--api-keys-file", str(keys), *TWO, log=tmp_path / "log") as server:
        assert {each.status_code for each in from_all(server, "GET", "/version", headers=bearer("new"))} == {401}
        keys.write_text(KEYS.replace('"free"', '"new"'))
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_log("it has 3 API keys")
        deadline = time.monotonic() + 60
        while {each.status_code for each in from_all(server, "GET", "/version", headers=bearer("new"))} != {200}:
            assert time.monotonic() < deadline
        assert {each.status_code for each in from_all(server, "GET", "/version", headers=bearer("free"))} == {401}


# -- processes that end ------------------------------------------------------------------------------------------------


def test_a_killed_api_process_loses_its_own_connections_only_and_is_replaced(tmp_path: Path) -> None:
    with serving("sim:step=10ms", *TWO, log=tmp_path / "log") as server:
        undisturbed = read_all(server)
        assert None not in undisturbed
        killed, other = server.api_process_pids()
        answers = read_all(server, lambda: os.kill(killed, signal.SIGKILL))
        assert answers.count(None) in range(1, NUM_STREAMS), "each process had some of the connections"
        assert [here or there for here, there in zip(answers, undisturbed, strict=True)] == undisturbed
        deadline = time.monotonic() + 60
        while len(pids := server.api_process_pids()) < 2 or killed in pids:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert other in pids
        server.client.close()
        server.client = httpx2.Client(base_url=server.url, timeout=120)
        server.wait_until_at_rest()
        assert read_all(server) == undisturbed
        aborted = 'servekit_request_success_total{finished_reason="abort"'
        (line,) = (each for each in server.client.get("/metrics").text.splitlines() if each.startswith(aborted))
        assert 1 <= float(line.split()[-1]) <= answers.count(None), (
            "some may have ended before their clients had read it"
        )


def test_api_processes_end_with_a_killed_engine_process(tmp_path: Path) -> None:
    with serving("sim:step=10ms", *TWO, log=tmp_path / "log") as server:
        pids = [*server.api_process_pids(), *server.worker_pids()]
        assert len(pids) == 3
        server.process.kill()
        proc.wait_until_gone(*pids)


def test_a_drain_ends_with_all_answers_complete(tmp_path: Path) -> None:
    with serving("sim:step=10ms", *TWO, log=tmp_path / "log") as server:
        undisturbed = read_all(server)
        pids = [*server.api_process_pids(), *server.worker_pids()]
        assert read_all(server, lambda: server.process.send_signal(signal.SIGTERM)) == undisturbed
        assert server.process.wait(timeout=60) == 0
        proc.wait_until_gone(*pids)
        assert "Traceback" not in server.log.read_text()


def test_a_draining_server_refuses_new_requests_in_every_process(tmp_path: Path) -> None:
    with serving("sim:step=20ms", *TWO, log=tmp_path / "log") as server:
        clients = [httpx2.Client(base_url=server.url, timeout=120) for _ in range(NUM_STREAMS)]

        def refuse() -> None:
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_log("draining")
            for client in clients:
                with suppress(httpx2.TransportError):  # it was idle for too long
                    answer = client.post("/generate", json={"prompt": "a"})
                    assert answer.status_code == 503 and "shutting down" in answer.text

        for client in clients:
            assert client.get("/ready").status_code == 200
        answers = read_all(server, refuse)
        assert None not in answers
        assert server.process.wait(timeout=60) == 0


def test_a_second_signal_ends_all_processes(tmp_path: Path) -> None:
    with serving("sim:step=50ms", *TWO, log=tmp_path / "log") as server:
        pids = [*server.api_process_pids(), *server.worker_pids()]

        def end() -> None:
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_log("draining")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=60) == 0

        streams = Streams(server)
        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            reading = [threads.submit(streams.read, number) for number in range(NUM_STREAMS)]
            streams.wait_until_all_have_tokens()
            end()
            for each in reading:
                with suppress(AssertionError):  # an error event, or a stream without its end
                    each.result()
        proc.wait_until_gone(*pids)


def test_a_second_signal_ends_an_api_process_that_is_stopped(tmp_path: Path) -> None:
    with serving("sim:step=50ms", *TWO, log=tmp_path / "log") as server:
        pids = [*server.api_process_pids(), *server.worker_pids()]
        os.kill(pids[0], signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        proc.wait_until_gone(*pids)
        assert "sent no heartbeat" not in server.log.read_text(), "it was killed for its silence only, after 30 s"


def test_a_model_that_cannot_be_loaded_ends_the_server_with_exit_code_2() -> None:
    command = [sys.executable, "-m", "servekit", "serve", "/nowhere", "--port", "0", *TWO]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "/nowhere" in done.stderr


def test_two_servers_do_not_share_a_port_by_mistake(two: ServerProcess) -> None:
    command = [sys.executable, "-m", "servekit", "serve", "sim:instant", "--port", str(two.port), *TWO]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "cannot listen on" in done.stderr
