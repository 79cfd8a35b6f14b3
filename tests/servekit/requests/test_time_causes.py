"""Claims about the times of a request's stages, and about the list of causes."""

from __future__ import annotations

from itertools import count

from msgspec.structs import replace

from servekit.requests.generation import GenerationRequest, Sampling
from servekit.requests.time_causes import MAX_BLOCKED_WRITES, MEANINGS, RequestTimes, TimeCause


def test_every_cause_has_a_meaning() -> None:
    assert list(MEANINGS) == list(TimeCause)


def test_a_mark_is_for_the_time_since_the_one_before() -> None:
    ticks = count(1)
    times = RequestTimes(lambda: float(next(ticks)), 0.5)
    times.mark(TimeCause.BODY)
    times.mark(TimeCause.TOKENIZING)
    times.answered()
    assert times.marks == [(TimeCause.BODY, 1.0), (TimeCause.TOKENIZING, 2.0)] and times.answered_s == 3.0


def test_a_request_without_times_may_be_marked_too() -> None:
    request = GenerationRequest(prompts=[], sampling=Sampling())
    request.mark(TimeCause.BODY)
    timed = replace(request, times=RequestTimes(lambda: 2.0, 0.0))
    timed.mark(TimeCause.BODY)
    assert timed.times is not None and timed.times.marks == [(TimeCause.BODY, 2.0)]


def test_only_writes_that_wait_are_remembered_and_only_the_last_ones() -> None:
    now_s = 0.0
    times = RequestTimes(lambda: now_s, 0.0)
    times.written(0.0)
    assert not times.blocked
    for number in range(1, MAX_BLOCKED_WRITES + 2):
        now_s = float(number)
        times.written(now_s - 0.5)
    assert len(times.blocked) == MAX_BLOCKED_WRITES and times.blocked[-1] == (now_s - 0.5, now_s)
    assert times.blocked_s == 0.5 * (MAX_BLOCKED_WRITES + 1)
