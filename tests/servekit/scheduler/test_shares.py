"""Claims about shares of slots and blocks: which running sequence gives way to another tenant, and which never does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.policy import POLICIES, Fair
from servekit.scheduler.sequence import Sequence, Status
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.worker import SimulatedWorker
from tests.support.scheduler import add_prompt, make_manager, make_prompt, make_sequence, make_worker, reference, run

LONG_ANSWER = 200
ROOMY = {"num_blocks": 1000, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def add(manager: WorkloadManager, number: int, tenant: str, prompt_length: int = 5, max_tokens: int = 8) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return add_prompt(
        manager, number, make_prompt(number, prompt_length), sampling, tenant=tenant, has_length_bound=True
    )


def step(manager: WorkloadManager, worker: SimulatedWorker, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        manager.commit(worker.execute(manager.plan(0.0)), 0.0)
        manager.check()


def held_by_others(num_sequences: int = 12, **limits: Any) -> tuple[WorkloadManager, SimulatedWorker, list[Sequence]]:
    """A manager under `fair` in which the tenant "greedy" holds all slots, with long answers, and has more waiting."""
    manager = make_manager(scheduling_policy="fair", **(ROOMY | limits))
    worker = make_worker(manager)
    greedy = [add(manager, number, "greedy", max_tokens=LONG_ANSWER) for number in range(num_sequences)]
    step(manager, worker, 3)
    assert manager.num_running == manager.config.max_num_seqs
    return manager, worker, greedy


def slots(sequences: list[Sequence]) -> Counter[str]:
    return Counter(sequence.tenant for sequence in sequences if sequence.status is Status.RUNNING)


@pytest.mark.parametrize("num_greedy", [8, 12], ids=["nothing waits", "more waits"])
def test_a_tenant_without_a_slot_starts_at_once_while_another_holds_all(num_greedy: int) -> None:
    manager, worker, greedy = held_by_others(num_greedy)
    modest = add(manager, 100, "modest")
    step(manager, worker, 2)
    assert modest.num_output_tokens > 0
    assert manager.num_share_preemptions == manager.num_preemptions == 1
    assert [sequence.num_share_preemptions for sequence in greedy[:8]] == [0] * 7 + [1], "the last-ranked"
    run(manager, worker)
    assert all(sequence.output_token_ids == reference(sequence) for sequence in [*greedy, modest])


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"fair"}))
def test_without_shares_it_waits_until_an_answer_ends(policy: str) -> None:
    manager = make_manager(scheduling_policy=policy, **ROOMY)
    worker = make_worker(manager)
    for number in range(8):
        add(manager, number, "greedy", max_tokens=LONG_ANSWER)
    step(manager, worker)
    modest = add(manager, 100, "modest")
    step(manager, worker, LONG_ANSWER - 10)
    assert not modest.num_output_tokens and not manager.num_preemptions


def test_tenants_that_ask_for_everything_get_equal_parts() -> None:
    manager, worker, greedy = held_by_others()
    others = [add(manager, 100 + number, "b", max_tokens=LONG_ANSWER) for number in range(8)]
    step(manager, worker, 40)
    assert slots([*greedy, *others]) == {"greedy": 4, "b": 4}
    others += [add(manager, 200 + number, "c", max_tokens=LONG_ANSWER) for number in range(8)]
    step(manager, worker, 40)
    assert sorted(slots([*greedy, *others]).values()) == [2, 3, 3]
    num_preemptions = manager.num_preemptions
    step(manager, worker, 60)
    assert manager.num_preemptions == num_preemptions, "equal parts stay as they are while no answer ends"


def test_a_tenant_that_is_alone_has_all_slots_again_as_soon_as_the_others_end() -> None:
    manager, worker, greedy = held_by_others()
    modest = add(manager, 100, "modest")
    while modest.status is not Status.FINISHED:
        step(manager, worker)
    step(manager, worker)
    assert slots(greedy) == {"greedy": 8}


def test_with_more_tenants_than_slots_no_tenant_loses_its_only_slot() -> None:
    manager = make_manager(scheduling_policy="fair", **(ROOMY | {"max_num_seqs": 2}))
    worker = make_worker(manager)
    sequences = [add(manager, number, tenant, max_tokens=20) for number, tenant in enumerate("aabcd")]
    step(manager, worker, 10)
    assert set(slots(sequences).values()) == {1}
    run(manager, worker)
    assert manager.num_preemptions <= 1


def test_a_tenant_that_was_served_more_takes_no_slot() -> None:
    """It computed a long prompt while the other's answers grew by few tokens, so it waits for its turn."""
    manager, worker, _ = held_by_others()
    heavy = add(manager, 100, "heavy", prompt_length=300, max_tokens=1)
    while heavy.status is not Status.FINISHED:
        step(manager, worker)
    again = add(manager, 101, "heavy", max_tokens=1)
    served = manager.waiting_queue.num_served_tokens  # type: ignore[attr-defined]
    num_preemptions, lead = manager.num_preemptions, served["heavy"] - served["greedy"]
    assert lead > 200
    step(manager, worker, lead // 8 - 1)
    assert not again.num_output_tokens and manager.num_preemptions == num_preemptions
    step(manager, worker, 4)
    assert again.num_output_tokens == 1


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_blocks_are_shared_like_slots(steps_in_flight: int) -> None:
    """The greedy tenant's three sequences will need 98 of 100 blocks, the modest one's needs 18."""
    limits = {"num_blocks": 100, "max_steps_in_flight": steps_in_flight}
    manager = make_manager(scheduling_policy="fair", **(ROOMY | limits))
    worker = make_worker(manager)
    greedy = [add(manager, number, "greedy", prompt_length=100, max_tokens=30) for number in range(3)]
    step(manager, worker, 6)
    modest = add(manager, 100, "modest", prompt_length=40, max_tokens=30)
    plans = []
    for _ in range(2 + 2 * steps_in_flight):
        while (plan := manager.plan(0.0)) is not None:
            plans.append(plan)
        manager.commit(worker.execute(plans.pop(0)), 0.0)
        manager.check()
    assert modest.num_output_tokens > 0
    assert [sequence.num_share_preemptions for sequence in greedy] == [0, 0, 1]
    for plan in plans:
        manager.commit(worker.execute(plan), 0.0)
    run(manager, worker)
    assert all(sequence.output_token_ids == reference(sequence) for sequence in [*greedy, modest])


def test_nothing_is_preempted_for_a_sequence_that_would_still_not_fit() -> None:
    """One sequence has most of the blocks. The short ones beside it leave too little, even if all of them go."""
    manager = make_manager(scheduling_policy="fair", **(ROOMY | {"num_blocks": 100}))
    worker = make_worker(manager)
    add(manager, 0, "greedy", prompt_length=200, max_tokens=60)  # 65 blocks at its end
    for number in range(1, 4):
        add(manager, number, "greedy", prompt_length=20, max_tokens=20)
    step(manager, worker, 6)
    modest = add(manager, 100, "modest", prompt_length=180, max_tokens=20)  # 50 blocks at its end
    step(manager, worker, 10)
    assert modest.status is Status.WAITING and manager.num_preemptions == 0
    run(manager, worker)
    assert modest.output_token_ids == reference(modest)


def test_nothing_is_preempted_for_a_slot_without_blocks() -> None:
    manager = make_manager(scheduling_policy="fair", **(ROOMY | {"num_blocks": 100, "max_num_seqs": 2}))
    worker = make_worker(manager)
    add(manager, 0, "greedy", prompt_length=200, max_tokens=60)  # 65 blocks at its end
    add(manager, 1, "greedy", prompt_length=20, max_tokens=20)
    step(manager, worker, 6)
    add(manager, 100, "modest", prompt_length=180, max_tokens=20)  # 50 blocks at its end
    step(manager, worker, 5)
    assert manager.num_preemptions == 0


def test_preemptions_for_shares_do_not_count_as_shortages_of_blocks() -> None:
    """Otherwise each modest request would bring a greedy sequence closer to blocks for its whole context."""
    manager, worker, greedy = held_by_others(8, max_preemptions=2)
    safety_factor = manager.output_lengths.safety_factor
    for number in range(100, 105):
        modest = add(manager, number, "modest", max_tokens=2)
        while modest.status is not Status.FINISHED:
            step(manager, worker)
        step(manager, worker, 2)
    last = greedy[-1]
    assert last.num_preemptions == last.num_share_preemptions == 5
    assert not manager.kv_cache.is_pinned(last) and manager.output_lengths.safety_factor == safety_factor


def test_a_sequence_in_quarantine_is_not_interrupted() -> None:
    manager, worker, _ = held_by_others(8)
    manager.restart()
    step(manager, worker)
    manager.plan(0.0)
    manager.restart()
    manager.plan(0.0)
    manager.restart()
    assert manager.quarantine
    add(manager, 100, "modest")
    manager.plan(0.0)
    assert manager.num_running <= 1 and not manager.num_share_preemptions


# -- the conditions, one by one ----------------------------------------------------------------------------------------


def find_victim(running: str, tenant: str, size: int = 1, served: str = "abcdefgh", **sizes: int) -> int | None:
    """Which of the running sequences is the victim, by its place. `served` names the least served tenant first."""
    queue = Fair()
    queue.num_served_tokens = {name: number for number, name in enumerate(served)}
    sequences = [make_sequence(number, tenant=name) for number, name in enumerate(running)]
    victim = queue.find_victim(tenant, size, sequences, lambda sequence: sizes.get(sequence.tenant, 1))
    return None if victim is None else victim.sequence_id


def test_the_victim_is_the_last_ranked_of_the_tenant_that_holds_most() -> None:
    assert find_victim("bbcccb", "a") == 5
    assert find_victim("bbcccbc", "a") == 6
    assert find_victim("bbcccb", "a", c=2) == 4


def test_a_victims_tenant_still_holds_as_much_as_the_one_that_takes() -> None:
    assert find_victim("bbba", "a") == 2
    assert find_victim("bba", "a") is None
    assert find_victim("bb", "a") == 1
    assert find_victim("bbb", "a", size=2) == 2
    assert find_victim("bbb", "a", size=3) is None
    assert find_victim("b", "a") is None


def test_a_tenant_takes_only_from_those_that_were_served_more() -> None:
    assert find_victim("bbbcc", "a", served="bac") == 4
    assert find_victim("bbbcc", "a", served="cba") is None


def test_a_tenant_that_is_alone_takes_nothing() -> None:
    assert find_victim("aaaa", "a") is None
    assert find_victim("aaaa", "a", served="a") is None


def test_the_first_ranked_sequence_of_a_tenant_is_never_a_victim() -> None:
    """Even if it is the only one that is large enough."""
    queue = Fair()
    queue.num_served_tokens = {"a": 0, "b": 1}
    first, second = make_sequence(0, tenant="b"), make_sequence(1, tenant="b")
    sizes = {0: 4, 1: 9}
    assert queue.find_victim("a", 6, [first, second], lambda sequence: sizes[sequence.sequence_id]) is None


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"fair"}))
def test_other_policies_have_no_shares(policy: str) -> None:
    queue = POLICIES[policy]()
    running = [make_sequence(number, tenant="b") for number in range(8)]
    assert not queue.has_shares and queue.find_victim("a", 1, running, lambda _: 1) is None
