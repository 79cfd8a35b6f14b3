"""Claims about watching a real server: what a frame tells, to whom, and that it never keeps the server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from servekit.api.live import MOST_OF_A_TENANT
from servekit.live_view import FENCED, SHARED, LiveState
from tests.server_process import ServerProcess, serving

CANARY = "a canary that no viewer hears of"
KEYS = """
[[key]]
key = "one"
tenant = "first"
[[key]]
key = "two"
tenant = "second"
"""
# So slow that no stream comes to its end while it is looked at, nor an outage before a viewer has seen it.
MODEL = "sim:step=50ms,load=500ms"
NUM_BLOCKS = 1024
LIMIT_S = 30


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With two tenants; the client is of the first."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "keys.toml").write_text(KEYS)
    flags = ("--model", MODEL, "--num-kv-blocks", str(NUM_BLOCKS), "--api-keys-file", str(folder / "keys.toml"))
    with serving(*flags, log=folder / "log") as server:
        server.client.headers["authorization"] = "Bearer one"
        yield server
        assert "Traceback" not in server.log.read_text()


def look(server: ServerProcess, key: str = "one") -> LiveState:
    response = server.client.get("/ui/state", headers={"authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=LiveState)


def wait_for(server: ServerProcess, condition: Callable[[LiveState], bool]) -> LiveState:
    deadline = time.monotonic() + LIMIT_S
    while not condition(state := look(server)):
        assert time.monotonic() < deadline, state
        time.sleep(0.02)
    return state


@contextmanager
def streaming(server: ServerProcess, request_id: str, **fields: Any) -> Iterator[Iterator[str]]:
    """Lines of a stream that is far from its end until it is left."""
    body = {"model": MODEL, "prompt": CANARY, "max_tokens": 1500, "stream": True, **fields}
    with server.client.stream(
        "POST", "/v1/completions", json=body, headers={"x-request-id": request_id}, timeout=LIMIT_S
    ) as answer:
        assert answer.status_code == 200
        yield answer.iter_lines()


@contextmanager
def watching(server: ServerProcess) -> Iterator[Iterator[tuple[int, LiveState]]]:
    """Its frames, as long as somebody holds them: the client takes leave with what it reads."""
    with server.client.stream("GET", "/ui/events", timeout=LIMIT_S) as response:
        assert response.status_code == 200
        yield read_frames(response.iter_lines())


def read_frames(lines: Iterator[str]) -> Iterator[tuple[int, LiveState]]:
    assert [next(lines), next(lines)] == ["retry: 1000", ""]
    for line in lines:
        assert line == "event: state"
        number = int(next(lines).removeprefix("id: "))
        yield number, msgspec.json.decode(next(lines).removeprefix("data: "), type=LiveState)
        assert next(lines) == ""


# -- what is told ------------------------------------------------------------------------------------------------------


def test_sequences_are_seen_while_they_run_and_when_they_have_ended(watched: ServerProcess) -> None:
    before = look(watched)
    with streaming(watched, "mine", n=8) as lines:
        next(lines)
        state = wait_for(
            watched,
            lambda state: len(state.sequences) == 8 and all(each.num_output_tokens > 16 for each in state.sequences),
        )
        assert state.state == "ready" and state.workers[0].state == "serving"
        assert state.limits is not None and state.limits.num_blocks == NUM_BLOCKS
        assert state.num_running == 8 and state.num_waiting == 0
        ids = {each.sequence_id for each in state.sequences}
        assert len(ids) == 8 and all(each.request_id == "mine" for each in state.sequences)
        for each in state.sequences:
            assert each.state == "decode" and each.num_prompt_tokens == len(CANARY) and each.max_tokens == 1500
            assert each.first_token_s is not None and each.last_token_s is not None
            assert each.arrival_s <= each.first_token_s < each.last_token_s <= state.now_s
        kinds = [kind for kind, length in state.cells for _ in range(length)]
        assert state.blocks_per_cell == 1 and len(kinds) == NUM_BLOCKS
        assert {kind for kind in kinds if kind >= 0} == ids and kinds.count(SHARED) == (len(CANARY) - 1) // 16
        assert state.num_generated_tokens - before.num_generated_tokens >= 8 * 17
        assert state.ttft_p50_s is not None and state.ttft_p50_s > 0
        steps = [step for step in state.steps if step.step_id >= before.num_steps]
        assert [step.step_id for step in state.steps] == sorted({step.step_id for step in state.steps})
        assert max(step.num_decode_tokens for step in steps) == 8
        assert any(step.duration_s is not None and step.duration_s >= 0.05 for step in steps)
    state = wait_for(watched, lambda state: not state.sequences)
    ends = [end for end in state.ended if end.sequence_id in ids]
    assert len(ends) == 8 and {end.finish_reason for end in ends} == {"abort"}
    assert all(end.num_output_tokens >= 17 for end in ends)
    state = wait_for(watched, lambda state: not any(kind >= 0 or kind in (FENCED, SHARED) for kind, _ in state.cells))
    assert state.num_free_blocks + state.num_cached_blocks == NUM_BLOCKS


def test_no_word_of_prompts_and_answers_is_told(watched: ServerProcess) -> None:
    events = watched.client.stream("GET", "/ui/events", timeout=LIMIT_S)
    with streaming(watched, "secretive") as lines, events as response:
        said = ""
        for line in lines:
            if line.startswith("data: {"):
                said += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if len(said) >= 24:
                break
        heard = ""
        for number, line in enumerate(response.iter_lines()):
            heard += line + "\n"
            if number > 20:
                break
        heard += watched.client.get("/ui/state").text
    assert "secretive" in heard, "it was on the stage"
    for text in (CANARY, said):
        for start in range(len(text) - 8):
            part = text[start : start + 8]
            assert part not in heard and json.dumps(part)[1:-1] not in heard


def test_another_tenant_sees_that_something_runs_and_not_whose_it_is(watched: ServerProcess) -> None:
    with streaming(watched, "mine-alone") as lines:
        next(lines)
        ours = wait_for(watched, lambda state: [each.request_id for each in state.sequences] == ["mine-alone"])
        theirs = look(watched, "two")
        assert [each.request_id for each in theirs.sequences] == [""]
        assert theirs.sequences[0].sequence_id == ours.sequences[0].sequence_id
    wait_for(watched, lambda state: not state.sequences)


def test_without_a_key_nothing_is_told_and_the_page_is_there(watched: ServerProcess) -> None:
    with httpx2.Client(base_url=watched.url) as stranger:
        for path in ("/ui/state", "/ui/events"):
            for key in ({}, {"authorization": "Bearer three"}):
                answer = stranger.get(path, headers=key)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        page = stranger.get("/", headers={"accept": "text/html"})
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        assert stranger.get("/").status_code == 401
        known = {"if-none-match": page.headers["etag"]}
        again = stranger.get("/", headers={"accept": "text/html", **known})
        assert (again.status_code, again.content) == (304, b"")
        head = stranger.head("/ui/app.js")
        assert head.status_code == 200 and int(head.headers["content-length"]) == len(
            stranger.get("/ui/app.js").content
        )


# -- the stream --------------------------------------------------------------------------------------------------------


def test_frames_come_while_something_happens_each_whole_and_in_order(watched: ServerProcess) -> None:
    with streaming(watched, "moving") as lines, watching(watched) as frames:
        next(lines)
        told = []
        deadline = time.monotonic() + LIMIT_S
        for number, state in frames:
            assert time.monotonic() < deadline
            told.append((number, state.now_s, state.num_generated_tokens))
            assert sum(length for _, length in state.cells) == NUM_BLOCKS and state.steps
            if len(told) >= 5 and told[0][2] < told[-1][2]:
                break
        assert told == sorted(told) and len({number for number, *_ in told}) == len(told)
        assert told[-1][1] - told[0][1] >= 0.35, "ten a second at most"
    wait_for(watched, lambda state: not state.sequences)


def test_a_viewer_that_leaves_costs_nothing_any_more(watched: ServerProcess) -> None:
    num_tasks = "servekit_api_event_loop_tasks"
    with watching(watched) as frames:
        next(frames)
        meanwhile = watched.metric(num_tasks)
    deadline = time.monotonic() + LIMIT_S
    while watched.metric(num_tasks) > meanwhile - 2:  # the feed's and the stream's
        assert time.monotonic() < deadline
        time.sleep(0.02)


def may_watch(server: ServerProcess) -> bool:
    with server.client.stream("GET", "/ui/events", timeout=LIMIT_S) as response:
        return response.status_code == 200


def test_one_viewer_too_many_is_told_so_and_may_come_when_another_has_gone(watched: ServerProcess) -> None:
    with ExitStack() as stack:
        viewers = [stack.enter_context(watching(watched)) for _ in range(MOST_OF_A_TENANT - 1)]
        assert all(next(viewer) for viewer in viewers)
        with watching(watched) as last:
            assert next(last)
            with watched.client.stream("GET", "/ui/events") as refused:
                assert refused.status_code == 503
                assert "8 of your tenant are watching" in json.loads(refused.read())["error"]["message"]
            assert int(refused.headers["retry-after"]) > 0
            with watched.client.stream("GET", "/ui/events", headers={"authorization": "Bearer two"}) as of_another:
                assert of_another.status_code == 200
            assert look(watched).state == "ready", "which anybody may ask"
        deadline = time.monotonic() + LIMIT_S
        while not may_watch(watched):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_viewer_sees_that_the_worker_is_lost_and_that_there_is_another(watched: ServerProcess) -> None:
    with watching(watched) as frames:
        assert next(frames)[1].state == "ready"
        (worker,) = watched.worker_pids()
        os.kill(worker, signal.SIGKILL)
        states = []
        deadline = time.monotonic() + LIMIT_S
        for _, state in frames:
            assert time.monotonic() < deadline, states
            states.append(state.state)
            if "recovering" in states and states[-1] == "ready":
                break
        assert set(states) <= {"ready", "recovering"}
        assert next(frames)[1].state == "ready", "and it goes on"


def connect_viewer(server: ServerProcess) -> socket.socket:
    """One that has begun to watch, and reads no more unless somebody has it read."""
    viewer = socket.socket()
    viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
    viewer.settimeout(LIMIT_S)
    viewer.connect(("127.0.0.1", server.port))
    viewer.sendall(b"GET /ui/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert viewer.recv(12) == b"HTTP/1.1 200"
    return viewer


def test_a_drain_does_not_wait_for_a_viewer_that_does_not_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ("--model", MODEL, "--shutdown-timeout", "600", "--send-timeout", "600")
    with serving(*flags, log=log) as server, connect_viewer(server), watching(server) as told:
        with streaming(server, "many", n=64) as lines:
            next(lines)
            num_bytes = 0  # of frames to who reads, which are more than buffers hold for who does not
            while num_bytes < 400_000:
                num_bytes += len(msgspec.json.encode(next(told)[1]))
        wait_for(server, lambda state: not state.sequences)
        time.sleep(1)  # the request that asked this may not have ended yet; two are asked about below
        server.process.send_signal(signal.SIGTERM)
        assert [state.state for _, state in told][-1] == "draining", "who reads is told"
        assert server.process.wait(LIMIT_S) == 0
    said = log.read_text()
    (num_requests,) = re.findall(r"draining: (\d+) requests", said)
    assert int(num_requests) < 2, "viewers are none"
    assert "Traceback" not in said and "exceeded" not in said


def test_a_drain_is_told_and_does_not_wait_for_who_watches(tmp_path: Path) -> None:
    """Only for who is being answered, which those who watch can see."""
    with serving("--model", MODEL, "--shutdown-timeout", "600", log=tmp_path / "log") as server:
        with streaming(server, "last", max_tokens=50) as lines, watching(server) as told:
            next(lines)
            next(told)
            server.process.send_signal(signal.SIGTERM)
            states = [state.state for _, state in told]
            assert states[-1] == "draining", states
            assert any("[DONE]" in line for line in lines)
        assert server.process.wait(60) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
