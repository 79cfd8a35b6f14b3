"""Claims about replicas behind the router, in virtual time; `make bench-routing` has the tables of a larger fleet."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from benchmarks import routing
from servekit.routing.router import Router
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.fleet import Conversation, Fleet, FleetSimulation, Outage, Turn
from servekit.simulation.model import SimulatedModel

NUM_REPLICAS, WARM_UP_S, SPAN_S, SEED = 4, 6.0, 16.0, 1


def figures(load: float, policy: str) -> routing.Figures:
    fleet = routing.make_fleet(NUM_REPLICAS, load, SPAN_S, SEED)
    return routing.figures(routing.play(fleet, policy).records, WARM_UP_S, SPAN_S)


@pytest.mark.exhaustive
@pytest.mark.parametrize("load", routing.LOADS)
def test_the_router_finds_what_one_big_replica_would_and_answers_before_simple_policies(load: float) -> None:
    router = figures(load, "router")
    assert router.hit_rate >= 0.95 * figures(load, routing.ONE_BIG).hit_rate
    for policy in ("least requests", "conversation hash"):
        assert router.p99_s < 0.95 * figures(load, policy).p99_s, policy


def test_a_replica_that_returns_takes_its_part_and_its_share_does_not_oscillate() -> None:
    """Its cache is empty: conversations with cached prefixes stay on the others, and new ones begin on it."""
    lost_s, returns_s = 8.0, 12.0
    fleet = routing.make_fleet(NUM_REPLICAS, 0.8, 24.0, SEED, (Outage(0, lost_s, returns_s),))
    records = routing.play(fleet, "router").records
    assert routing.share_of(0, records, lost_s, returns_s) == 0.0

    def changes(from_s: float, to_s: float) -> float:
        moved, total = routing.num_moved(records, from_s, to_s)
        return moved / total

    shares = [routing.share_of(0, records, at_s, at_s + 3.0) for at_s in (12.0, 15.0, 18.0, 21.0)]
    assert all(0.25 / NUM_REPLICAS < share < 2.0 / NUM_REPLICAS for share in shares), shares
    assert changes(returns_s + 6.0, 24.0) <= changes(4.0, lost_s) + 0.1
    assert changes(returns_s, 24.0) < 0.25, "a quarter would be more conversations than it keeps"


def test_a_slow_replica_beside_a_fast_one_takes_the_smaller_part() -> None:
    slow = SimulatedModel(**{name: 1.5 * getattr(routing.MODEL, name) for name in routing.MODEL.__struct_fields__})
    fleet = replace(routing.make_fleet(2, 0.7, SPAN_S, SEED), models=(routing.MODEL, slow))
    records = routing.play(fleet, "router").records
    assert 0.1 < routing.share_of(1, records, WARM_UP_S, SPAN_S) < 0.45
    by_turns = routing.play(fleet, "round robin").records
    p99_s = [routing.figures(each, WARM_UP_S, SPAN_S).p99_s for each in (records, by_turns)]
    assert p99_s[0] < 0.7 * p99_s[1]


def test_every_answer_ends_and_nothing_is_left_though_replicas_are_lost() -> None:
    outages = (Outage(0, 2.0, 4.0), Outage(1, 5.0, 6.0), Outage(0, 8.0, 8.5))
    fleet = routing.make_fleet(3, 1.2, 10.0, SEED, outages)
    simulation = routing.play(fleet, "router")
    assert len(simulation.records) == sum(len(conversation.turns) for conversation in fleet.conversations)
    for record in simulation.records:
        assert record.asked_s < record.first_token_s <= record.ended_s
        assert record.num_cached_tokens < record.num_prompt_tokens
    for replica in simulation._replicas.values():
        assert not replica.manager.has_work
        replica.manager.check()
    assert simulation.num_moves > 0, "the returned replica takes what waits elsewhere"


def test_requests_of_one_moment_are_spread_by_every_policy_that_sees_the_load() -> None:
    burst = tuple(Conversation(1.0, "", (Turn(tuple(range(n, n + 200)), 5),)) for n in range(0, 40_000, 1000))
    fleet = Fleet(scheduler=routing.REPLICA, models=(routing.MODEL,) * 4, conversations=burst)
    for policy in (Router, routing.RoundRobin, routing.LeastRequests):
        simulation = FleetSimulation(fleet, policy(routing.BLOCK_SIZE))
        simulation.run()
        assert {routing.share_of(replica_id, simulation.records, 0.0, 2.0) for replica_id in range(4)} == {0.25}


class PromptRouter(Router):
    """Sends prompts to the first replica only, which is for prefill."""

    def add_replica(self, replica_id: int, manager: WorkloadManager) -> None:
        if replica_id == 0:
            super().add_replica(replica_id, manager)


def test_with_prefill_and_decode_apart_long_prompts_do_not_hold_up_streams() -> None:
    """Without it, a step of a long prompt takes ten times as long as one of decodes. Transfers take time, too."""
    fleet = routing.make_fleet(2, 0.1, 6.0, SEED)
    long = [Conversation(0.5 * number, "", (Turn((number,) * 4000, 2),)) for number in range(1, 12)]
    fleet = replace(fleet, conversations=(*fleet.conversations, *long))
    apart = replace(fleet, num_prefill_replicas=1, transfer_s=1e-6)
    together, handed_over = (
        FleetSimulation(fleet, Router(routing.BLOCK_SIZE)),
        FleetSimulation(apart, PromptRouter(routing.BLOCK_SIZE)),
    )
    together.run()
    handed_over.run()
    num_turns = sum(len(conversation.turns) for conversation in fleet.conversations)
    assert len(handed_over.records) == num_turns and handed_over.num_handed_over >= num_turns - 5
    longest_s = [max(max(each.gaps_s, default=0.0) for each in run.records) for run in (together, handed_over)]
    assert longest_s[1] < 0.5 * longest_s[0], longest_s
    for replica in handed_over._replicas.values():
        assert not replica.manager.has_work
        replica.manager.check()
