"""Claims about what is remembered of the past, against records of all of it."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.client_queue import ClientQueue
from servekit.config import ServeConfig
from servekit.detokenizer import Detokenizer
from servekit.engine import LLMEngine
from servekit.history import MOST_FIRST_TOKENS, History
from servekit.live_view import MOST_ENDED, MOST_STEPS, LiveEnd, LiveStep
from servekit.messages import Row, StepPlan, StepResult
from servekit.sampling_params import SamplingParams
from servekit.sequence import FinishReason, Sequence
from servekit.submission import Generation
from tests.unit.test_workload_manager import make_manager, make_sequence


def make_plan(step_id: int, *rows: tuple[int, bool], epoch: int = 0) -> StepPlan:
    """Of rows that are so long, and sample or not."""
    told = (Row(slot, 0, length, (), (), samples) for slot, (length, samples) in enumerate(rows))
    return StepPlan(epoch, step_id, (), tuple(told))


def make_result(step_id: int, step_time_s: float = 0.5) -> StepResult:
    return StepResult(0, step_id, (), step_time_s)


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_step_is_there_from_when_it_is_sent_and_its_duration_when_it_is_done() -> None:
    history = History()
    told = history.step_sent(make_plan(0, (1, True), (1, True), (1, False), (6, True)), 10.0)
    assert history.steps == [told] == [LiveStep(0, 10.0, 7, 2, 4, None)]
    history.step_sent(make_plan(1, (1, True)), 10.5)
    history.step_done(make_result(0, 0.25), 3, 10.75)
    assert history.steps == [LiveStep(0, 10.0, 7, 2, 4, 0.25), LiveStep(1, 10.5, 0, 1, 1, None)]
    assert history.num_steps == 1 and history.num_generated_tokens == 3


def test_what_a_worker_took_to_its_grave_has_no_duration_for_ever() -> None:
    history = History()
    for step_id, epoch in ((0, 0), (1, 0), (2, 1)):
        history.step_sent(make_plan(step_id, (1, True), epoch=epoch), float(step_id))
    history.step_done(make_result(0), 1, 5.0)
    history.step_done(make_result(2), 1, 6.0)
    history.step_done(make_result(99), 0, 6.0)  # of no step at all
    assert [step.duration_s for step in history.steps] == [0.5, None, 0.5]


def test_only_the_last_steps_are_kept_and_a_result_that_comes_later_is_no_harm() -> None:
    history = History()
    for step_id in range(MOST_STEPS + 5):
        history.step_sent(make_plan(step_id, (1, True)), 0.0)
    history.step_done(make_result(0), 1, 1.0)
    assert [step.step_id for step in history.steps] == list(range(5, MOST_STEPS + 5))


# -- tokens ------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 0.7), st.integers(0, 300)), max_size=80),
    st.floats(0.0, 3.0),
    st.floats(0.0, 1e6),
)
def test_the_rate_is_that_of_the_last_twenty_whole_tenths(
    gaps: list[tuple[float, int]], later_s: float, began_s: float
) -> None:
    history, now, record = History(), began_s, []
    for gap_s, num_tokens in gaps:
        now += gap_s
        record.append((now, num_tokens))
        history.step_done(make_result(0), num_tokens, now)
    now += later_s
    end = math.floor(now * 10)
    within = [num_tokens for when, num_tokens in record if end - 20 <= math.floor(when * 10) < end]
    assert history.tokens_per_s(now) == pytest.approx(sum(within) / 2)
    assert history.num_generated_tokens == sum(num_tokens for _, num_tokens in record)


def test_a_steady_stream_has_a_steady_rate() -> None:
    history = History()
    rates = set()
    for tick in range(1, 400):
        now = tick * 0.025 + 0.001
        history.step_done(make_result(0), 5, now)
        if now > 2.5:
            rates.add(history.tokens_per_s(now))
    assert rates == {200.0}


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 100.0)), max_size=700))
def test_percentiles_are_of_the_first_tokens_of_the_last_minute(tokens: list[tuple[float, float]]) -> None:
    history, now, record = History(), 0.0, []
    for gap_s, latency_s in tokens:
        now += gap_s
        record.append((now, latency_s))
        history.first_token(latency_s, now)
    within = [latency_s for when, latency_s in record[-MOST_FIRST_TOKENS:] if when > now - 60]
    ordered, told = sorted(within), history.first_token_percentiles(50, 95, now=now)
    for percent, latency_s in zip((50, 95), told, strict=True):
        reached = [each for each in within if 100 * bisect_right(ordered, each) >= percent * len(within)]
        assert latency_s == min(reached, default=None)
    assert history.first_token_percentiles(50, now=now + 61) == [None]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_the_last_ends_are_kept_whole_and_hold_no_token() -> None:
    history = History()
    for sequence_id in range(MOST_ENDED + 2):
        sequence = Sequence(sequence_id, [1, 2, 3], SamplingParams(max_tokens=8), arrival_s=1.0)
        sequence.token_ids += [4, 5]
        sequence.num_preemptions = 1
        history.ended(sequence, FinishReason.STOP, 2.0, 9.0)
    assert len(history.ends) == MOST_ENDED
    assert history.ends[-1] == LiveEnd(MOST_ENDED + 1, "stop", 3, 2, 8, 1.0, 9.0, None, 2.0, 1)
    history.ended(Sequence(99, [1], SamplingParams(max_tokens=8)), FinishReason.ABORT, None, 10.0)
    assert history.ends[-1] == LiveEnd(99, "abort", 1, 0, 8, 0.0, 10.0)


def test_the_servers_own_question_is_nobodys_and_is_told_to_nobody() -> None:
    engine, manager = LLMEngine(ServeConfig()), make_manager()
    engine._manager = manager
    for sequence_id, is_probe in ((0, True), (1, False)):
        sequence = make_sequence(sequence_id)
        manager.add(sequence)
        generation = Generation(sequence, 0, cast(Detokenizer, None), ClientQueue(), is_probe=is_probe)
        engine._generations[sequence_id] = generation
        engine._observe_token(generation, 1.0)
        engine.finish(generation, FinishReason.ABORT)
    assert [end.sequence_id for end in engine.history.ends] == [1]
    assert len(engine.history._first_tokens) == 1
