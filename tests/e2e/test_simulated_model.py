"""A server with a simulated device, as a client sees it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

from servekit.protocol.sampling_params import SamplingParams
from servekit.simulation.worker import NaiveReference
from tests.support import proc
from tests.support.server_process import ServerProcess, free_port, num_listening, serving
from tests.support.timing import again_if_late, assert_within

ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
PROMPT = "Who was the first to reach the South Pole, é?"
# With several API processes, each of them has a listening socket.
AS_ONE_AND_TWO_PROCESSES = pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("simulated") / "log"
    with serving("--model", "sim:step=20ms", "--num-kv-blocks", "40", log=log) as started:
        yield started


def answer_to(prompt: str, num_tokens: int) -> str:
    return bytes(NaiveReference().output(prompt.encode(), SamplingParams(max_tokens=num_tokens))).decode()


def test_simulated_model_answers_by_its_rule_in_every_api(server: ServerProcess) -> None:
    expected = answer_to(PROMPT, 24)
    events = server.stream(PROMPT, max_tokens=24)
    assert "".join(event["token"]["text"] for event in events) == events[-1]["generated_text"] == expected
    whole = server.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 24})
    assert whole.json()["choices"][0]["text"] == expected
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    chat = server.client.post("/v1/chat/completions", json=asked)
    assert chat.json()["choices"][0]["message"]["content"] == answer_to("user: hi\nassistant: ", 9)


def test_the_server_predicts_requests_and_compares_with_what_came_of_them(server: ServerProcess) -> None:
    for _ in range(3):
        server.generate(PROMPT, max_tokens=4, ignore_eos=True)
    deadline_s = time.monotonic() + 60
    while not server.metric("servekit_predicted_first_tokens_total"):
        assert time.monotonic() < deadline_s
        server.generate(PROMPT, max_tokens=4, ignore_eos=True)
    assert 0.0 < server.metric("servekit_first_token_prediction_error_ratio") < 10.0


def test_small_kv_cache_gives_the_same_answers(server: ServerProcess) -> None:
    """640 tokens for 1,920: most requests wait, or are preempted and computed again."""
    prompts = [f"{PROMPT} And the one after that? {number}" for number in range(16)]
    answers = server.client.post("/generate", json={"prompts": prompts, "max_tokens": 48}, timeout=60).json()
    assert answers["generated_texts"] == [answer_to(prompt, 48) for prompt in prompts]


def check_explanation(found: dict[str, Any]) -> None:
    """The intervals follow each other from the beginning to the end, and the causes sum to the wall time."""
    intervals = found["intervals"]
    assert intervals[0]["start_s"] == 0.0 and intervals[-1]["end_s"] == pytest.approx(found["wall_time_s"], abs=1e-9)
    assert all(one["end_s"] == other["start_s"] for one, other in pairwise(intervals))
    assert sum(found["causes"].values()) == pytest.approx(found["wall_time_s"], abs=1e-6)


def test_a_request_that_has_ended_is_explained(server: ServerProcess) -> None:
    began_s = time.monotonic()
    with ThreadPoolExecutor(3) as threads:
        others = [threads.submit(server.generate, f"{PROMPT} {number}", max_tokens=12) for number in range(2)]
        headers = {"X-Request-Id": "explained"}
        body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
        assert server.client.post("/generate", json=body, headers=headers).status_code == 200
        for each in others:
            each.result()
    passed_s = time.monotonic() - began_s
    found = server.client.get("/v1/requests/explained/explain").json()
    check_explanation(found)
    assert found["is_finished"] and found["finish_reason"] == "length" and found["request_id"] == "explained"
    assert 11 * 0.02 <= found["wall_time_s"] <= passed_s
    assert {"body", "tokenizing", "prefill", "decode", "writing"} <= found["causes"].keys()
    decodes = [each for each in found["intervals"] if each["cause"] == "decode"]
    assert sum(each["steps"] for each in decodes) == 11
    assert found["causes"]["decode"] >= 0.8 * 11 * 0.02


def test_a_request_that_runs_is_explained_so_far_and_an_unknown_one_is_not(server: ServerProcess) -> None:
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    with server.client.stream("POST", "/generate_stream", json=body, headers={"X-Request-Id": "running"}) as stream:
        lines = stream.iter_lines()
        for _ in zip(range(8), lines, strict=False):
            pass
        found = server.client.get("/v1/requests/running/explain").json()
        check_explanation(found)
        assert not found["is_finished"] and found["intervals"][-1]["cause"] in ("decode", "writing")
        assert any(each["cause"] == "decode" and each["steps"] for each in found["intervals"])
    missing = server.client.get("/v1/requests/unheard-of/explain")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "request_not_found"


def test_answers_explain_themselves_where_that_is_asked_for(server: ServerProcess) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 4, "explain": True}
    check_explanation(server.generate(**asked)["explanation"])
    check_explanation(server.stream(**asked)[-1]["explanation"])
    assert "explanation" not in server.generate(PROMPT, max_tokens=1)
    check_explanation(server.client.post("/v1/completions", json=asked).json()["explanation"])
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "explain": True}
    explained = server.client.post("/v1/chat/completions", json=chat).json()["explanation"]
    check_explanation(explained)
    assert "template" in explained["causes"]
    for path, body in (("/v1/completions", asked), ("/v1/chat/completions", chat)):
        with server.client.stream("POST", path, json={**body, "stream": True}) as response:
            chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
        assert chunks[-1]["choices"] == [] and not any("explanation" in chunk for chunk in chunks[:-1])
        check_explanation(chunks[-1]["explanation"])


@again_if_late
def test_a_step_takes_as_long_as_it_should(server: ServerProcess) -> None:
    names = [f"servekit_step_duration_seconds_{name}" for name in ("sum", "count")]
    before = [server.metric(name) for name in names]
    server.generate(PROMPT, max_tokens=20)
    total_s, num_steps = (server.metric(name) - known for name, known in zip(names, before, strict=True))
    assert total_s / num_steps >= 0.02
    assert_within(0.03, total_s / num_steps)


@again_if_late
def test_metrics_of_an_answer_add_up(server: ServerProcess) -> None:
    (*others, last), whole = server.stream(PROMPT, max_tokens=10), server.generate(PROMPT, max_tokens=10)
    for metrics in (last["metrics"], whole["metrics"]):
        assert 0 <= metrics["queue_time_ms"] <= metrics["time_to_first_token_ms"] - 20
        # Nine steps of 20 ms, less what the first token was noticed later than the last.
        decode_ms = metrics["total_time_ms"] - metrics["time_to_first_token_ms"]
        assert_within(0.010, 0.180 - decode_ms / 1000, "the first token was noticed late")
        assert_within(0.300, decode_ms / 1000)
    assert not any("metrics" in event for event in others)


def test_simulated_worker_does_not_import_torch(server: ServerProcess) -> None:
    (worker,) = server.worker_pids()
    assert "python" in (maps := proc.read(worker, "maps")) and "torch" not in maps


def test_invalid_spec_exits_with_2() -> None:
    command = [sys.executable, "-m", "servekit", "serve", "--port", "0", "--model", "sim:speed=5ms"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and "'speed=5ms' is neither NAME=TIME" in ended.stderr


@AS_ONE_AND_TWO_PROCESSES
def test_servers_that_share_a_port_share_its_connections_while_they_serve(processes: int, tmp_path: Path) -> None:
    """The kernel distributes connections without checking readiness: a server that does not serve must not listen."""
    port = free_port()
    with ExitStack() as stack:

        def start(name: str) -> ServerProcess:
            flags = ("--model", "sim:step=5ms,load=1s", "--reuse-port", "--api-processes", str(processes))
            return stack.enter_context(serving(*flags, "--served-model-name", name, log=tmp_path / name, port=port))

        def who_answers() -> str:
            answer = httpx2.get(f"http://127.0.0.1:{port}/v1/models")
            assert answer.status_code == 200, answer.text
            return str(answer.json()["data"][0]["id"])

        first, second = start("first"), start("second")
        deadline = time.monotonic() + 120
        while {who_answers() for _ in range(20)} != {"first", "second"}:
            assert time.monotonic() < deadline, "only one of them answers"
        with first.client.stream("POST", "/generate_stream", json=ENDLESS) as stream:
            lines = stream.iter_lines()
            next(lines)
            for server in (first, second):  # whose stream this is, chance has decided
                server.process.terminate()
            while True:
                assert time.monotonic() < deadline, "it still listens"
                try:
                    who_answers()  # with 200, whoever is heard at all
                except httpx2.ConnectError:
                    break
            assert any(line.startswith("data") for line in lines), "who drains serves those who are in"


@AS_ONE_AND_TWO_PROCESSES
def test_no_request_fails_while_one_server_of_a_shared_port_ends(processes: int, tmp_path: Path) -> None:
    """Some clients connect for each request, and others keep their connections. None repeats a request."""
    port, failures, is_over = free_port(), list[str](), threading.Event()
    statuses: dict[bool, list[int]] = {False: [], True: []}

    def keep_asking(keeps_alive: bool) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        while not is_over.is_set():
            try:
                connection.request("POST", "/generate", json.dumps({"prompt": "x", "max_tokens": 2}))
                with connection.getresponse() as answer:
                    answer.read()
                    statuses[keeps_alive].append(answer.status)
            except (OSError, HTTPException) as error:
                failures.append(repr(error))
                connection.close()
            if not keeps_alive:
                connection.close()
        connection.close()

    with ExitStack() as stack:
        flags = ["--model", "sim:step=2ms", "--reuse-port", "--log-level", "warning", "--api-processes", str(processes)]
        servers = [stack.enter_context(serving(*flags, log=tmp_path / f"{i}", port=port)) for i in range(2)]
        deadline = time.monotonic() + 300  # of the whole test
        while num_listening(port) < 2 * processes:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        clients = [threading.Thread(target=keep_asking, args=(number % 2 == 0,)) for number in range(8)]
        for client in clients:
            client.start()
        while min(map(len, statuses.values())) < 50:
            assert not failures and time.monotonic() < deadline
            time.sleep(0.05)
        servers[0].process.terminate()
        assert servers[0].process.wait(60) == 0
        enough = [len(each) + 20 for each in statuses.values()]
        while any(len(each) < number for each, number in zip(statuses.values(), enough, strict=True)):
            assert not failures and time.monotonic() < deadline
            time.sleep(0.05)
        is_over.set()
        for client in clients:
            client.join()
    assert not failures and set(statuses[False]) == set(statuses[True]) == {200}


@AS_ONE_AND_TWO_PROCESSES
def test_server_with_a_shared_port_that_is_ended_while_loading_never_listens(processes: int, tmp_path: Path) -> None:
    flags = ("--model", "sim:load=60s", "--reuse-port", "--api-processes", str(processes))
    server = ServerProcess(*flags, log=tmp_path / "log")
    try:
        server.wait_for_log(": loading sim:load=60s")
        server.process.terminate()
        while server.process.poll() is None:
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.1", server.port))
        assert server.process.returncode == 0
    finally:
        server.client.close()
        server.process.kill()
        server.process.wait()
