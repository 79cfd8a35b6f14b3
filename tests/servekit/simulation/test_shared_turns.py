"""Claims about the promise of `fair` on several replicas, and the bugs that its check finds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.routing.service_exchange import ServiceExchange
from servekit.scheduler.policy import Fair
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.simulation.scenario import Arrival, Scenario
from servekit.simulation.service import Simulation
from servekit.simulation.worker import Violation
from tests.servekit.simulation.scenarios import with_drafts

GAPS_S = {"flood": 0.001, "greedy": 0.002, "modest": 0.01}  # between two requests of a tenant


def make_flood(seed: int) -> Scenario:
    """Three tenants that together ask three or four replicas for more than they can compute."""
    rng = random.Random(seed)
    scheduler = SchedulerConfig(
        num_blocks=40,
        block_size=4,
        max_model_len=40,
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([8, 32]),
        max_steps_in_flight=rng.choice([1, 2]),
        scheduling_policy="fair",
    )
    arrivals: list[Arrival] = []
    for tenant, gap_s in GAPS_S.items():
        at_s = rng.uniform(0, 0.02)
        while (at_s := at_s + rng.expovariate(1 / gap_s)) < 0.1:
            length = rng.randint(1, 20)
            arrivals.append(
                Arrival(
                    name=len(arrivals),
                    at_s=at_s,
                    prompt=tuple(rng.randrange(1000) for _ in range(length)),
                    max_tokens=rng.randint(1, 40 - length),
                    tenant=tenant,
                )
            )
    scenario = Scenario(
        scheduler=scheduler,
        arrivals=tuple(arrivals),
        num_replicas=rng.choice([3, 4]),
        exchange_interval_s=rng.choice([0.0, 0.005, 0.02]),
    )
    return with_drafts(scenario, seed) if seed % 2 else scenario


def num_checked(seed: int) -> int:
    simulation = Simulation(make_flood(seed))
    simulation.run()
    assert simulation.turns is not None
    return simulation.turns.num_checked


def test_no_replica_admits_a_tenant_before_one_for_which_all_together_computed_less() -> None:
    assert sum(map(num_checked, range(4))) > 300


@pytest.mark.long
def test_it_holds_in_a_hundred_floods() -> None:
    assert sum(map(num_checked, range(10, 110))) > 5_000


def test_one_replica_has_nothing_to_share() -> None:
    assert Simulation(replace(make_flood(0), num_replicas=1)).turns is None


# -- planted bugs ------------------------------------------------------------------------------------------------------

Patch = Callable[[object, str, Any], None]


def nothing_exchanged(patch: Patch) -> None:
    patch(ServiceExchange, "commands", lambda self, managers: [None] * len(managers))


def counted_twice(patch: Patch) -> None:
    original = Fair.charge_elsewhere

    def charge_elsewhere(self: Fair, num_tokens: Mapping[str, int], max_lead: int) -> None:
        original(self, {tenant: 2 * number for tenant, number in num_tokens.items()}, max_lead)

    patch(Fair, "charge_elsewhere", charge_elsewhere)


def own_work_charged_again(patch: Patch) -> None:
    """What others computed is reported as one's own, and comes back."""
    patch(Fair, "num_computed_tokens", lambda self: self.num_served_tokens.copy())


def one_tenant_forgotten(patch: Patch) -> None:
    original = Fair.charge_elsewhere

    def charge_elsewhere(self: Fair, num_tokens: Mapping[str, int], max_lead: int) -> None:
        original(self, {tenant: number for tenant, number in num_tokens.items() if tenant != "flood"}, max_lead)

    patch(Fair, "charge_elsewhere", charge_elsewhere)


def leads_not_counted(patch: Patch) -> None:
    original = Fair.charge_elsewhere
    patch(Fair, "charge_elsewhere", lambda self, num_tokens, max_lead: original(self, num_tokens, 0))


BUGS = [nothing_exchanged, counted_twice, own_work_charged_again, one_tenant_forgotten, leads_not_counted]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_found(bug: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch.setattr)
    with pytest.raises(Violation, match="admits a sequence of"):
        sum(map(num_checked, range(20)))
