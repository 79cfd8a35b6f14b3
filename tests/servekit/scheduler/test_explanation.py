"""Claims about explanations: their intervals cover a request's time without gaps and overlaps, whatever happened."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.protocol.messages import StepPlan
from servekit.requests.time_causes import RequestTimes, TimeCause
from servekit.scheduler.explanation import MAX_INTERVALS, Explanation, Interval, SequenceEnd, explain
from servekit.scheduler.sequence import FinishReason, Sequence
from servekit.scheduler.sequence_history import ManagerLog, SequenceHistory
from tests.support.scheduler import add_sequence, make_manager, make_worker


def check(explanation: Explanation, wall_time_s: float) -> None:
    """The intervals are in order and cover the wall time, and the causes sum to it."""
    intervals = explanation.intervals
    assert explanation.wall_time_s == pytest.approx(wall_time_s)
    assert intervals[0].start_s == 0.0 and intervals[-1].end_s == pytest.approx(wall_time_s, abs=1e-9)
    assert all(one.end_s == other.start_s for one, other in pairwise(intervals))
    assert all(each.end_s > each.start_s for each in intervals)
    assert sum(explanation.causes.values()) == pytest.approx(wall_time_s, abs=1e-6)


def end_of(sequence: Sequence, ended_s: float | None, first_token_s: float | None = None) -> SequenceEnd:
    return SequenceEnd(
        sequence.sequence_id,
        sequence.history,
        sequence.arrival_s,
        sequence.first_scheduled_s,
        first_token_s,
        ended_s,
        sequence.finish_reason,
    )


def make_times(started_s: float, *marks: tuple[TimeCause, float]) -> RequestTimes:
    times = RequestTimes(lambda: 0.0, started_s)
    times.marks.extend(marks)
    return times


def test_a_whole_request_in_order() -> None:
    manager = make_manager(max_steps_in_flight=1, max_num_seqs=1)
    add_sequence(manager, 0, max_tokens=3, ignore_eos=True)
    sequence = add_sequence(manager, 1, max_tokens=3, ignore_eos=True)
    worker, now_s = make_worker(manager), 0.0
    while (plan := manager.plan(now_s)) is not None:
        now_s += 1.0
        manager.commit(worker.execute(plan), now_s)
    times = make_times(-1.0, (TimeCause.BODY, -0.5), (TimeCause.TOKENIZING, -0.25), (TimeCause.ADMISSION, 0.0))
    times.answered_s = 6.25
    times.blocked.append((6.5, 8.0))
    found = explain("r", times, end_of(sequence, 6.0), 9.0, is_finished=True)
    check(found, 10.0)
    assert [(each.cause, each.end_s - each.start_s) for each in found.intervals] == [
        (TimeCause.BODY, 0.5),
        (TimeCause.TOKENIZING, 0.25),
        (TimeCause.ADMISSION, 0.25),
        (TimeCause.SLOTS, 3.0),
        (TimeCause.PREFILL, 1.0),
        (TimeCause.DECODE, 2.0),
        (TimeCause.DETOKENIZING, 0.25),
        (TimeCause.WRITING, 0.25),
        (TimeCause.CLIENT_NOT_READING, 1.5),
        (TimeCause.WRITING, 1.0),
    ]
    slots = found.intervals[3]
    assert (slots.rule, slots.scheduling_policy, slots.behind_sequence_id) == (
        "max_num_seqs",
        "fcfs",
        None,
    )  # it was the first itself
    assert found.finish_reason is FinishReason.LENGTH and found.sequence_id == 1


def test_an_explanation_has_a_bounded_number_of_intervals_and_exact_causes() -> None:
    log = ManagerLog("fcfs")
    history = SequenceHistory(0.0, log)
    for number in range(3 * MAX_INTERVALS):
        log.now_s = float(number)
        log.note((TimeCause.MEMORY, TimeCause.SLOTS)[number % 2], f"rule {number}", number)
    end = SequenceEnd(7, history, 0.0, None, None, None, None)
    end_s = 3.0 * MAX_INTERVALS
    found = explain("r", RequestTimes(lambda: end_s, 0.0), end, end_s, is_finished=False)
    check(found, end_s)
    assert MAX_INTERVALS / 2 <= len(found.intervals) <= MAX_INTERVALS
    assert found.causes == {TimeCause.MEMORY: end_s / 2, TimeCause.SLOTS: end_s / 2}


def test_joined_intervals_add_up_their_steps() -> None:
    prefill = Interval(TimeCause.PREFILL, 0.0, 1.0, steps=1, tokens=5, mean_other_sequences=3.0)
    prefill.absorb(Interval(TimeCause.DECODE, 1.0, 4.0, "r", 2, "fair", 3, 0, 1.0, 8))
    assert prefill == Interval(TimeCause.DECODE, 0.0, 4.0, "r", 2, "fair", 4, 5, 1.5, 8)
    wait = Interval(TimeCause.MEMORY, 4.0, 6.0)
    wait.absorb(Interval(TimeCause.SLOTS, 6.0, 7.0))
    assert wait == Interval(TimeCause.MEMORY, 4.0, 7.0)


def test_equal_states_of_the_queue_are_one_interval() -> None:
    log = ManagerLog("fcfs")
    history = SequenceHistory(0.0, log)
    for log.now_s in (0.0, 1.0, 2.0):
        log.note(TimeCause.MEMORY, "kv_blocks", 1)
    found = explain(
        "r", RequestTimes(lambda: 3.0, 0.0), SequenceEnd(7, history, 0.0, None, None, None, None), 3.0, False
    )
    assert found.intervals == [Interval(TimeCause.MEMORY, 0.0, 3.0, "kv_blocks", 1, "fcfs")]


def test_those_behind_the_first_name_it() -> None:
    manager = make_manager(max_steps_in_flight=1, max_num_seqs=1)
    for number in range(2):
        add_sequence(manager, number, max_tokens=3, ignore_eos=True)
    third = add_sequence(manager, 2, max_tokens=3, ignore_eos=True)
    manager.plan(0.0)
    found = explain("r", make_times(0.0), end_of(third, None), 4.0, is_finished=False)
    check(found, 4.0)
    assert [(each.cause, each.behind_sequence_id) for each in found.intervals] == [(TimeCause.SLOTS, 1)]


def test_an_api_process_that_has_no_history_explains_by_the_times_that_it_was_told() -> None:
    history = SequenceHistory(1.0, ManagerLog())
    for first_token_s, expected in ((4.0, [1.0, 1.0, 2.0, 3.0]), (None, [1.0, 1.0, 5.0])):
        end = SequenceEnd(0, history, 1.0, 2.0, first_token_s, 7.0, FinishReason.LENGTH)
        found = explain("r", make_times(0.0, (TimeCause.BODY, 1.0)), end, 7.0, is_finished=True)
        check(found, 7.0)
        assert [each.end_s - each.start_s for each in found.intervals] == expected
    queued = SequenceEnd(0, history, 1.0, None, None, None, None)
    assert explain("r", make_times(0.0), queued, 7.0, is_finished=False).causes == {TimeCause.QUEUE: 7.0}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(TimeCause), st.floats(-5.0, 30.0)), max_size=6),
    st.lists(st.tuples(st.floats(-5.0, 30.0), st.floats(-5.0, 30.0)), max_size=4),
    st.floats(0.1, 25.0),
    st.none() | st.floats(-1.0, 30.0),
    st.none() | st.floats(-1.0, 30.0),
)
def test_times_in_any_order_leave_no_gap(
    marks: list[tuple[TimeCause, float]],
    blocked: list[tuple[float, float]],
    end_s: float,
    ended_s: float | None,
    answered_s: float | None,
) -> None:
    times = make_times(0.0, *marks)
    times.blocked.extend(blocked)
    times.answered_s = answered_s
    end = SequenceEnd(0, SequenceHistory(0.5, ManagerLog()), 0.5, None, None, ended_s, None)
    check(explain("r", times, end, end_s, is_finished=True), end_s)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["fcfs", "priority", "shortest", "fair"]), st.integers(1, 2))
def test_whatever_happens_to_sequences_their_time_is_explained(seed: int, policy: str, depth: int) -> None:
    """Sequences come, are preempted, aborted, moved to another manager and back, and their worker is lost."""
    rng = random.Random(seed)
    limits = {"num_blocks": 24, "max_model_len": 80, "max_num_seqs": 4, "scheduling_policy": policy}
    managers = [make_manager(is_reckless=True, max_steps_in_flight=depth, **limits) for _ in range(2)]
    workers = [make_worker(manager) for manager in managers]
    plans: list[deque[StepPlan]] = [deque(), deque()]
    now_s, sequences = 1.0, dict[int, Sequence]()
    ended_s: dict[int, float] = {}

    def note_ends() -> None:
        for sequence_id, sequence in sequences.items():
            if sequence.finish_reason is not None:
                ended_s.setdefault(sequence_id, now_s)

    for number in range(150):
        index = rng.randrange(2)
        manager = managers[index]
        now_s += rng.random()
        match rng.randrange(12):
            case 0 | 1 if number < 110:
                length = rng.randint(1, 40)
                sequence = add_sequence(manager, number, length, rng.randint(1, 30), ignore_eos=rng.random() < 0.7)
                sequence.arrival_s = 0.0
                sequences[number] = sequence
            case 2 if manager.sequence_ids:
                manager.finish(rng.choice(manager.sequence_ids), FinishReason.ABORT)
            case 3 if rng.random() < 0.3:
                for failed in manager.restart():
                    manager.finish(failed.sequence_id, FinishReason.ERROR)
                plans[index].clear()
                workers[index] = make_worker(manager)
            case 4 if rng.random() < 0.3:
                for command in manager.withdraw(None):
                    sequences[command.sequence_id] = managers[1 - index].add(command)
            case _:
                while (plan := manager.plan(now_s)) is not None:
                    plans[index].append(plan)
                if plans[index]:
                    now_s += rng.random()
                    manager.commit(workers[index].execute(plans[index].popleft()), now_s)
        note_ends()
    for sequence_id, sequence in sequences.items():
        found = explain(
            "r", make_times(-1.0, (TimeCause.BODY, 0.0)), end_of(sequence, ended_s.get(sequence_id)), now_s + 2, True
        )
        check(found, now_s + 3)
