"""Claims about the dynamic batcher over thousands of simulated batches; see servekit/simulation/predictor.py."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from servekit.dynamic_batching.dynamic_batcher import Batch, BatchLimits, DynamicBatcher
from servekit.dynamic_batching.fair_queue import FairQueue
from servekit.dynamic_batching.item import Item, ItemStatus
from servekit.simulation.predictor import ItemArrival, PredictorFault, PredictorScenario, PredictorSimulation
from servekit.simulation.worker import Violation
from tests.servekit.simulation.predictor_scenarios import make_predictor_scenario

NUM_SEEDS = 400
LIMITS = BatchLimits(max_batch_size=32, max_batch_tokens=1024)

Patch = Callable[[type, str, Any], None]


def play(scenario: PredictorScenario) -> PredictorSimulation:
    simulation = PredictorSimulation(scenario)
    simulation.run()
    return simulation


def test_promises_hold_under_every_fault_and_every_kind_of_end_is_seen() -> None:
    ends: Counter[str] = Counter()
    num_batches = num_losses = num_stale = 0
    for seed in range(NUM_SEEDS):
        simulation = play(make_predictor_scenario(seed))
        ends.update(outcome.end for outcome in simulation.outcomes)
        num_batches += simulation.num_batches
        num_losses += simulation.num_losses
        num_stale += simulation.batcher.num_stale_results
    assert set(ends) == {"answered", "left", "expired", "failed"}
    assert min(ends.values()) > 20
    assert num_batches > 5_000 and num_losses > 300 and num_stale > 100


@pytest.mark.long
def test_promises_hold_in_five_thousand_scenarios() -> None:
    for seed in range(NUM_SEEDS, 5_000):
        try:
            play(make_predictor_scenario(seed))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_a_scenario_ends_when_its_last_item_expires_after_the_last_event() -> None:
    play(make_predictor_scenario(1372))


def test_a_scenario_is_deterministic() -> None:
    for seed in range(20):
        first, second = (play(make_predictor_scenario(seed)) for _ in range(2))
        assert [(each.end, each.ended_s) for each in first.outcomes] == [
            (each.end, each.ended_s) for each in second.outcomes
        ]


def test_only_the_item_that_workers_are_lost_over_fails() -> None:
    arrivals = [ItemArrival(at_s=0.0, length=8, is_deadly=index == 5) for index in range(40)]
    simulation = play(PredictorScenario(limits=LIMITS, arrivals=tuple(arrivals)))
    assert [index for index, outcome in enumerate(simulation.outcomes) if outcome.end == "failed"] == [5]
    assert simulation.num_losses == 3


def test_three_workers_lost_from_outside_cost_one_item_at_most() -> None:
    faults = tuple(PredictorFault(at_s=0.0005 + 0.011 * index, kind="kill") for index in range(3))
    arrivals = tuple(ItemArrival(at_s=0.0, length=8) for _ in range(3))
    simulation = play(PredictorScenario(limits=LIMITS, arrivals=arrivals, faults=faults))
    assert [outcome.end for outcome in simulation.outcomes].count("answered") >= 2


def test_a_longer_delay_makes_larger_batches_and_no_item_waits_longer_than_it() -> None:
    def mean_batch(delay_s: float) -> float:
        limits = BatchLimits(max_batch_size=32, max_batch_tokens=4096, max_delay_s=delay_s)
        arrivals = tuple(ItemArrival(at_s=0.002 * index, length=16) for index in range(200))
        simulation = play(PredictorScenario(limits=limits, arrivals=arrivals, batch_s=1e-4, token_s=1e-6))
        longest_s = max(outcome.ended_s - outcome.arrival.at_s for outcome in simulation.outcomes)
        assert longest_s < delay_s + 2 * (1e-4 + 4096e-6)
        return sum(outcome.batch_size for outcome in simulation.outcomes) / 200

    assert mean_batch(0.0) == 1.0
    assert mean_batch(0.02) > 8.0


def test_two_tenants_with_work_get_equal_service_although_one_sends_ten_times_as_much() -> None:
    arrivals = [ItemArrival(at_s=0.0, length=16, tenant="many") for _ in range(1000)]
    arrivals += [ItemArrival(at_s=0.0, length=16, tenant="few") for _ in range(100)]
    simulation = play(PredictorScenario(limits=LIMITS, arrivals=tuple(arrivals)))
    last_of_few_s = max(each.ended_s for each in simulation.outcomes if each.arrival.tenant == "few")
    done = [each for each in simulation.outcomes if each.arrival.tenant == "many" and each.ended_s <= last_of_few_s]
    assert 90 <= len(done) <= 150


def test_the_same_work_in_batches_takes_a_fraction_of_the_time() -> None:
    def total_s(max_batch_size: int) -> float:
        limits = BatchLimits(max_batch_size=max_batch_size, max_batch_tokens=8192)
        arrivals = tuple(ItemArrival(at_s=0.0, length=16) for _ in range(256))
        simulation = play(PredictorScenario(limits=limits, arrivals=arrivals, batch_s=1e-3, token_s=1e-6))
        return max(outcome.ended_s for outcome in simulation.outcomes)

    assert total_s(1) > 10 * total_s(32)


# -- planted bugs: the simulation finds each of them -------------------------------------------------------------------


def ended_item_is_answered(patch: Patch) -> None:
    def commit(self: DynamicBatcher, epoch: int, batch_id: int) -> list[tuple[int, Item]]:
        batch = self._in_flight.get(batch_id)
        original(self, epoch, batch_id)
        return [] if batch is None else list(enumerate(batch.items))

    original = DynamicBatcher.commit
    patch(DynamicBatcher, "commit", commit)


def result_of_a_lost_worker_is_applied(patch: Patch) -> None:
    def commit(self: DynamicBatcher, epoch: int, batch_id: int) -> list[tuple[int, Item]]:
        batch_id = batch_id if epoch == self.epoch else next(iter(self._in_flight), batch_id)
        return original(self, self.epoch, batch_id)

    original = DynamicBatcher.commit
    patch(DynamicBatcher, "commit", commit)


def items_of_a_lost_worker_are_forgotten(patch: Patch) -> None:
    def restart(self: DynamicBatcher) -> list[Item]:
        self.epoch += 1
        self._in_flight.clear()
        return []

    patch(DynamicBatcher, "restart", restart)


def delay_is_twice_as_long(patch: Patch) -> None:
    def next_plan_s(self: DynamicBatcher) -> float:
        return original(self) + self.limits.max_delay_s

    original = DynamicBatcher.next_plan_s
    patch(DynamicBatcher, "next_plan_s", next_plan_s)


def tenants_do_not_take_turns(patch: Patch) -> None:
    patch(FairQueue, "charge", lambda self, item: None)


def suspects_are_not_alone(patch: Patch) -> None:
    patch(DynamicBatcher, "_runs_suspect", lambda self: False)


def deadlines_are_missed(patch: Patch) -> None:
    patch(DynamicBatcher, "expire", lambda self, now_s: [])


def aborted_item_is_computed(patch: Patch) -> None:
    def finish(self: DynamicBatcher, item: Item) -> None:
        if item.status is not ItemStatus.IN_FLIGHT:
            original(self, item)
        else:
            self._end(item)
            item.status = ItemStatus.IN_FLIGHT

    original = DynamicBatcher.finish
    patch(DynamicBatcher, "finish", finish)


BUGS = [
    ended_item_is_answered,
    result_of_a_lost_worker_is_applied,
    items_of_a_lost_worker_are_forgotten,
    delay_is_twice_as_long,
    tenants_do_not_take_turns,
    suspects_are_not_alone,
    deadlines_are_missed,
    aborted_item_is_computed,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(plant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch.setattr)
    with pytest.raises((Violation, AssertionError)):
        deque(map(play, map(make_predictor_scenario, range(NUM_SEEDS))), maxlen=0)


def test_what_breaks_the_rules_of_a_batch_is_a_violation() -> None:
    """The checks that no planted bug above reaches."""
    limits = BatchLimits(max_batch_size=2, max_batch_tokens=16, max_in_flight=1)
    arrivals = tuple(ItemArrival(at_s=0.0, length=8) for _ in range(3))

    class Greedy(DynamicBatcher):
        def _fill(self) -> list[Item]:
            items = []
            while (item := self._queue.first()) is not None:
                self._queue.pop(item)
                items.append(item)
            return items

    class Eager(DynamicBatcher):
        def _may_plan(self, now_s: float) -> bool:
            return self.num_waiting > 0

    class Leaky(DynamicBatcher):
        def commit(self, epoch: int, batch_id: int) -> list[tuple[int, Item]]:
            alive = super().commit(epoch, batch_id)
            self.num_waiting_tokens += 1
            return alive

    class Swapping(DynamicBatcher):
        def commit(self, epoch: int, batch_id: int) -> list[tuple[int, Item]]:
            return [(index - 1, item) for index, item in super().commit(epoch, batch_id)]

    class Impatient(DynamicBatcher):
        def restart(self) -> list[Item]:
            failed = [item for batch in self._in_flight.values() for item in batch.items]
            super().restart()
            for item in failed:
                self.finish(item)
            return failed

    class Resurrecting(DynamicBatcher):
        def plan(self, now_s: float) -> Batch | None:
            batch = super().plan(now_s)
            if batch is not None:
                for item in batch.items:
                    item.status = ItemStatus.WAITING
            return batch

    class Idle(DynamicBatcher):
        def plan(self, now_s: float) -> Batch | None:
            return None

    class Endless(DynamicBatcher):
        def commit(self, epoch: int, batch_id: int) -> list[tuple[int, Item]]:
            self.restart()
            return []

        def restart(self) -> list[Item]:
            for batch in self._in_flight.values():
                for item in batch.items:
                    item.num_crashes = 0
            return super().restart()

    kill = (PredictorFault(at_s=0.0005, kind="kill"),)
    scenario = PredictorScenario(limits=limits, arrivals=arrivals, faults=kill)
    for kind in (Greedy, Eager, Leaky, Swapping, Impatient, Resurrecting, Idle, Endless):
        with pytest.raises(Violation):
            PredictorSimulation(scenario, kind(limits)).run()


def test_an_empty_scenario_ends_at_once() -> None:
    simulation = play(PredictorScenario(limits=LIMITS, arrivals=()))
    assert simulation.outcomes == [] and simulation.now_s < inf
