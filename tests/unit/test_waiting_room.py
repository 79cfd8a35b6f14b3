"""Claims about what is told to those who come when it is full, and about how long a worker may take."""

from __future__ import annotations

import pytest

from servekit.config import ServeConfig
from servekit.errors import InvalidRequest, QueueFull
from servekit.generation_request import GenerationRequest, Prompt, Sampling
from servekit.patience import LEAST_S, StepPatience, backoff_s
from servekit.waiting_room import MOST_S, WaitingRoom


def make_request(num_prompts: int = 1, n: int = 1, best_of: int = 1) -> GenerationRequest:
    prompts = [Prompt("a", f"prompts[{number}]") for number in range(num_prompts)]
    return GenerationRequest(prompts=prompts, sampling=Sampling(), n=n, best_of=max(n, best_of))


def make_room(**settings: int) -> WaitingRoom:
    return WaitingRoom(ServeConfig(**settings))


def test_those_who_are_refused_are_told_how_long_the_line_takes() -> None:
    room = make_room(max_num_queued_reqs=30)
    for number in range(100):
        room.left(100.0 + number / 10)  # ten a second
    with pytest.raises(QueueFull, match="30 sequences are waiting and 30 more came") as refusal:
        room.check_answers(make_request(30), num_waiting=30, now=110.0)
    assert refusal.value.retry_after_s == 3, "30 too many, at ten a second"


def test_where_nobody_has_left_lately_the_guess_is_a_modest_one() -> None:
    room = make_room()
    assert 1 <= room.retry_after_s(5, now=0.0) <= MOST_S
    room.left(0.0)
    assert room.retry_after_s(10_000, now=1.0) == MOST_S, "nobody is sent away for an hour"
    assert room.retry_after_s(1, now=1000.0) == room.retry_after_s(5, now=1000.0), "what was long ago says nothing"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (make_request(n=9), "9 answers to one request (prompts times n, or best_of); at most 8"),
        (make_request(num_prompts=3, best_of=3), "9 answers"),
        (make_request(num_prompts=6), "at most 5 may wait (max_num_queued_reqs)"),
    ],
)
def test_what_could_never_wait_is_the_requests_own_fault(request_: GenerationRequest, expected: str) -> None:
    room = make_room(max_client_batch_size=8, max_num_queued_reqs=5)
    with pytest.raises(InvalidRequest) as refusal:
        room.check_answers(request_, num_waiting=0, now=0.0)
    assert expected in refusal.value.message
    room.check_answers(make_request(num_prompts=5), num_waiting=0, now=0.0)


def test_tokens_that_wait_are_bounded_too() -> None:
    room = make_room(max_num_queued_tokens=1000)
    room.check_tokens(600, num_waiting_tokens=400, num_waiting=1, now=0.0)
    with pytest.raises(QueueFull, match="prompts of 400 tokens are waiting and 601 more came; at most 1000"):
        room.check_tokens(601, num_waiting_tokens=400, num_waiting=1, now=0.0)
    with pytest.raises(InvalidRequest, match="1001 prompt tokens in one request"):
        room.check_tokens(1001, num_waiting_tokens=0, num_waiting=0, now=0.0)


def test_a_step_gets_many_times_what_its_like_took() -> None:
    patience = StepPatience(most_s=300.0)
    assert patience.limit_s(1) == 300.0, "nothing is known yet"
    for _ in range(4):
        patience.observe(num_tokens=1, seconds=0.02)
    assert patience.limit_s(1) == LEAST_S
    assert patience.limit_s(200) == pytest.approx(20 * 0.02 * 2**7), "as if each token took as long"
    for _ in range(4):
        patience.observe(num_tokens=200, seconds=0.9)
    assert patience.limit_s(200) == pytest.approx(20 * 0.9), "now its own size is known"
    assert patience.limit_s(100) == pytest.approx(20 * 0.02 * 2**6)
    assert patience.limit_s(10**6) == 300.0


def test_a_slow_step_is_forgotten_in_time() -> None:
    patience = StepPatience(most_s=300.0)
    for _ in range(4):
        patience.observe(num_tokens=8, seconds=5.0)
    assert patience.limit_s(8) == pytest.approx(100.0)
    assert patience.limit_s(1) == pytest.approx(100.0), "a smaller one takes no longer"
    for _ in range(300):
        patience.observe(num_tokens=8, seconds=0.01)
    assert patience.limit_s(8) == LEAST_S


def test_starts_that_fail_are_tried_again_later_and_later() -> None:
    assert [backoff_s(losses) for losses in (1, 2, 3, 4, 7, 100)] == [0.0, 1.0, 2.0, 4.0, 30.0, 30.0]
