"""Claims about deadlines and priorities, made by a real client."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server_process import ServerProcess, serving


def test_an_answer_ends_at_its_deadline_and_keeps_what_it_has(server: ServerProcess) -> None:
    started = time.monotonic()
    answer = server.generate("Tell me a story.", deadline_ms=300, ignore_eos=True)
    elapsed_s = time.monotonic() - started
    assert answer["finish_reason"] == "deadline" and answer["stop_reason"] is None
    assert 0 < answer["usage"]["completion_tokens"] < 1900 and answer["generated_text"]
    assert 0.3 <= elapsed_s < 3
    server.wait_until_at_rest()


def test_a_stream_says_that_its_deadline_passed(server: ServerProcess) -> None:
    *events, last = server.stream("Tell me a story.", deadline_ms=300, ignore_eos=True)
    assert last["finish_reason"] == "deadline" and last["token"] is None
    assert last["generated_text"] == "".join(event["token"]["text"] for event in events)
    assert last["usage"]["completion_tokens"] == len(events) == last["index"]


def test_a_deadline_that_is_met_changes_nothing(server: ServerProcess) -> None:
    plain = server.generate("What color is the sky?")
    limited = server.generate("What color is the sky?", ttft_ms=60_000, deadline_ms=60_000)
    assert (plain["generated_text"], limited["finish_reason"]) == (limited["generated_text"], "stop")


@pytest.mark.parametrize("fields", [{"ttft_ms": 0}, {"deadline_ms": "soon"}, {"priority": 5000}])
def test_limits_that_make_no_sense_are_refused(server: ServerProcess, fields: dict[str, object]) -> None:
    response = server.client.post("/generate", json={"prompt": "a", **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] in fields


def test_priority_is_refused_where_it_would_have_no_effect(server: ServerProcess) -> None:
    response = server.client.post("/generate", json={"prompt": "a", "priority": -1})
    assert response.status_code == 400
    assert "--scheduling-policy priority" in response.json()["error"]["message"]


def test_with_one_seat_the_urgent_go_first_and_the_impatient_leave(tmp_path: Path) -> None:
    arguments = ["--max-num-seqs", "1", "--scheduling-policy", "priority"]
    with serving(*arguments, log=tmp_path / "log") as small, ThreadPoolExecutor() as pool:
        occupant = pool.submit(small.generate, "Tell me a story.", max_tokens=400, ignore_eos=True)
        small.wait_for_metric("servekit_num_requests_running", 1)
        finished: list[str] = []

        def ask(name: str, **fields: object) -> dict[str, object]:
            answer = small.generate("Count from 3 to 9.", max_tokens=2, **fields)
            finished.append(name)
            return answer

        impatient = pool.submit(ask, "impatient", ttft_ms=50)
        calm = pool.submit(ask, "calm", priority=5)
        small.wait_for_metric("servekit_num_requests_waiting", 1)  # the impatient one has left
        urgent = pool.submit(ask, "urgent", priority=-5)
        assert urgent.result()["finish_reason"] == calm.result()["finish_reason"] == "length"
        assert impatient.result()["finish_reason"] == "deadline"
        assert impatient.result()["usage"]["completion_tokens"] == 0  # type: ignore[index]
        assert occupant.result()["usage"]["completion_tokens"] == 400
        assert finished == ["impatient", "urgent", "calm"]


def test_a_route_that_cannot_tell_of_a_deadline_takes_none(server: ServerProcess) -> None:
    response = server.client.post("/basic_generate", json={"prompt": "a", "deadline_ms": 5})
    assert response.status_code == 400 and response.json()["error"]["param"] == "deadline_ms"


def test_a_target_out_of_reach_is_said_once(tmp_path: Path) -> None:
    with serving("--itl-target-ms", "0.01", log=tmp_path / "log") as slow:
        for _ in range(2):
            assert slow.generate("What color is the sky?")["finish_reason"] == "stop"
        assert slow.log.read_text().count("is out of reach") == 1
        assert slow.metric("servekit_prefill_limit_tokens") == 16
