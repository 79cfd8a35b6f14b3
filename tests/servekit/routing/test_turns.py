"""Claims about what comes before a new sequence where tenants take turns."""

from __future__ import annotations

from typing import Any

from servekit.protocol.sampling_params import SamplingParams
from servekit.routing.replica import Load, Replica
from servekit.routing.turns import load_before
from servekit.scheduler.commands import ChargeElsewhere
from servekit.scheduler.workload_manager import WorkloadManager
from tests.support.scheduler import add_prompt, make_manager, make_prompt, make_worker

PROMPT_LENGTH, MEAN_LENGTH = 10, 8.0


def make_queue(policy: str = "fair", num_steps: int = 0, **num_sequences: int) -> WorkloadManager:
    """A manager with four slots, and so many sequences of each tenant."""
    manager = make_manager(scheduling_policy=policy, num_blocks=1000, max_num_seqs=4, max_num_batched_tokens=64)
    worker = make_worker(manager)
    for tenant, number in num_sequences.items():
        for _ in range(number):
            sequence_id = manager.num_waiting
            sampling = SamplingParams(max_tokens=100, ignore_eos=True)
            add_prompt(manager, sequence_id, make_prompt(sequence_id, PROMPT_LENGTH), sampling, tenant=tenant)
    for _ in range(num_steps):
        plan = manager.plan(0.0)
        assert plan is not None
        manager.commit(worker.execute(plan), 0.0)
    return manager


def before(manager: WorkloadManager, tenant: str) -> tuple[Load, Load]:
    """All load, and what of it comes before a new sequence of the tenant."""
    load = Replica(0, manager).load()
    return load, load_before(load, manager, tenant, MEAN_LENGTH)


def assert_only_differs_in(before: Load, load: Load, **values: Any) -> None:
    for name in Load.__struct_fields__:
        assert getattr(before, name) == values.get(name, getattr(load, name)), name


def test_a_tenant_that_was_served_least_overtakes_the_queue_and_takes_a_slot() -> None:
    load, found = before(make_queue(num_steps=3, flood=24), "modest")
    assert (load.num_running, load.num_waiting, load.num_prefill_tokens) == (4, 20, 20 * PROMPT_LENGTH)
    assert_only_differs_in(found, load, num_running=3, num_waiting=0, num_queued_tokens=0, num_prefill_tokens=0)


def test_the_tenant_that_floods_waits_for_its_own_queue() -> None:
    load, found = before(make_queue(num_steps=3, flood=24), "flood")
    assert found == load


def test_a_tenant_that_holds_its_part_of_the_slots_takes_none() -> None:
    load, found = before(make_queue(num_steps=3, modest=2, flood=2), "modest")
    assert found == load and load.num_running == 4


def test_with_a_free_slot_none_is_taken() -> None:
    load, found = before(make_queue(num_steps=3, flood=2), "modest")
    assert found == load and load.num_running == 2


def test_a_tenant_that_was_served_most_waits_for_all() -> None:
    manager = make_queue(num_steps=3, flood=24)
    manager.apply(ChargeElsewhere({"greedy": 10_000}, 1_000_000))
    load, found = before(manager, "greedy")
    assert found == load


def test_level_tenants_wait_for_as_much_of_the_other_as_they_have_queued_themselves() -> None:
    load, found = before(make_queue(a=10, b=30), "a")
    assert load.num_waiting == 40
    assert_only_differs_in(found, load, num_waiting=20, num_queued_tokens=200, num_prefill_tokens=200)


def test_what_is_overtaken_is_cached_as_often_as_prompts_were_until_now() -> None:
    manager = make_queue(a=10, b=30)
    manager.num_prompt_tokens, manager.num_cached_tokens = 400, 300
    load, found = before(manager, "a")
    assert found.num_prefill_tokens == load.num_prefill_tokens - 50


def test_without_turns_everything_comes_before_it() -> None:
    load, found = before(make_queue("shortest", flood=24), "modest")
    assert found is load and load.copy() == load and load.queued is None
