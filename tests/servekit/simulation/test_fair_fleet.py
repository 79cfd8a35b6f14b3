"""Claims about tenants that share several replicas: they get as much as of one replica that is as large as all.

Virtual time, with the real workload managers and the real router; see servekit/simulation/fleet.py.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from benchmarks import routing
from servekit.routing.router import Route, Router
from servekit.routing.service_exchange import ServiceExchange
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.policy import Fair
from servekit.simulation.fleet import EXCHANGE_EVERY_S, Conversation, Fleet, FleetSimulation, RoutingPolicy, Turn

MAX_NUM_SEQS, MAX_MODEL_LEN = 8, 700
SCHEDULER = replace(
    routing.REPLICA, scheduling_policy="fair", max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, num_blocks=400
)
SPAN_S = 6.0  # in which all tenants have more to compute than they get


def make_requests(seed: int, tenant: str, number: int, gap_s: float = 0.0) -> list[Conversation]:
    rng = random.Random(f"{seed} {tenant}")
    found = []
    for index in range(number):
        prompt = tuple(rng.choices(range(50_000), k=rng.randint(100, 500)))
        found.append(Conversation(index * gap_s, tenant, (Turn(prompt, rng.randint(5, 100)),)))
    return found


def make_fleet(num_replicas: int, *requests: list[Conversation]) -> Fleet:
    """The first tenants come first: with the other order, a flood would wait behind what comes after it."""
    conversations = tuple(each for tenant in requests for each in tenant)
    return Fleet(scheduler=SCHEDULER, models=(routing.MODEL,) * num_replicas, conversations=conversations)


def play(fleet: Fleet, policy: RoutingPolicy | None = None) -> FleetSimulation:
    simulation = FleetSimulation(fleet, policy or Router(routing.BLOCK_SIZE))
    simulation.run()
    return simulation


def service(simulation: FleetSimulation) -> Counter[str]:
    """Return how many tokens each tenant's answers have that ended in time, with their prompts."""
    found: Counter[str] = Counter()
    for record in simulation.records:
        if record.ended_s <= SPAN_S:
            conversation = simulation.fleet.conversations[record.conversation]
            found[conversation.tenant] += record.num_prompt_tokens + conversation.turns[record.turn].num_output_tokens
    return found


@pytest.mark.parametrize("num_replicas", [4, pytest.param(8, marks=pytest.mark.long)])
def test_tenants_get_of_many_replicas_what_they_get_of_one_big_one(num_replicas: int) -> None:
    """One floods with three times as many requests as the others; all ask for more than their share."""
    tenants = [("flood", 60), ("a", 20), ("b", 20)]
    fleet = make_fleet(num_replicas, *(make_requests(1, tenant, number * num_replicas) for tenant, number in tenants))
    of_many, of_one = service(play(fleet)), service(play(routing.one_big(fleet)))
    bound = Fair.max_lag(num_replicas * MAX_NUM_SEQS, MAX_MODEL_LEN)
    for tenant, _ in tenants:
        difference = abs(of_many[tenant] / of_many.total() - of_one[tenant] / of_one.total())
        assert difference < 0.05, (of_many, of_one)
        assert difference * of_many.total() < bound


class Pinned(routing.RoundRobin):
    """The modest tenant's sequences fit on the first replica only."""

    def route(self, commands: list[AddSequence]) -> Route:  # type: ignore[override]
        return Route(0, 0, 0.0) if commands[0].tenant == "modest" else super().route(commands)


@pytest.mark.parametrize("num_replicas", [4, pytest.param(8, marks=pytest.mark.long)])
def test_a_tenant_that_waits_on_one_replica_has_it_while_another_is_served_on_all(
    num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(num_replicas, make_requests(2, "flood", 45 * num_replicas), make_requests(2, "modest", 60))

    def modest_share() -> float:
        computed = service(play(fleet, Pinned(routing.BLOCK_SIZE)))
        return num_replicas * computed["modest"] / computed.total()

    assert modest_share() > 0.75, "of one replica"
    monkeypatch.setattr(ServiceExchange, "commands", lambda self, managers: [None] * len(managers))
    assert 0.4 < modest_share() < 0.6, "if each replica counts for itself"


@pytest.mark.parametrize("num_replicas", [4, pytest.param(8, marks=pytest.mark.long)])
def test_a_modest_tenant_waits_a_few_steps_while_another_floods_all_replicas(num_replicas: int) -> None:
    """It asks 25 times, one request after the other, while everything is full."""
    modest = make_requests(3, "modest", 25, gap_s=SPAN_S / 25)
    fleet = make_fleet(num_replicas, make_requests(3, "flood", 60 * num_replicas), modest)

    records = play(fleet).records

    def waiting_s(tenant: str) -> list[float]:
        return [each.ttft_s for each in records if fleet.conversations[each.conversation].tenant == tenant]

    assert max(waiting_s("modest")) < 1.0 < SPAN_S < max(waiting_s("flood"))


def test_what_replicas_do_not_know_of_each_other_is_what_they_computed_since_the_last_exchange() -> None:
    fleet = make_fleet(4, make_requests(4, "flood", 200), make_requests(4, "modest", 60))
    simulation = FleetSimulation(fleet, Pinned(routing.BLOCK_SIZE))
    exchange = simulation._exchange_service
    unknown: list[int] = []

    def check_and_exchange() -> None:
        computed = [replica.manager.waiting_queue.num_computed_tokens() for replica in simulation._replicas.values()]
        total = sum((Counter(each) for each in computed), Counter())
        exchange()
        for replica in simulation._replicas.values():
            if replica.manager.has_work:
                counters = {tenant: replica.manager.waiting_queue.num_served(tenant) for tenant in total}
                unknown.append(max(total[tenant] - counters[tenant] for tenant in total))

    simulation._exchange_service = check_and_exchange  # type: ignore[method-assign]
    simulation.run()
    assert len(unknown) > 20 and max(unknown) <= 0, EXCHANGE_EVERY_S
