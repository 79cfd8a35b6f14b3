"""Tests of the bounds on queued work, and of the `Retry-After` of refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.config import ServeConfig
from servekit.engine.queue_limits import MAX_RETRY_AFTER_S, QueueLimits, QueuePlaces
from servekit.errors import InvalidRequest, QueueFull
from servekit.requests.generation import GenerationRequest, Prompt, Sampling
from servekit.scheduler.queued_work import QueuedWork
from servekit.scheduler.sequence import FinishReason
from tests.support.scheduler import make_sequence


def make_request(num_prompts: int = 1, n: int = 1, best_of: int = 1) -> GenerationRequest:
    prompts = [Prompt("a", f"prompts[{number}]") for number in range(num_prompts)]
    return GenerationRequest(prompts=prompts, sampling=Sampling(), n=n, best_of=max(n, best_of))


def make_limits(**settings: Any) -> QueueLimits:
    return QueueLimits(ServeConfig(**settings))


def queue_of(**num_of_tenants: int) -> QueuedWork:
    """A queue with sequences of 5 prompt tokens each."""
    queued = QueuedWork()
    for tenant, number in num_of_tenants.items():
        for _ in range(number):
            queued.add(make_sequence(0, tenant=tenant))
    return queued


def reserve(
    limits: QueueLimits,
    request: GenerationRequest | None = None,
    tenant: str = "a",
    queued: QueuedWork | None = None,
    now_s: float = 0.0,
) -> QueuePlaces:
    """Nothing waits but what is queued: no sequence was preempted."""
    queued = queued or QueuedWork()
    return limits.reserve(request or make_request(), tenant, queued.total.num_sequences, queued, now_s)


def record_end(limits: QueueLimits, now_s: float) -> None:
    limits.sequence_ended(make_sequence(0), FinishReason.LENGTH, 1, None, None, now_s)


def test_retry_after_follows_from_the_recent_rate_of_ended_sequences() -> None:
    limits = make_limits(max_num_queued_reqs=30)
    for number in range(100):
        record_end(limits, 100.0 + number / 10)  # ten a second
    with pytest.raises(QueueFull, match="30 sequences are queued and the request adds 30") as refusal:
        reserve(limits, make_request(30), queued=queue_of(a=30), now_s=110.0)
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
        reserve(limits, request_)
    assert expected in refusal.value.message
    reserve(limits, make_request(num_prompts=5))


def reserve_tokens(
    limits: QueueLimits, num_tokens: int, tenant: str = "a", queued: QueuedWork | None = None
) -> QueuePlaces:
    """A request with one answer to a prompt of this length."""
    queued = queued or QueuedWork()
    places = reserve(limits, tenant=tenant, queued=queued)
    try:
        limits.reserve_tokens(places, num_tokens, queued.total.num_sequences, queued, now_s=0.0)
    except (QueueFull, InvalidRequest):
        places.release()
        raise
    return places


def test_queued_prompt_tokens_are_bounded() -> None:
    limits, queued = make_limits(max_num_queued_tokens=1000), queue_of(a=80)
    reserve_tokens(limits, 600, queued=queued).release()
    with pytest.raises(QueueFull, match="400 prompt tokens are queued and the request adds 601; the limit is 1000"):
        reserve_tokens(limits, 601, queued=queued)
    with pytest.raises(InvalidRequest, match="the request has 1001 prompt tokens"):
        reserve_tokens(limits, 1001)
    assert limits.tokens.total == limits.sequences.total == 0


def test_requests_that_are_prepared_together_do_not_pass_the_limit_together() -> None:
    limits = make_limits(max_num_queued_tokens=1000)
    first, second = reserve(limits), reserve(limits)
    limits.reserve_tokens(first, 600, 0, QueuedWork(), now_s=0.0)
    with pytest.raises(QueueFull, match="600 prompt tokens are queued and the request adds 600"):
        limits.reserve_tokens(second, 600, 0, QueuedWork(), now_s=0.0)
    first.release(1, 600)
    limits.reserve_tokens(second, 600, 0, QueuedWork(), now_s=0.0)


def test_places_are_counted_while_a_request_is_prepared_and_given_back_once() -> None:
    limits = make_limits(max_num_queued_reqs=4)
    first, _ = reserve(limits, make_request(n=3)), reserve(limits)
    with pytest.raises(QueueFull, match="4 sequences are queued and the request adds 1"):
        reserve(limits)
    first.release()
    first.release()
    _, again = reserve(limits), reserve(limits, make_request(n=2))
    with pytest.raises(QueueFull):
        reserve(limits)
    again.release()
    assert limits.sequences.total == 2


def test_without_room_for_a_prompt_token_nothing_is_prepared() -> None:
    limits = make_limits(max_num_queued_tokens=100)
    with pytest.raises(QueueFull, match="100 prompt tokens are queued"):
        reserve(limits, queued=queue_of(a=20))


# -- shares, with the policy fair --------------------------------------------------------------------------------------


def test_a_flooding_tenant_fills_only_its_own_share() -> None:
    limits = make_limits(max_num_queued_reqs=64, scheduling_policy="fair")
    for _ in range(32):
        reserve(limits, tenant="flood")
    with pytest.raises(QueueFull, match="full for your tenant, which has 32 sequences in it") as refusal:
        reserve(limits, tenant="flood")
    assert refusal.value.retry_after_s is not None
    for _ in range(16):
        reserve(limits, tenant="other")
    with pytest.raises(QueueFull, match="for your tenant, which has 16"):
        reserve(limits, tenant="other")
    assert reserve(limits, tenant="modest").num_sequences == 1


def test_without_fair_the_queue_is_first_come_first_served() -> None:
    limits = make_limits(max_num_queued_reqs=64)
    for _ in range(64):
        reserve(limits, tenant="flood")
    with pytest.raises(QueueFull, match="the queue is full: 64 sequences"):
        reserve(limits, tenant="modest")


@pytest.mark.parametrize(("num_places", "most"), [(64, 32), (7, 3), (2, 1), (1, 1)])
def test_one_request_may_ask_for_half_of_a_shared_queue(num_places: int, most: int) -> None:
    limits = make_limits(max_num_queued_reqs=num_places, scheduling_policy="fair")
    with pytest.raises(InvalidRequest, match=f"holds {most} of one tenant, half of the limit"):
        reserve(limits, make_request(n=most + 1))
    reserve(limits, make_request(n=most))


def test_the_prompt_tokens_of_a_queue_are_shared_in_the_same_way() -> None:
    limits = make_limits(max_num_queued_tokens=1000, scheduling_policy="fair")
    queued = queue_of(flood=60)  # 300 tokens
    reserve_tokens(limits, 200, "flood", queued).release()
    with pytest.raises(QueueFull, match="for your tenant, which has 300 prompt tokens in it"):
        reserve_tokens(limits, 201, "flood", queued)
    reserve_tokens(limits, 350, "modest", queued).release()
    with pytest.raises(InvalidRequest, match="the queue holds 500 of one tenant"):
        reserve_tokens(limits, 501, "modest")


def test_without_keys_there_is_no_other_tenant_to_leave_a_share_to() -> None:
    limits = make_limits(max_num_queued_reqs=64, scheduling_policy="fair")
    reserve(limits, make_request(n=64), tenant="")
    with pytest.raises(QueueFull, match="the queue is full: 64 sequences"):
        reserve(limits, tenant="")


@given(
    num_places=st.integers(1, 40),
    events=st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 9)), max_size=60),
)
def test_the_queue_is_never_overfull_and_a_single_place_is_never_withheld(
    num_places: int, events: list[tuple[str, int]]
) -> None:
    """Whatever comes and goes: a tenant with nothing queued gets a place as long as one is free."""
    limits = make_limits(max_num_queued_reqs=num_places, scheduling_policy="fair")
    held: list[QueuePlaces] = []
    for tenant, number in events:
        if number <= 0:
            for places in [places for places in held if places.tenant == tenant][: 1 - number]:
                places.release()
                held.remove(places)
            continue
        own, total = limits.sequences.held(tenant), limits.sequences.total
        try:
            held.append(reserve(limits, make_request(n=number), tenant))
        except (QueueFull, InvalidRequest):
            assert (own, number) != (0, 1) or total == num_places
        assert limits.sequences.total <= num_places
        assert sum(places.num_sequences for places in held) == limits.sequences.total


def test_usage_counts_what_is_queued_and_what_is_prepared() -> None:
    limits = make_limits(max_num_queued_reqs=100, max_num_queued_tokens=1000)
    assert limits.usage(0, QueuedWork()) == (0, 0)
    limits.sequences.take("", 10)
    assert limits.usage(20, queue_of(a=20)) == (0.3, 0.1)
