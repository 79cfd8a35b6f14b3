"""Deadlines and priorities, as a client sees them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess, serving
from tests.support.timing import again_if_late, assert_on_time

DEADLINE_MS = 300  # in 700 ms, the demo model may write as many tokens as its context has room for


@again_if_late
def test_answer_ends_at_its_deadline_with_the_text_so_far(server: ServerProcess) -> None:
    started = time.monotonic()
    answer = server.generate("Tell me a story.", deadline_ms=DEADLINE_MS, ignore_eos=True)
    elapsed_s = time.monotonic() - started
    server.wait_until_at_rest()
    assert answer["finish_reason"] == "deadline" and answer["stop_reason"] is None
    assert answer["usage"]["completion_tokens"] < 1900 and elapsed_s >= DEADLINE_MS / 1e3
    assert_on_time(answer["usage"]["completion_tokens"] > 0, "the first token came before the deadline")
    assert answer["generated_text"]


def test_stream_reports_a_passed_deadline(server: ServerProcess) -> None:
    *events, last = server.stream("Tell me a story.", deadline_ms=DEADLINE_MS, ignore_eos=True)
    assert last["finish_reason"] == "deadline" and last["token"] is None
    assert last["generated_text"] == "".join(event["token"]["text"] for event in events)
    assert last["usage"]["completion_tokens"] == len(events) == last["index"]


def test_deadline_that_is_met_changes_nothing(server: ServerProcess) -> None:
    plain = server.generate("What color is the sky?")
    limited = server.generate("What color is the sky?", ttft_ms=60_000, deadline_ms=60_000)
    assert (plain["generated_text"], limited["finish_reason"]) == (limited["generated_text"], "stop")


@pytest.mark.parametrize("fields", [{"ttft_ms": 0}, {"deadline_ms": "soon"}, {"priority": 5000}])
def test_invalid_deadlines_and_priorities_are_refused(server: ServerProcess, fields: dict[str, object]) -> None:
    response = server.client.post("/generate", json={"prompt": "a", **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] in fields


def test_priority_is_refused_with_other_policies(server: ServerProcess) -> None:
    response = server.client.post("/generate", json={"prompt": "a", "priority": -1})
    assert response.status_code == 400
    assert "--scheduling-policy priority" in response.json()["error"]["message"]


def test_with_one_slot_requests_run_by_priority_and_end_at_their_deadline(tmp_path: Path) -> None:
    arguments = ["--model", "sim:step=5ms", "--max-num-seqs", "1", "--scheduling-policy", "priority"]
    with serving(*arguments, log=tmp_path / "log") as small, ThreadPoolExecutor() as pool:
        occupant = pool.submit(small.generate, "Tell me a story.", max_tokens=600, ignore_eos=True)
        small.wait_for_metric("servekit_num_requests_running", 1)
        finished: list[str] = []

        def ask(name: str, max_tokens: int = 2, **fields: object) -> dict[str, object]:
            answer = small.generate("Count from 3 to 9.", max_tokens=max_tokens, **fields)
            finished.append(name)
            return answer

        impatient = pool.submit(ask, "impatient", ttft_ms=300)
        # It ends half a second after the urgent one: the threads of this test may be late by less.
        calm = pool.submit(ask, "calm", max_tokens=100, priority=5)
        small.wait_for_metric("servekit_num_requests_waiting", 1)  # the impatient one has left
        urgent = pool.submit(ask, "urgent", priority=-5)
        assert urgent.result()["finish_reason"] == calm.result()["finish_reason"] == "length"
        assert impatient.result()["finish_reason"] == "deadline"
        assert impatient.result()["usage"]["completion_tokens"] == 0  # type: ignore[index]
        assert occupant.result()["usage"]["completion_tokens"] == 600
        assert finished == ["impatient", "urgent", "calm"]


def test_basic_generate_refuses_deadlines(server: ServerProcess) -> None:
    response = server.client.post("/basic_generate", json={"prompt": "a", "deadline_ms": 5})
    assert response.status_code == 400 and response.json()["error"]["param"] == "deadline_ms"


def test_unreachable_itl_target_is_logged_once(tmp_path: Path) -> None:
    with serving("--model", "sim:step=5ms", "--itl-target-ms", "0.01", log=tmp_path / "log") as slow:
        for _ in range(2):
            assert slow.generate("What color is the sky?", max_tokens=6)["usage"]["completion_tokens"] == 6
        assert slow.log.read_text().count("cannot be met") == 1
        assert slow.metric("servekit_prefill_limit_tokens") == 16
