"""The live feed of a real server: what frames contain, for which tenant, and that a drain does not wait for viewers."""

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

from servekit.api.routes.live import MAX_VIEWERS_OF_TENANT
from servekit.observability.live_frames import FENCED, SHARED, LiveState
from tests.support.server_process import ServerProcess, serving

CANARY = "a canary that no viewer sees"
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
LIMIT_S = 60


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two tenants; the client belongs to the first."""
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
    """Yield the lines of a stream that does not end by itself during a test."""
    body = {"model": MODEL, "prompt": CANARY, "max_tokens": 1500, "stream": True, **fields}
    with server.client.stream(
        "POST", "/v1/completions", json=body, headers={"x-request-id": request_id}, timeout=LIMIT_S
    ) as answer:
        assert answer.status_code == 200
        yield answer.iter_lines()


@contextmanager
def watching(server: ServerProcess) -> Iterator[Iterator[tuple[int, LiveState]]]:
    """Yield the frames of one viewer. It disconnects at the end."""
    with server.client.stream("GET", "/ui/events", timeout=LIMIT_S) as response:
        assert response.status_code == 200
        yield read_frames(response.iter_lines())


def read_frames(lines: Iterator[str]) -> Iterator[tuple[int, LiveState]]:
    assert [next(lines), next(lines)] == ["retry: 1000", ""]
    for line in lines:
        number = int(line.removeprefix("id: "))
        assert next(lines) == "event: state"
        yield number, msgspec.json.decode(next(lines).removeprefix("data: "), type=LiveState)
        assert next(lines) == ""


# -- what a frame says -------------------------------------------------------------------------------------------------


def test_frames_show_running_and_ended_sequences(watched: ServerProcess) -> None:
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


def test_frames_contain_no_text_of_prompts_and_answers(watched: ServerProcess) -> None:
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


def test_other_tenants_see_sequences_without_request_ids(watched: ServerProcess) -> None:
    with streaming(watched, "mine-alone") as lines:
        next(lines)
        ours = wait_for(watched, lambda state: [each.request_id for each in state.sequences] == ["mine-alone"])
        theirs = look(watched, "two")
        assert [each.request_id for each in theirs.sequences] == [""]
        assert theirs.sequences[0].sequence_id == ours.sequences[0].sequence_id
    wait_for(watched, lambda state: not state.sequences)


def test_feed_needs_a_key_and_the_console_page_does_not(watched: ServerProcess) -> None:
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


def test_frames_are_complete_and_in_order_at_a_bounded_rate(watched: ServerProcess) -> None:
    with streaming(watched, "moving") as lines, watching(watched) as frames:
        next(lines)
        seen = []
        deadline = time.monotonic() + LIMIT_S
        for number, state in frames:
            assert time.monotonic() < deadline
            seen.append((number, state.now_s, state.num_generated_tokens))
            assert sum(length for _, length in state.cells) == NUM_BLOCKS and state.steps
            if len(seen) >= 5 and seen[0][2] < seen[-1][2]:
                break
        assert seen == sorted(seen) and len({number for number, *_ in seen}) == len(seen)
        assert seen[-1][1] - seen[0][1] >= 0.35, "five a second at most"
    wait_for(watched, lambda state: not state.sequences)


def test_viewer_that_disconnects_leaves_no_tasks(watched: ServerProcess) -> None:
    num_tasks = "servekit_api_event_loop_tasks"
    with watching(watched) as frames:
        next(frames)
        meanwhile = watched.metric(num_tasks)
    deadline = time.monotonic() + LIMIT_S
    while watched.metric(num_tasks) > meanwhile - 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def may_watch(server: ServerProcess) -> bool:
    with server.client.stream("GET", "/ui/events", timeout=LIMIT_S) as response:
        return response.status_code == 200


def wait_until_one_may_watch(server: ServerProcess) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not may_watch(server):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_viewer_over_the_limit_gets_503_until_another_has_left(watched: ServerProcess) -> None:
    with ExitStack() as stack:
        viewers = [stack.enter_context(watching(watched)) for _ in range(MAX_VIEWERS_OF_TENANT - 1)]
        assert all(next(viewer) for viewer in viewers)
        with watching(watched) as last:
            assert next(last)
            with watched.client.stream("GET", "/ui/events") as refused:
                assert refused.status_code == 503
                assert "your tenant has 8 viewers" in json.loads(refused.read())["error"]["message"]
            assert int(refused.headers["retry-after"]) > 0
            with watched.client.stream("GET", "/ui/events", headers={"authorization": "Bearer two"}) as of_another:
                assert of_another.status_code == 200
            assert look(watched).state == "ready", "which anybody may ask"
        wait_until_one_may_watch(watched)
    wait_until_one_may_watch(
        watched
    )  # the next test needs a place, and the server may not have seen all of these leave


def test_viewer_sees_the_loss_and_the_replacement_of_the_worker(watched: ServerProcess) -> None:
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
    """Return a viewer's connection that is not read."""
    viewer = socket.socket()
    viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
    viewer.settimeout(LIMIT_S)
    viewer.connect(("127.0.0.1", server.port))
    viewer.sendall(b"GET /ui/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert viewer.recv(12) == b"HTTP/1.1 200"
    return viewer


def test_drain_does_not_wait_for_viewers_that_do_not_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ("--model", MODEL, "--shutdown-timeout", "600", "--send-timeout", "600")
    with ExitStack() as stack:
        server = stack.enter_context(serving(*flags, log=log))
        silent = [stack.enter_context(connect_viewer(server)) for _ in range(4)]
        frames = stack.enter_context(watching(server))
        with streaming(server, "many", n=64) as lines:
            next(lines)
            num_bytes = 0  # of frames to who reads, which are more than buffers hold for who does not
            while num_bytes < 400_000:
                num_bytes += len(msgspec.json.encode(next(frames)[1]))
        wait_for(server, lambda state: not state.sequences)
        server.process.send_signal(signal.SIGTERM)
        assert [state.state for _, state in frames][-1] == "draining", "who reads gets the last frame"
        assert server.process.wait(LIMIT_S) == 0
    said = log.read_text()
    (num_requests,) = re.findall(r"draining: (\d+) requests", said)
    assert int(num_requests) < len(silent), "viewers are none; the last requests may not have ended"
    assert "Traceback" not in said and "exceeded" not in said


def test_drain_sends_viewers_a_last_frame_and_waits_for_answers_only(tmp_path: Path) -> None:
    """It waits for running answers only, and viewers see that it drains."""
    with serving("--model", MODEL, "--shutdown-timeout", "600", log=tmp_path / "log") as server:
        with streaming(server, "last", max_tokens=50) as lines, watching(server) as frames:
            next(lines)
            next(frames)
            server.process.send_signal(signal.SIGTERM)
            states = [state.state for _, state in frames]
            assert states[-1] == "draining", states
            assert any("[DONE]" in line for line in lines)
        assert server.process.wait(60) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
