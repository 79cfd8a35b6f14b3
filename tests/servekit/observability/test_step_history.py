"""Tests of the step history, against complete records of the same events."""

from __future__ import annotations

import math
from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.observability.live_frames import MAX_ENDED, MAX_STEPS, LiveEnd, LiveStep
from servekit.observability.observer import StepSummary
from servekit.observability.step_history import MAX_FIRST_TOKENS, StepHistory
from servekit.protocol.messages import ScheduledChunk, StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.sequence import FinishReason, Sequence


def make_step(step_id: int, epoch: int = 0) -> StepSummary:
    return StepSummary(epoch, step_id, num_prefill_tokens=0, num_decode_tokens=1, num_sequences=1)


def make_result(step_id: int, step_time_s: float = 0.5) -> StepResult:
    return StepResult(0, step_id, (), step_time_s)


def record_done(history: StepHistory, step_id: int, num_tokens: int, now_s: float, step_time_s: float = 0.5) -> None:
    history.of_replica(0).step_done(make_result(step_id, step_time_s), num_tokens, loop_time_s=step_time_s, now_s=now_s)


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_single_position_that_samples_is_decode_and_all_other_tokens_are_prefill() -> None:
    lengths = ((1, True), (1, True), (1, False), (6, True))
    chunks = tuple(ScheduledChunk(slot, 0, num, (), (), samples) for slot, (num, samples) in enumerate(lengths))
    assert StepSummary.of(StepPlan(3, 9, (), chunks)) == StepSummary(3, 9, 7, 2, 4)


def test_a_step_is_listed_when_sent_and_gets_its_duration_when_done() -> None:
    history = StepHistory()
    history.of_replica(0).step_sent(StepSummary(0, 0, 7, 2, 4), is_alone=True, now_s=10.0)
    assert history.steps == [LiveStep(0, 10.0, 7, 2, 4, None)]
    history.of_replica(0).step_sent(make_step(1), is_alone=False, now_s=10.5)
    record_done(history, 0, 3, 10.75, step_time_s=0.25)
    assert history.steps == [LiveStep(0, 10.0, 7, 2, 4, 0.25), LiveStep(1, 10.5, 0, 1, 1, None)]
    assert history.num_steps == 1 and history.num_generated_tokens == 3


def test_a_step_of_a_lost_worker_never_gets_a_duration() -> None:
    history = StepHistory()
    for step_id, epoch in ((0, 0), (1, 0), (2, 1)):
        history.of_replica(0).step_sent(make_step(step_id, epoch), is_alone=True, now_s=float(step_id))
    record_done(history, 0, 1, 5.0)
    record_done(history, 2, 1, 6.0)
    record_done(history, 99, 0, 6.0)  # an unknown step
    assert [step.duration_s for step in history.steps] == [0.5, None, 0.5]


def test_only_the_last_steps_are_kept_and_a_late_result_is_harmless() -> None:
    history = StepHistory()
    for step_id in range(MAX_STEPS + 5):
        history.of_replica(0).step_sent(make_step(step_id), is_alone=False, now_s=0.0)
    record_done(history, 0, 1, 1.0)
    assert [step.step_id for step in history.steps] == list(range(5, MAX_STEPS + 5))


# -- tokens ------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 0.7), st.integers(0, 300)), max_size=80),
    st.floats(0.0, 3.0),
    st.floats(0.0, 1e6),
)
def test_token_rate_covers_the_last_twenty_whole_tenths_of_a_second(
    gaps: list[tuple[float, int]], later_s: float, began_s: float
) -> None:
    history, now, record = StepHistory(), began_s, []
    for gap_s, num_tokens in gaps:
        now += gap_s
        record.append((now, num_tokens))
        record_done(history, 0, num_tokens, now)
    now += later_s
    end = math.floor(now * 10)
    within = [num_tokens for when, num_tokens in record if end - 20 <= math.floor(when * 10) < end]
    assert history.tokens_per_s(now) == pytest.approx(sum(within) / 2)
    assert history.num_generated_tokens == sum(num_tokens for _, num_tokens in record)


def test_a_steady_stream_has_a_constant_rate() -> None:
    history = StepHistory()
    rates = set()
    for tick in range(1, 400):
        now = tick * 0.025 + 0.001
        record_done(history, 0, 5, now)
        if now > 2.5:
            rates.add(history.tokens_per_s(now))
    assert rates == {200.0}


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 100.0)), max_size=700))
def test_first_token_percentiles_cover_the_last_minute(tokens: list[tuple[float, float]]) -> None:
    history, now, record = StepHistory(), 0.0, []
    for gap_s, latency_s in tokens:
        now += gap_s
        record.append((now, latency_s))
        history.tokens_delivered([latency_s], [], now)
    within = [latency_s for when, latency_s in record[-MAX_FIRST_TOKENS:] if when > now - 60]
    ordered, percentiles = sorted(within), history.first_token_percentiles(50, 95, now_s=now)
    for percent, latency_s in zip((50, 95), percentiles, strict=True):
        reached = [each for each in within if 100 * bisect_right(ordered, each) >= percent * len(within)]
        assert latency_s == min(reached, default=None)
    assert history.first_token_percentiles(50, now_s=now + 61) == [None]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_the_last_ended_sequences_are_kept_without_their_tokens() -> None:
    history = StepHistory()
    for sequence_id in range(MAX_ENDED + 2):
        sequence = Sequence(sequence_id, [1, 2, 3], SamplingParams(max_tokens=8), arrival_s=1.0)
        sequence.token_ids.extend([4, 5])
        sequence.num_preemptions = 1
        history.sequence_ended(sequence, FinishReason.STOP, 2, 2.0, 3.0, 9.0)
    assert len(history.ends) == MAX_ENDED
    assert history.ends[-1] == LiveEnd(MAX_ENDED + 1, "stop", 3, 2, 8, 1.0, 9.0, None, 2.0, 1)
    history.sequence_ended(Sequence(99, [1], SamplingParams(max_tokens=8)), FinishReason.ABORT, 0, None, None, 10.0)
    assert history.ends[-1] == LiveEnd(99, "abort", 1, 0, 8, 0.0, 10.0)
