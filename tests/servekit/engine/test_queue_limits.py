"""Tests of the bounds on queued work, and of the `Retry-After` of refusals."""

from __future__ import annotations

import pytest

from servekit.config import ServeConfig
from servekit.engine.queue_limits import MAX_RETRY_AFTER_S, QueueLimits
from servekit.errors import InvalidRequest, QueueFull
from servekit.request import GenerationRequest, Prompt, Sampling
from servekit.scheduler.sequence import FinishReason
from tests.support.scheduler import make_sequence


def make_request(num_prompts: int = 1, n: int = 1, best_of: int = 1) -> GenerationRequest:
    prompts = [Prompt("a", f"prompts[{number}]") for number in range(num_prompts)]
    return GenerationRequest(prompts=prompts, sampling=Sampling(), n=n, best_of=max(n, best_of))


def make_limits(**settings: int) -> QueueLimits:
    return QueueLimits(ServeConfig(**settings))


def record_end(limits: QueueLimits, now_s: float) -> None:
    limits.sequence_ended(make_sequence(0), FinishReason.LENGTH, None, None, now_s)


def test_retry_after_follows_from_the_recent_rate_of_ended_sequences() -> None:
    limits = make_limits(max_num_queued_reqs=30)
    for number in range(100):
        record_end(limits, 100.0 + number / 10)  # ten a second
    with pytest.raises(QueueFull, match="30 sequences are queued and the request adds 30") as refusal:
        limits.check_answers(make_request(30), num_waiting=30, now_s=110.0)
    assert refusal.value.retry_after_s == 3, "30 too many, at ten a second"


def test_retry_after_without_recent_ends_is_a_bounded_guess() -> None:
    limits = make_limits()
    assert 1 <= limits.retry_after_s(5, now_s=0.0) <= MAX_RETRY_AFTER_S
    record_end(limits, 0.0)
    assert limits.retry_after_s(10_000, now_s=1.0) == MAX_RETRY_AFTER_S, "the value is bounded"
    assert limits.retry_after_s(1, now_s=1000.0) == limits.retry_after_s(5, now_s=1000.0), "old ends do not count"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (make_request(n=9), "the request asks for 9 answers (prompts times n, or best_of); the limit is 8"),
        (make_request(num_prompts=3, best_of=3), "asks for 9 answers"),
        (make_request(num_prompts=6), "the queue holds 5 (max_num_queued_reqs)"),
    ],
)
def test_a_request_that_exceeds_an_empty_queue_is_invalid(request_: GenerationRequest, expected: str) -> None:
    limits = make_limits(max_client_batch_size=8, max_num_queued_reqs=5)
    with pytest.raises(InvalidRequest) as refusal:
        limits.check_answers(request_, num_waiting=0, now_s=0.0)
    assert expected in refusal.value.message
    limits.check_answers(make_request(num_prompts=5), num_waiting=0, now_s=0.0)


def test_queued_prompt_tokens_are_bounded() -> None:
    limits = make_limits(max_num_queued_tokens=1000)
    limits.check_tokens(600, num_waiting_tokens=400, num_waiting=1, now_s=0.0)
    with pytest.raises(QueueFull, match="400 prompt tokens are queued and the request adds 601; the limit is 1000"):
        limits.check_tokens(601, num_waiting_tokens=400, num_waiting=1, now_s=0.0)
    with pytest.raises(InvalidRequest, match="the request has 1001 prompt tokens"):
        limits.check_tokens(1001, num_waiting_tokens=0, num_waiting=0, now_s=0.0)
