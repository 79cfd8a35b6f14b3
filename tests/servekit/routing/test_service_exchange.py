"""Claims about what replicas learn of each other's tenants, and about whose turn it is then."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.protocol.sampling_params import SamplingParams
from servekit.routing.service_exchange import ServiceExchange, max_lead
from servekit.scheduler.commands import ChargeElsewhere
from servekit.scheduler.policy import POLICIES, Fair
from servekit.scheduler.sequence import Sequence
from servekit.scheduler.workload_manager import WorkloadManager
from tests.support.scheduler import add_prompt, make_manager, make_prompt, make_worker, run

NUM_SLOTS = 2


def make_managers(number: int, policy: str = "fair") -> list[WorkloadManager]:
    limits: dict[str, Any] = {"max_num_seqs": NUM_SLOTS, "num_blocks": 400, "enable_prefix_caching": False}
    return [make_manager(scheduling_policy=policy, **limits) for _ in range(number)]


def add(manager: WorkloadManager, sequence_id: int, tenant: str, length: int = 5, max_tokens: int = 8) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return add_prompt(manager, sequence_id, make_prompt(sequence_id, length), sampling, tenant=tenant)


def compute(manager: WorkloadManager, tenant: str, num_tokens: int) -> None:
    """Let a manager without work compute so many positions for a tenant."""
    add(manager, 1_000, tenant, num_tokens, max_tokens=1)
    run(manager, make_worker(manager))


def exchange(managers: list[WorkloadManager], service: ServiceExchange) -> None:
    for manager, command in zip(managers, service.commands(managers), strict=True):
        if command is not None:
            manager.apply(command)


def counters(manager: WorkloadManager) -> dict[str, int]:
    assert isinstance(manager.waiting_queue, Fair)
    return manager.waiting_queue.num_served_tokens


def test_each_replica_learns_what_the_others_computed_and_learns_it_once() -> None:
    managers, service = make_managers(3), ServiceExchange()
    compute(managers[0], "a", 30)
    compute(managers[1], "a", 5)
    compute(managers[1], "b", 40)
    commands = service.commands(managers)
    assert [None if each is None else each.num_tokens for each in commands] == [
        {"a": 5, "b": 40},
        {"a": 30},
        {"a": 35, "b": 40},
    ]
    for manager, command in zip(managers, commands, strict=True):
        assert command is not None
        manager.apply(command)
    assert service.commands(managers) == [None, None, None], "what others computed is not reported as one's own"


def test_where_two_tenants_wait_their_counters_are_sums_over_all_replicas() -> None:
    managers, service = make_managers(3), ServiceExchange()
    for manager in managers[:2]:
        for number, tenant in enumerate("ab"):
            add(manager, number, tenant)
    for _ in range(3):
        compute(managers[2], "a", 30)
        compute(managers[2], "b", 12)
        exchange(managers, service)
    assert counters(managers[0]) == counters(managers[1]) == {"a": 90, "b": 36}


def test_a_tenant_that_is_served_elsewhere_waits_behind_one_that_is_not() -> None:
    managers, service = make_managers(2), ServiceExchange()
    sequences = [add(managers[0], number, "modest" if number % 2 else "flood") for number in range(6)]
    compute(managers[1], "flood", 200)
    exchange(managers, service)
    worker, now_s = make_worker(managers[0]), 0.0
    while managers[0].has_work:
        now_s += 1.0
        plan = managers[0].plan(now_s)
        assert plan is not None
        managers[0].commit(worker.execute(plan), now_s)
    began_s = [sequence.first_scheduled_s or 0.0 for sequence in sequences]
    assert max(began_s[1::2]) <= min(began_s[::2]), "of the modest tenant, and of the other one"


def test_a_replica_that_is_gone_is_forgotten_and_its_successor_starts_at_zero() -> None:
    managers, service = make_managers(2), ServiceExchange()
    compute(managers[0], "a", 30)
    exchange(managers, service)
    managers[0] = make_managers(1)[0]
    compute(managers[0], "a", 10)
    commands = service.commands(managers)
    assert commands[0] is None and commands[1] is not None and commands[1].num_tokens == {"a": 10}
    assert len(service._reported) == 2


def test_a_lead_for_what_others_compute_has_a_bound() -> None:
    (manager,) = make_managers(1)
    add(manager, 0, "modest")
    lead = max_lead([manager])
    assert lead == Fair.max_lag(NUM_SLOTS, manager.config.max_total_tokens)
    for _ in range(3):
        manager.apply(ChargeElsewhere({"flood": lead}, lead))
    add(manager, 1, "flood")
    assert counters(manager) == {"modest": 0, "flood": lead}
    run(manager, make_worker(manager))
    assert counters(manager) == {"modest": 12, "flood": lead + 12}, "what is computed here is always counted"


def test_while_no_tenant_waits_the_next_one_starts_level_with_those_that_are_served_elsewhere() -> None:
    """It was idle, and gains nothing by it."""
    (manager,) = make_managers(1)
    manager.apply(ChargeElsewhere({"busy": 500, "other": 300}, 10_000))
    add(manager, 0, "idle")
    assert counters(manager)["idle"] == 300
    add(manager, 1, "busy")
    assert counters(manager)["busy"] == 500
    assert manager.waiting_queue.num_computed_tokens() == {"busy": 0, "other": 0, "idle": 0}


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"fair"}))
def test_without_shares_nothing_is_exchanged(policy: str) -> None:
    managers, service = make_managers(2, policy), ServiceExchange()
    compute(managers[0], "a", 30)
    assert service.commands(managers) == [None, None]
    managers[1].apply(ChargeElsewhere({"a": 30}, 100))
    assert managers[1].waiting_queue.num_served("a") == 0


def test_one_replica_alone_gets_no_command() -> None:
    managers, service = make_managers(1), ServiceExchange()
    compute(managers[0], "a", 30)
    assert service.commands(managers) == [None]
