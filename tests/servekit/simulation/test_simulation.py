"""Claims about the whole service, over a hundred thousand simulated steps; see servekit/simulation/service.py."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path

import msgspec
import pytest

from benchmarks import scheduling
from servekit.scheduler.policy import Fair
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.simulation.scenario import Arrival, Fault, Scenario
from servekit.simulation.service import Simulation
from tests.servekit.simulation.scenarios import failure, make_scenario, shrink
from tests.servekit.simulation.simulate import CORPUS

STEPS_PER_SHARD = 100_000


def run_seed(simulation: Simulation, seed: int) -> None:
    """Run the simulation of `make_scenario(seed)`; every promise of the scheduler is checked after each step."""
    try:
        simulation.run()
    except Exception as error:
        error.add_note(f"seed {seed}: `python -m tests.servekit.simulation.simulate --first-seed {seed}` shrinks it")
        raise


@pytest.mark.long
@pytest.mark.parametrize("shard", range(1, 10))
def test_invariants_hold_under_every_fault_and_order_of_events(shard: int) -> None:
    """A million steps in all. `make test` takes the first tenth of them, in
    `test_the_seeds_cover_every_kind_of_event`, and `make simulate` goes on with seeds never tried before.
    """
    num_steps, seed = 0, shard * 1_000_000
    while num_steps < STEPS_PER_SHARD:
        simulation = Simulation(make_scenario(seed))
        run_seed(simulation, seed)
        num_steps += simulation.num_steps
        seed += 1


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_scenarios_that_failed_once_pass(path: Path) -> None:
    Simulation(msgspec.json.decode(path.read_bytes(), type=Scenario)).run()


def test_a_scenario_is_deterministic() -> None:
    def play(seed: int) -> list[tuple[int, list[int], list[float]]]:
        simulation = Simulation(make_scenario(seed))
        simulation.run()
        return [(name, client.received, client.token_times_s) for name, client in simulation.clients.items()]

    for seed in range(20):
        assert play(seed) == play(seed)


@pytest.mark.exhaustive
def test_the_seeds_cover_every_kind_of_event() -> None:
    """And the invariants hold in all of them. A simulation in which nothing happens proves nothing."""
    kinds = ["preemptions", "stale results", "cached tokens", "copies", "deadlines", "aborts", "losses"]
    seen = dict.fromkeys([*kinds, "suspects", "smaller steps", "deferrals", "loads", "failed loads"], 0)
    num_failed = num_share_preemptions = num_steps = seed = 0
    spans = dict.fromkeys(["accepted drafts", "rejected drafts", "fewer drafts than planned"], 0)
    policies = set()
    while seed < 200 or num_steps < STEPS_PER_SHARD:
        scenario = make_scenario(seed)
        simulation = Simulation(scenario)
        worker = simulation.replicas[0].worker
        execute = worker.execute

        def count(plan, deferring, drafts, execute=execute):  # type: ignore[no-untyped-def]
            seen["copies"] += len(plan.copies)
            planned = {chunk.slot: chunk.num_drafts for chunk in plan.chunks}
            spans["fewer drafts than planned"] += sum(
                num_made < planned[slot] for slot, (num_made, _) in drafts.items()
            )
            return execute(plan, deferring, drafts)

        worker.execute = count  # type: ignore[method-assign]
        run_seed(simulation, seed)
        num_steps += simulation.num_steps
        seed += 1
        policies.add(scenario.scheduler.scheduling_policy)
        seen["preemptions"] += simulation.manager.num_preemptions
        num_share_preemptions += simulation.manager.num_share_preemptions
        seen["deferrals"] += simulation.manager.num_deferrals
        seen["loads"] += simulation.manager.kv_connector.num_loaded_blocks
        seen["failed loads"] += simulation.manager.kv_connector.num_failed_loads
        seen["stale results"] += simulation.manager.num_stale_results
        seen["cached tokens"] += simulation.manager.num_cached_tokens
        lengths = simulation.manager.draft_lengths
        spans["accepted drafts"] += sum(lengths.num_accepted)
        spans["rejected drafts"] += sum(lengths.num_drafted) - sum(lengths.num_accepted)
        seen["losses"] += simulation.manager.epoch
        num_failed += simulation.num_failed
        seen["suspects"] += simulation.num_suspects
        seen["smaller steps"] += sum(fault.kind == "memory" for fault in scenario.faults)
        reasons = [client.sequence.finish_reason for client in simulation.clients.values()]
        seen["deadlines"] += reasons.count("deadline")  # type: ignore[arg-type]
        seen["aborts"] += reasons.count("abort")  # type: ignore[arg-type]
    assert policies == {"fcfs", "priority", "shortest", "fair"}
    assert min(seen.values()) > 150, seen
    assert min(spans.values()) > 100, spans
    assert num_failed > 50
    assert num_share_preemptions > 30, "one policy of four has them"


def test_a_failing_scenario_is_shrunk_to_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bug that only forked sequences of one priority show, little more than such a fork remains."""
    run = Simulation.run

    def run_with_bug(simulation: Simulation) -> None:
        run(simulation)
        for client in simulation.clients.values():
            assert client.arrival.forks is None or client.arrival.priority != 1, "the bug"

    monkeypatch.setattr(Simulation, "run", run_with_bug)
    seed = next(seed for seed in range(100) if failure(make_scenario(seed)) is not None)
    smallest = shrink(make_scenario(seed), lambda scenario: failure(scenario) is not None)
    assert len(smallest.arrivals) == 2 and not smallest.faults
    leader, fork = smallest.arrivals
    assert fork.priority == 1 and fork.forks == leader.name and fork.prompt == leader.prompt
    assert len(fork.prompt) == fork.max_tokens == leader.max_tokens == 1


def test_a_deadline_passes_while_nothing_else_happens() -> None:
    """A step takes 1.1 ms, and the deadline passes while no sequence arrives or ends."""
    arrival = Arrival(name=0, at_s=1.0, prompt=(5,), max_tokens=9, deadline_s=2e-3)
    scheduler = SchedulerConfig(
        num_blocks=8, block_size=2, max_model_len=99, max_num_seqs=2, max_num_batched_tokens=8, max_steps_in_flight=1
    )
    simulation = Simulation(Scenario(scheduler=scheduler, arrivals=(arrival,)))
    simulation.run()
    assert len(simulation.clients[0].received) == 2
    assert simulation.clients[0].sequence.finish_reason == "deadline"


def test_damage_to_offloaded_blocks_means_nothing_where_there_are_none() -> None:
    """As in a scenario from which the connector was left out, to make it smaller."""
    scheduler = SchedulerConfig(num_blocks=8, block_size=2, max_model_len=99, max_num_seqs=2, max_num_batched_tokens=8)
    arrival, fault = Arrival(name=0, at_s=0.0, prompt=(5,), max_tokens=9), Fault(at_s=2e-3, kind="damage")
    simulation = Simulation(Scenario(scheduler=scheduler, arrivals=(arrival,), faults=(fault,)))
    simulation.run()
    assert len(simulation.clients[0].received) == 9


# -- what the policies do for people; `make bench-scheduling` prints the tables ----------------------------------------


@functools.cache
def latencies(kind: str) -> tuple[float, float]:
    """(p99 of the time to the first token, median of three seeds; p99 between tokens, the longest) of short prompts."""
    scheduler = scheduling.serving("shortest", itl_target_s=0.015)
    played = [scheduling.chat_latencies(scheduling.play(scheduler, scheduling.chat_beside(kind, s))) for s in range(3)]
    return statistics.median(p99 for _, p99, _ in played), max(gap for _, _, gap in played)


@pytest.mark.exhaustive
@pytest.mark.parametrize("documents", ["steady", "bursts"])
def test_long_prompts_delay_short_ones_by_at_most_half(documents: str) -> None:
    """p99 of the time to their first token, median of three seeds; and the inter-token target is kept."""
    (alone, _), (beside, gap) = latencies("none"), latencies(documents)
    assert beside <= 1.5 * alone, f"TTFT p99 {alone:.1f} ms alone, {beside:.1f} ms beside long prompts"
    assert gap <= 15.0, "the inter-token target, at the 99th percentile"


def worst_lag(seed: int, policy: str) -> int:
    simulation = Simulation(scheduling.flood(seed, policy), check=False, watch_lag=True)
    simulation.run()
    return simulation.lag.worst


LAG_BOUND = Fair.max_lag(scheduling.MAX_NUM_SEQS, scheduling.MAX_MODEL_LEN)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 100), marks=pytest.mark.long)], ids=str)
def test_a_flood_of_one_tenant_does_not_take_the_others_share(seeds: range) -> None:
    assert max(worst_lag(seed, "fair") for seed in seeds) <= LAG_BOUND


def test_first_come_first_served_lets_a_flood_take_the_others_share() -> None:
    assert worst_lag(0, "fcfs") > 5 * LAG_BOUND, "the bound is none if anything keeps it"
