"""Claims about the count of queued work."""

from __future__ import annotations

from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.queued_work import CombinedWork, QueuedWork, WorkCount
from servekit.scheduler.sequence import FinishReason
from tests.support.scheduler import add_prompt, assert_idle, make_manager, make_prompt, make_sequence, make_worker, run


def test_tenants_are_counted_apart_and_forgotten_when_they_have_nothing_left() -> None:
    queued = QueuedWork()
    sequences = [make_sequence(number, prompt_length=number + 1, tenant="aab"[number]) for number in range(3)]
    for sequence in sequences:
        queued.add(sequence)
    assert (queued.of("a"), queued.of("b"), queued.total) == (WorkCount(2, 3), WorkCount(1, 3), WorkCount(3, 6))
    queued.remove(sequences[2])
    assert queued.of("b") == queued.of("other") == WorkCount()
    queued.remove(sequences[0])
    assert queued.of("a") == queued.total == WorkCount(1, 2)


def test_prompts_within_a_power_of_two_count_as_equally_long() -> None:
    queued = QueuedWork()
    sequences = [make_sequence(number, prompt_length=length) for number, length in enumerate((1, 4, 7, 8, 1000))]
    for sequence in sequences:
        queued.add(sequence)
    numbers = [queued.not_longer(length).num_sequences for length in (1, 2, 3, 4, 5, 8, 511, 512, 10**9)]
    assert numbers == [1, 1, 1, 3, 3, 4, 4, 5, 5] and queued.not_longer(10**9) == queued.total
    queued.remove(sequences[1])
    assert queued.not_longer(4) == WorkCount(2, 8)


def test_a_sequence_is_queued_until_its_first_step_or_its_end() -> None:
    """A preempted one, or one whose worker was lost, waits again but is not counted again."""
    manager = make_manager(max_num_seqs=1)
    for number, tenant in enumerate("abb"):
        add_prompt(manager, number, make_prompt(number, 5), SamplingParams(max_tokens=4), tenant=tenant)
    assert manager.queued.of("a") == WorkCount(1, 5) and manager.queued.of("b") == WorkCount(2, 10)
    manager.plan(0.0)
    assert manager.queued.of("a") == WorkCount()
    manager.restart()
    manager.finish(2, FinishReason.ABORT)
    assert (manager.num_waiting, manager.queued.total) == (2, WorkCount(1, 5))
    run(manager, make_worker(manager))
    assert manager.queued.total == WorkCount()
    assert_idle(manager)


def test_the_work_of_several_managers_is_added_up_when_it_is_read() -> None:
    parts = QueuedWork(), QueuedWork()
    combined = CombinedWork(parts)
    for number, (part, tenant) in enumerate(((0, "a"), (0, "b"), (1, "a"))):
        parts[part].add(make_sequence(number, prompt_length=number + 1, tenant=tenant))
    assert combined.total == WorkCount(3, 6)
    assert (combined.of("a"), combined.of("other")) == (WorkCount(2, 4), WorkCount())
    assert combined.by_tenant() == {"a": WorkCount(2, 4), "b": WorkCount(1, 2)}
