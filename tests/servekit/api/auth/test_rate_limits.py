"""Rate limits: what is refused, for how long, and that nothing is counted twice."""

from __future__ import annotations

import random

import pytest

from servekit.api.auth.rate_limits import OPEN_ANSWER_TOKENS, Allowance, Limits, OpenAnswer, RunningRequest
from servekit.errors import InvalidRequest, RateLimited


def retry_after_s(allowance: Allowance, now: float) -> int:
    with pytest.raises(RateLimited) as refused:
        allowance.enter(now)
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


def test_without_limits_every_request_is_admitted() -> None:
    allowance = Allowance(Limits(), now=0.0)
    for _ in range(1000):
        allowance.enter(0.0)
    assert allowance.num_running == 1000
    allowance.leave(10**9, 0.0)
    allowance.enter(0.0)


def test_one_minutes_requests_may_come_at_once_and_then_evenly() -> None:
    allowance = Allowance(Limits(requests_per_minute=6), now=100.0)
    for _ in range(6):
        allowance.enter(100.0)
    assert retry_after_s(allowance, 100.0) == 10
    assert retry_after_s(allowance, 102.5) == 8, "7.5 in whole seconds"
    assert retry_after_s(allowance, 109.9) == 1
    allowance.enter(110.0)
    assert retry_after_s(allowance, 110.0) == 10


def test_balance_never_exceeds_one_minutes_worth() -> None:
    allowance = Allowance(Limits(requests_per_minute=2), now=0.0)
    allowance.enter(1e6)
    allowance.enter(1e6)
    assert retry_after_s(allowance, 1e6) == 30


def test_tokens_are_charged_at_the_end_and_a_negative_balance_blocks_requests() -> None:
    allowance = Allowance(Limits(tokens_per_minute=60), now=0.0)
    allowance.enter(0.0)
    allowance.enter(0.0)
    allowance.leave(60, 0.0)
    allowance.enter(0.0)
    allowance.leave(90, 0.0)
    assert retry_after_s(allowance, 0.0) == 90
    assert retry_after_s(allowance, 89.0) == 1
    allowance.enter(90.0)


def test_concurrent_requests_are_counted_until_they_end() -> None:
    allowance = Allowance(Limits(max_concurrent_requests=2), now=0.0)
    allowance.enter(0.0)
    allowance.enter(0.0)
    assert retry_after_s(allowance, 0.0) == 1
    allowance.leave(0, 0.0)
    allowance.enter(0.0)
    allowance.leave(0, 0.0)
    allowance.leave(0, 0.0)
    with pytest.raises(AssertionError):
        allowance.leave(0, 0.0)


def test_refused_request_costs_nothing_and_gets_the_longest_wait() -> None:
    limits = Limits(max_concurrent_requests=1, requests_per_minute=2, tokens_per_minute=60)
    allowance = Allowance(limits, now=0.0)
    allowance.enter(0.0)
    for _ in range(50):
        assert retry_after_s(allowance, 0.0) == 1
    allowance.leave(60 + 40, 0.0)
    assert retry_after_s(allowance, 0.0) == 40, "of tokens; for the requests there is room"
    allowance.enter(40.0)


def test_request_after_retry_after_is_admitted() -> None:
    rng = random.Random(5)
    for _ in range(300):
        limits = Limits(requests_per_minute=rng.randint(1, 700), tokens_per_minute=rng.randint(1, 10**6))
        now = rng.uniform(0, 1e6)
        allowance = Allowance(limits, now)
        for _ in range(20):
            try:
                allowance.enter(now)
            except RateLimited as refused:
                now += refused.retry_after_s or 0
                allowance.enter(now)
            allowance.leave(rng.randint(0, 10**6), now)
            now += rng.expovariate(10)


def test_rate_limit_never_exceeds_burst_plus_refill() -> None:
    rng = random.Random(6)
    allowance, now, entered = Allowance(Limits(requests_per_minute=30), now=0.0), 0.0, []
    for _ in range(5000):
        now += rng.expovariate(5)
        try:
            allowance.enter(now)
        except RateLimited:
            continue
        entered.append(now)
        allowance.leave(0, now)
    for first in range(0, len(entered), 7):
        for last in range(first, len(entered)):
            assert last - first + 1 <= 30 + 0.5 * (entered[last] - entered[first]) + 1e-3


# -- what a request asks for -------------------------------------------------------------------------------------------


def enter(allowance: Allowance, now: float = 0.0) -> RunningRequest:
    allowance.enter(now)
    return RunningRequest(allowance)


def try_to_reserve(allowance: Allowance, num_answers: int, max_tokens: int | None) -> RunningRequest | None:
    """A request that comes now; None if it is refused, and then it has ended."""
    running = enter(allowance)
    try:
        running.reserve(num_answers, max_tokens, 0, 0.0)
    except (RateLimited, InvalidRequest):
        running.end(0, 0.0)
        return None
    return running


def test_a_quota_of_tokens_lets_in_what_it_holds_and_one_request_more() -> None:
    """Forty requests at once that may each take hundreds of times the quota, or just as much, or a little."""
    for num_answers in (1, 2, 3, 128):
        for max_tokens in (None, 1, 10, 400, 2000):
            allowance = Allowance(Limits(max_concurrent_requests=40, tokens_per_minute=1000), now=0.0)
            admitted = sum(try_to_reserve(allowance, num_answers, max_tokens) is not None for _ in range(40))
            each = num_answers * (OPEN_ANSWER_TOKENS if max_tokens is None else max_tokens)
            if num_answers == 1:
                assert admitted == min(40, -(-1000 // each)), "one answer is let in, however long it may become"
            else:
                assert admitted == (min(40, -(-1000 // each)) if each <= 1000 else 0)


def test_answers_that_exceed_the_quota_together_are_refused_for_good() -> None:
    running = enter(Allowance(Limits(tokens_per_minute=1000), now=0.0))
    with pytest.raises(InvalidRequest, match=r"up to 256012 tokens.* has 1000 tokens per minute") as refusal:
        running.reserve(128, 2000, 12, 0.0)
    assert refusal.value.param == "max_tokens"
    with pytest.raises(InvalidRequest, match="each one counts for 1024 tokens"):
        running.reserve(2, None, 0, 0.0)


def test_what_was_reserved_and_not_used_is_given_back() -> None:
    allowance = Allowance(Limits(tokens_per_minute=1000), now=0.0)
    first = enter(allowance)
    first.reserve(1, 4096, 50, 0.0)
    second = enter(allowance)
    with pytest.raises(RateLimited, match="its running requests may still take 1000") as refusal:
        second.reserve(1, 10, 0, 0.0)
    assert refusal.value.retry_after_s == 1, "and not the hour after which the quota would have grown by as much"
    first.end(70, 0.0)
    second.reserve(1, 10, 0, 0.0)


def test_a_reservation_replaces_the_one_before_it() -> None:
    """The length of a chat's prompt is known only when it has been rendered."""
    allowance = Allowance(Limits(tokens_per_minute=1000, max_concurrent_sequences=3), now=0.0)
    chat = enter(allowance)
    chat.reserve(2, 100, 0, 0.0)
    chat.reserve(2, 100, 500, 0.0)
    other = enter(allowance)
    other.reserve(1, 299, 0, 0.0)
    third = enter(allowance)
    with pytest.raises(RateLimited, match="3 answers at the same time"):
        third.reserve(1, 1, 0, 0.0)
    other.end(0, 0.0)
    third.reserve(1, 299, 0, 0.0)
    chat.end(0, 0.0)
    assert try_to_reserve(allowance, 2, 1) is not None


def test_a_request_does_not_wait_for_what_it_has_reserved_itself() -> None:
    chat = enter(Allowance(Limits(tokens_per_minute=1000, max_concurrent_sequences=1), now=0.0))
    chat.reserve(1, 4096, 0, 0.0)
    chat.reserve(1, 4096, 50, 0.0)


def open_answers(allowance: Allowance, num_clients: int) -> tuple[list[RunningRequest], list[OpenAnswer]]:
    """The requests that are admitted when this many clients ask for one open answer each, and their answers."""
    asked = [try_to_reserve(allowance, 1, None) for _ in range(num_clients)]
    requests = [request for request in asked if request is not None]
    return requests, [OpenAnswer(request, lambda: 0.0) for request in requests]


@pytest.mark.parametrize("quota", [3000, 50_000])
@pytest.mark.parametrize("num_clients", [2, 40, 400])
def test_open_answers_take_two_minutes_worth_together_and_then_one_goes_on(quota: int, num_clients: int) -> None:
    """All clients want answers without end, at the same speed, in no time: nothing is refilled meanwhile."""
    allowance = Allowance(Limits(tokens_per_minute=quota), now=0.0)
    requests, answers = open_answers(allowance, num_clients)
    assert len(answers) == min(num_clients, -(-quota // OPEN_ANSWER_TOKENS))
    num_tokens = [0] * len(answers)
    running = set(range(len(answers)))
    while len(running) > 1:
        for index in sorted(running):
            num_tokens[index] += 1
            if not answers[index].count_token():
                running.discard(index)
                requests[index].end(num_tokens[index], 0.0)
    assert quota <= sum(num_tokens) <= 2 * quota + OPEN_ANSWER_TOKENS
    (last,) = running
    for _ in range(10 * quota):
        assert answers[last].count_token(), "one answer is never refused for its length"
    num_tokens[last] += 10 * quota
    requests[last].end(num_tokens[last], 0.0)
    allowance.enter(60.0 * (sum(num_tokens) - quota) / quota + 0.01)  # everything was charged, and once
    with pytest.raises(RateLimited):
        allowance.enter(60.0 * (sum(num_tokens) - quota) / quota - 1.0)


def test_the_answers_to_one_request_take_no_more() -> None:
    running = try_to_reserve(Allowance(Limits(tokens_per_minute=5000), now=0.0), 4, None)
    assert running is not None
    answers = [OpenAnswer(running, lambda: 0.0) for _ in range(4)]
    num_tokens = [1 + next(count for count in range(10**6) if not answer.count_token()) for answer in answers]
    assert sum(num_tokens) <= 2 * 5000


def test_what_an_open_answer_has_used_is_refilled_while_it_runs() -> None:
    """A key that takes its tokens no faster than they come back can go on for ever, beside other requests."""
    allowance, now_s = Allowance(Limits(tokens_per_minute=6000), now=0.0), 0.0
    requests, _ = open_answers(allowance, 2)
    answers = [OpenAnswer(request, lambda: now_s) for request in requests]
    for _ in range(100_000):
        now_s += 0.02
        assert all(answer.count_token() for answer in answers)
    third = enter(allowance, now_s)
    third.reserve(1, 10, 0, now_s)


def test_a_key_without_a_quota_of_tokens_has_no_end() -> None:
    _, (answer,) = open_answers(Allowance(Limits(max_concurrent_requests=1), now=0.0), 1)
    assert all(answer.count_token() for _ in range(10 * OPEN_ANSWER_TOKENS))


def test_a_refusal_after_the_body_counts_as_a_request_and_says_when_the_next_one_may_come() -> None:
    """A 429 for the headers costs nothing; one for what the body asks for has cost the server the body."""
    allowance = Allowance(Limits(requests_per_minute=2, tokens_per_minute=1000), now=0.0)
    first = enter(allowance)
    first.reserve(1, 1000, 0, 0.0)
    second = enter(allowance)
    with pytest.raises(RateLimited, match="2 requests per minute") as refusal:
        second.reserve(1, 10, 0, 0.0)
    assert refusal.value.retry_after_s == 30, "not one second, after which it would be refused for its headers"
    second.end(0, 0.0)
    assert retry_after_s(allowance, 0.0) == 30
    first.end(0, 0.0)
    enter(allowance, 30.0).reserve(1, 10, 0, 30.0)


def test_a_balance_below_zero_is_waited_for_whatever_is_reserved() -> None:
    allowance = Allowance(Limits(tokens_per_minute=60), now=0.0)
    first, second, third = enter(allowance), enter(allowance), enter(allowance)
    first.reserve(1, 30, 0, 0.0)
    second.end(90, 0.0)
    with pytest.raises(RateLimited) as refusal:
        third.reserve(1, 30, 0, 0.0)
    assert refusal.value.retry_after_s == 30


def test_answers_at_the_same_time_are_limited_over_all_requests() -> None:
    allowance = Allowance(Limits(max_concurrent_sequences=8), now=0.0)
    first = enter(allowance)
    first.reserve(6, 10, 0, 0.0)
    second = enter(allowance)
    with pytest.raises(RateLimited, match=r"8 answers at the same time .max_concurrent_sequences.") as refusal:
        second.reserve(3, 10, 0, 0.0)
    assert refusal.value.retry_after_s == 1
    second.reserve(2, 10, 0, 0.0)
    with pytest.raises(InvalidRequest, match="asks for 9 answers"):
        enter(allowance).reserve(9, 10, 0, 0.0)
    first.end(0, 0.0)
    first.end(0, 0.0)
    assert try_to_reserve(allowance, 6, 1) is not None


def test_a_refused_body_counts_as_a_request() -> None:
    """Whatever it was refused for: what has entered is one of the minute's."""
    allowance = Allowance(Limits(requests_per_minute=3), now=0.0)
    for _ in range(3):
        enter(allowance).end(0, 0.0)
    assert retry_after_s(allowance, 0.0) == 20


def test_a_request_that_counts_no_longer_reserves_nothing() -> None:
    running = enter(allowance := Allowance(Limits(max_concurrent_sequences=1), now=0.0))
    running.end(0, 0.0)
    running.reserve(1, 10, 0, 0.0)
    assert try_to_reserve(allowance, 1, 1) is not None


def test_an_open_answer_of_a_request_that_has_ended_takes_nothing_from_the_key() -> None:
    allowance = Allowance(Limits(tokens_per_minute=10), now=0.0)
    allowance.enter(0.0)
    request = RunningRequest(allowance)
    request.end(0, 0.0)
    assert request.extend(10**6, 0.0)
    allowance.enter(0.0)
