"""Claims about the figures of a run, recomputed by hand."""

from __future__ import annotations

import pytest

from servekit.laboratory.summary import percentile, summarise
from servekit.laboratory.timeline import RequestTimeline, StepTimeline, Timeline
from servekit.protocol.messages import StepPlan

PLAN = StepPlan(0, 0, (), ())


def test_figures_are_those_of_two_requests_by_hand() -> None:
    timeline = Timeline()
    timeline.requests = {
        0: RequestTimeline(
            sequence_id=0,
            arrival_s=1.0,
            num_prompt_tokens=10,
            slot=0,
            admitted_s=1.0,
            token_times_s=[2.0, 3.0, 5.0],
            ended_s=5.0,
        ),
        1: RequestTimeline(
            sequence_id=1,
            arrival_s=2.0,
            num_prompt_tokens=30,
            num_cached_tokens=20,
            slot=0,
            admitted_s=5.0,
            token_times_s=[6.0],
            ended_s=6.0,
        ),
    }
    timeline.steps = [StepTimeline(1.0, 5.0, PLAN, 32, 16), StepTimeline(5.0, 6.0, PLAN, 64, 32)]
    summary = summarise(timeline, num_slots=2)
    assert summary.duration_s == 5.0 and summary.tokens_per_s == 4 / 5
    assert summary.tokens_per_s_while_waiting == 3 / 4  # until the second one has its slot
    assert (summary.ttft_p50_s, summary.ttft_p99_s) == (1.0, 4.0) and summary.itl_p50_s == 1.0
    assert summary.last_token_s == 1.0  # from 5 to 6 s
    assert summary.idle_slot_share == pytest.approx(0.5)  # 5 of 10 slot seconds
    assert summary.unused_memory_share == 0.5 and summary.cached_prompt_share == 0.5


def test_where_nothing_waits_there_is_no_rate_of_waiting() -> None:
    timeline = Timeline()
    for number in range(3):
        timeline.requests[number] = RequestTimeline(
            sequence_id=number,
            arrival_s=float(number),
            num_prompt_tokens=1,
            admitted_s=float(number),
            token_times_s=[number + 0.5],
            ended_s=number + 0.5,
        )
    assert summarise(timeline, num_slots=2).tokens_per_s_while_waiting == 0.0


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([1.0, 2.0], 0.5) == 1.0 and percentile([float(each) for each in range(1, 101)], 0.99) == 99.0
    assert percentile([], 0.5) == 0.0
