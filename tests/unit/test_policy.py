"""Claims about who is seated next."""

from __future__ import annotations

import pytest

from servekit.policy import (
    PRIORITY_LEVEL_S,
    SHORT_SHARE,
    Fair,
    FirstComeFirstServed,
    Priority,
    Shortest,
    WaitingLine,
    _Queue,
)
from servekit.sampling_params import SamplingParams
from servekit.sequence import Sequence, Status


def make_sequence(sequence_id: int, length: int = 1, **fields: object) -> Sequence:
    return Sequence(sequence_id, [1] * length, SamplingParams(max_tokens=5), float(sequence_id), **fields)  # type: ignore[arg-type]


def seat_all(line: WaitingLine) -> list[int]:
    """Everybody in the line, in the order in which they are seated."""
    order = []
    while (sequence := line.first()) is not None:
        sequence.status = Status.RUNNING
        line.seated(sequence)
        line.charge(sequence, sequence.num_tokens)
        order.append(sequence.sequence_id)
    return order


def test_first_come_is_first_served_whatever_its_length_and_priority() -> None:
    line = FirstComeFirstServed()
    for sequence in (make_sequence(2, 1, priority=-9), make_sequence(0, 30), make_sequence(1, 5)):
        line.push(sequence)
    assert seat_all(line) == [0, 1, 2]


def test_a_priority_level_is_worth_some_waiting_and_no_more() -> None:
    line = Priority()
    patient = make_sequence(0, priority=1)
    soon, late = make_sequence(1), make_sequence(2)
    soon.arrival_s, late.arrival_s = PRIORITY_LEVEL_S - 1, PRIORITY_LEVEL_S + 1
    for sequence in (late, patient, soon):
        line.push(sequence)
    assert seat_all(line) == [1, 0, 2]


def test_who_left_the_line_is_not_seated_and_who_comes_back_is() -> None:
    line = FirstComeFirstServed()
    gone, preempted, other = sequences = [make_sequence(i) for i in range(3)]
    for sequence in sequences:
        line.push(sequence)
    gone.status = Status.FINISHED
    preempted.status = Status.RUNNING
    preempted.forget_seat()
    preempted.status = Status.WAITING
    line.push(preempted)
    assert seat_all(line) == [1, 2]
    assert other.status is Status.RUNNING


@pytest.mark.parametrize("line", [FirstComeFirstServed(), Shortest(), Fair()], ids=lambda line: type(line).__name__)
def test_a_line_does_not_grow_with_those_who_gave_up(line: WaitingLine) -> None:
    """The head is stuck for want of memory, and behind it clients come and go."""
    stuck = make_sequence(0)
    line.push(stuck)
    for i in range(1, 5000):
        sequence = make_sequence(i)
        line.push(sequence)
        sequence.status = Status.FINISHED
        line.discard(sequence)
    queues = [value for value in vars(line).values() if isinstance(value, _Queue)]
    if isinstance(line, Fair):
        queues = list(line._queues.values())
    assert 0 < sum(map(len, queues)) < 10
    assert seat_all(line) == [0]


def test_the_shortest_goes_first_until_enough_has_passed_the_oldest() -> None:
    line = Shortest()
    line.push(make_sequence(0, 40))
    for i in range(1, 100):
        line.push(make_sequence(i, 10))
    order = seat_all(line)
    passed = order.index(0)
    assert order == [*range(1, passed + 1), 0, *range(passed + 1, 100)]
    assert 10 * passed == pytest.approx(40 * SHORT_SHARE / (1 - SHORT_SHARE), abs=10)


def test_prompts_of_much_the_same_length_go_in_order_of_arrival() -> None:
    """Where more come than can be served, the longest of them would otherwise wait until their clients leave."""
    line = Shortest()
    for number, length in enumerate((30, 20, 17, 40, 31)):
        line.push(make_sequence(number, length))
    order = []
    while (sequence := line.first()) is not None:
        sequence.status = Status.RUNNING
        line.seated(sequence)
        order.append(sequence.num_tokens)
    assert order == [30, 20, 17, 31, 40]


def test_the_share_goes_to_what_is_shorter_even_while_somebody_is_overdue() -> None:
    line = Shortest()
    assert line.first(shorter_than=5) is None
    line.push(make_sequence(0, 10))
    for i in range(1, 5):
        line.push(make_sequence(i, 9))
    for _ in range(4):
        sequence = line.first(shorter_than=10)
        assert sequence is not None and sequence.num_tokens == 9
        sequence.status = Status.RUNNING
        line.seated(sequence)
    assert line.first(shorter_than=10) is None
    overdue = line.first()
    assert overdue is not None and overdue.sequence_id == 0


def test_the_least_served_tenant_is_next_and_within_it_the_first() -> None:
    line = Fair()
    sequences = [
        make_sequence(0, 8, tenant="a"),
        make_sequence(1, 1, tenant="a"),
        make_sequence(2, 3, tenant="b"),
        make_sequence(3, 3, tenant="b"),
        make_sequence(4, 3, tenant="b"),
    ]
    for sequence in sequences:
        line.push(sequence)
    assert seat_all(line) == [0, 2, 3, 4, 1]
    assert line.served == {"a": 9, "b": 9}


def test_idling_saves_up_no_credit() -> None:
    line = Fair()
    for i in range(10):
        line.push(make_sequence(i, 10, tenant="busy"))
    seat_all(line)
    line.push(make_sequence(10, 10, tenant="idle"))
    assert line.served["idle"] == 100, "level with the one that left the line last"
    line.push(make_sequence(11, 10, tenant="busy"))
    line.push(make_sequence(12, 10, tenant="idle"))
    assert seat_all(line) == [11, 10, 12]


def test_a_fair_share_for_the_short_is_that_of_the_tenant_whose_turn_it_is() -> None:
    line = Fair()
    line.push(make_sequence(0, 10, tenant="a"))
    line.push(make_sequence(1, 2, tenant="b"))
    assert line.first(shorter_than=5) is None
    first = line.first(shorter_than=11)
    assert first is not None and first.sequence_id == 0
    line.discard(make_sequence(2, tenant="nobody"))
