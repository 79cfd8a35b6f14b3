"""Claims about which sequence is admitted next."""

from __future__ import annotations

import pytest

from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.policy import (
    POLICIES,
    PRIORITY_LEVEL_S,
    SHORT_SHARE,
    Fair,
    FirstComeFirstServed,
    Priority,
    Shortest,
    WaitingQueue,
    _KeyedQueue,
)
from servekit.scheduler.sequence import NEVER, Sequence, Status
from tests.support.scheduler import add_prompt, make_manager, make_prompt, make_worker


def make_sequence(sequence_id: int, length: int = 1, **fields: object) -> Sequence:
    return Sequence(sequence_id, [1] * length, SamplingParams(max_tokens=5), float(sequence_id), **fields)  # type: ignore[arg-type]


def admit_all(queue: WaitingQueue) -> list[int]:
    """All sequences of the queue, in the order in which they are admitted."""
    order = []
    while (sequence := queue.first()) is not None:
        sequence.status = Status.RUNNING
        queue.admitted(sequence)
        queue.charge(sequence, sequence.num_tokens)
        order.append(sequence.sequence_id)
    return order


def test_fcfs_admits_in_order_of_arrival_at_any_length_and_priority() -> None:
    queue = FirstComeFirstServed()
    for sequence in (make_sequence(2, 1, priority=-9), make_sequence(0, 30), make_sequence(1, 5)):
        queue.push(sequence)
    assert admit_all(queue) == [0, 1, 2]


def test_a_priority_level_is_worth_its_seconds_of_waiting_and_no_more() -> None:
    queue = Priority()
    patient = make_sequence(0, priority=1)
    soon, late = make_sequence(1), make_sequence(2)
    soon.arrival_s, late.arrival_s = PRIORITY_LEVEL_S - 1, PRIORITY_LEVEL_S + 1
    for sequence in (late, patient, soon):
        queue.push(sequence)
    assert admit_all(queue) == [1, 0, 2]


def test_ended_sequences_are_not_admitted_and_preempted_ones_are() -> None:
    queue = FirstComeFirstServed()
    gone, preempted, other = sequences = [make_sequence(i) for i in range(3)]
    for sequence in sequences:
        queue.push(sequence)
    gone.status = Status.FINISHED
    preempted.status = Status.RUNNING
    preempted.reset_computation()
    preempted.status = Status.WAITING
    queue.push(preempted)
    assert admit_all(queue) == [1, 2]
    assert other.status is Status.RUNNING


@pytest.mark.parametrize("queue", [FirstComeFirstServed(), Shortest(), Fair()], ids=lambda queue: type(queue).__name__)
def test_queues_do_not_grow_with_aborted_sequences(queue: WaitingQueue) -> None:
    """The first has no memory, and behind it clients arrive and abort."""
    stuck = make_sequence(0)
    queue.push(stuck)
    for i in range(1, 5000):
        sequence = make_sequence(i)
        queue.push(sequence)
        sequence.status = Status.FINISHED
        queue.discard(sequence)
    queues = [value for value in vars(queue).values() if isinstance(value, _KeyedQueue)]
    if isinstance(queue, Fair):
        queues = list(queue._queues.values())
    assert 0 < sum(len(each.heap) for each in queues) < 10
    assert admit_all(queue) == [0]


def test_shortest_is_first_until_enough_tokens_overtook_the_oldest() -> None:
    queue = Shortest()
    queue.push(make_sequence(0, 40))
    for i in range(1, 100):
        queue.push(make_sequence(i, 10))
    order = admit_all(queue)
    passed = order.index(0)
    assert order == [*range(1, passed + 1), 0, *range(passed + 1, 100)]
    assert 10 * passed == pytest.approx(40 * SHORT_SHARE / (1 - SHORT_SHARE), abs=10)


def test_prompts_of_similar_length_are_admitted_in_order_of_arrival() -> None:
    """Under overload the longest of them would otherwise wait until their clients give up."""
    queue = Shortest()
    for number, length in enumerate((30, 20, 17, 40, 31)):
        queue.push(make_sequence(number, length))
    order = []
    while (sequence := queue.first()) is not None:
        sequence.status = Status.RUNNING
        queue.admitted(sequence)
        order.append(sequence.num_tokens)
    assert order == [30, 20, 17, 31, 40]


def test_the_share_goes_to_shorter_prompts_even_while_the_oldest_is_overdue() -> None:
    queue = Shortest()
    assert queue.first(shorter_than=5) is None
    queue.push(make_sequence(0, 10))
    for i in range(1, 5):
        queue.push(make_sequence(i, 9))
    for _ in range(4):
        sequence = queue.first(shorter_than=10)
        assert sequence is not None and sequence.num_tokens == 9
        sequence.status = Status.RUNNING
        queue.admitted(sequence)
    assert queue.first(shorter_than=10) is None
    overdue = queue.first()
    assert overdue is not None and overdue.sequence_id == 0


def test_fair_admits_the_first_sequence_of_the_least_served_tenant() -> None:
    queue = Fair()
    sequences = [
        make_sequence(0, 8, tenant="a"),
        make_sequence(1, 1, tenant="a"),
        make_sequence(2, 3, tenant="b"),
        make_sequence(3, 3, tenant="b"),
        make_sequence(4, 3, tenant="b"),
    ]
    for sequence in sequences:
        queue.push(sequence)
    assert admit_all(queue) == [0, 2, 3, 4, 1]
    assert queue.num_served_tokens == {"a": 9, "b": 9}


def test_an_idle_tenant_saves_up_no_credit() -> None:
    queue = Fair()
    for i in range(10):
        queue.push(make_sequence(i, 10, tenant="busy"))
    admit_all(queue)
    queue.push(make_sequence(10, 10, tenant="idle"))
    assert queue.num_served_tokens["idle"] == 100, "level with the tenant that was the last to leave the queue"
    queue.push(make_sequence(11, 10, tenant="busy"))
    queue.push(make_sequence(12, 10, tenant="idle"))
    assert admit_all(queue) == [11, 10, 12]


def test_fair_gives_the_short_share_only_to_the_tenant_whose_turn_it_is() -> None:
    queue = Fair()
    queue.push(make_sequence(0, 10, tenant="a"))
    queue.push(make_sequence(1, 2, tenant="b"))
    assert queue.first(shorter_than=5) is None
    first = queue.first(shorter_than=11)
    assert first is not None and first.sequence_id == 0
    queue.discard(make_sequence(2, tenant="c"))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_deadline_never_moves_a_sequence_in_the_queue(policy: str) -> None:
    """It ends sequences, and is no way to jump the queue."""

    def order(has_deadlines: bool) -> list[int]:
        manager = make_manager(scheduling_policy=policy, max_num_seqs=1)
        worker, ended = make_worker(manager), list[int]()
        for number in range(12):
            is_urgent = has_deadlines and number % 3 == 2
            soon_s = 1e6 - number if is_urgent else NEVER
            tenant, prompt = "ab"[number % 2], make_prompt(number, 1 + number * 5 % 7)
            deadlines = {"ttft_deadline_s": soon_s, "deadline_s": soon_s}
            add_prompt(manager, number, prompt, SamplingParams(max_tokens=3), tenant=tenant, **deadlines)
        while manager.has_work:
            plan = manager.plan(0.0)
            assert plan is not None
            tokens = manager.commit(worker.execute(plan), 0.0)
            ended += [token.sequence.sequence_id for token in tokens if token.finish_reason is not None]
        return ended

    assert order(has_deadlines=True) == order(has_deadlines=False)
