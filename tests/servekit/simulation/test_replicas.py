"""Claims about several replicas: sequences that move continue token for token, whatever happens to their replicas.

Every simulated token is compared with a reference that serves one prompt at a time, and each manager is checked after
each step; see servekit/simulation/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.scheduler.block_pool import BlockPool
from servekit.scheduler.crash_quarantine import CrashQuarantine
from servekit.scheduler.output_length import OutputLengthPredictor
from servekit.scheduler.recording import CheckpointRecord, RecordedManager, RecordEncoder
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import Sequence
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.replica import SimulatedReplica
from servekit.simulation.scenario import Arrival, Scenario
from servekit.simulation.service import Simulation
from servekit.simulation.worker import Violation
from tests.servekit.simulation.recorded import KEY, ListSink, replay
from tests.servekit.simulation.scenarios import MOVES, make_replicated_scenario, make_scenario, recordable

STEPS_PER_SHARD = 40_000


def run_seed(simulation: Simulation, seed: int) -> None:
    """Run the simulation of `make_replicated_scenario(seed)`, which fails if a sequence loses or repeats a token."""
    try:
        simulation.run()
    except Exception as error:
        error.add_note(f"make_replicated_scenario({seed})")
        raise


@pytest.mark.long
@pytest.mark.parametrize("shard", range(1, 10))
def test_sequences_that_move_lose_no_token_and_repeat_none(shard: int) -> None:
    """`make test` takes the first tenth of these steps, in `test_the_seeds_cover_every_kind_of_move`."""
    num_steps, seed = 0, shard * 1_000_000
    while num_steps < STEPS_PER_SHARD:
        simulation = Simulation(make_replicated_scenario(seed))
        run_seed(simulation, seed)
        num_steps += simulation.num_steps
        seed += 1


@pytest.mark.exhaustive
def test_the_seeds_cover_every_kind_of_move() -> None:
    """And no sequence loses or repeats a token. A simulation in which nothing happens proves nothing."""
    seen = dict.fromkeys(["moves", "moves with tokens", "moves of forks", "moves of suspects", "failed"], 0)
    num_steps = seed = 0
    while seed < 60 or num_steps < STEPS_PER_SHARD:
        simulation = Simulation(make_replicated_scenario(seed))
        for replica in simulation.replicas:

            def count(command: Any, client: Any, resume: Callable[..., None] = replica.resume) -> None:
                seen["moves with tokens"] += bool(command.progress.output_token_ids)
                seen["moves of forks"] += command.leader_id is not None
                seen["moves of suspects"] += command.crashes is not None and command.crashes.makes_suspect
                resume(command, client)

            replica.resume = count  # type: ignore[method-assign]
        run_seed(simulation, seed)
        num_steps += simulation.num_steps
        seed += 1
        seen["moves"] += simulation.num_moved
        seen["failed"] += simulation.num_failed
    assert min(seen.values()) > 5 and seen["moves"] > 2000, seen


def test_a_sequence_that_crashes_workers_ends_no_more_than_two_of_them_at_once() -> None:
    """After its first crash it continues on another replica. After the second one it waits for a worker of its own."""
    scheduler = SchedulerConfig(
        num_blocks=16, block_size=4, max_model_len=99, max_num_seqs=8, max_num_batched_tokens=16, max_steps_in_flight=2
    )
    arrivals = [
        Arrival(name=name, at_s=0.002 * name, prompt=(name, 1), max_tokens=20, crashes_at=5 if name == 7 else None)
        for name in range(40)
    ]
    scenario = Scenario(scheduler=scheduler, arrivals=tuple(arrivals), num_replicas=6, recovery_s=0.2)
    num_lost_at_once = []
    simulation = Simulation(scenario)
    restart = simulation._restart

    def count_lost(*arguments: Any, **more: Any) -> None:
        restart(*arguments, **more)
        num_lost_at_once.append(sum(not simulation._is_ready(replica) for replica in simulation.replicas))

    simulation._restart = count_lost  # type: ignore[method-assign]
    simulation.run()
    assert num_lost_at_once == [1, 2, 1], "three crashes, the last one alone"
    reasons = [client.sequence.finish_reason for client in simulation.clients.values()]
    assert reasons.count("error") == 1 and simulation.clients[7].sequence.finish_reason == "error"


def test_each_manager_is_replayed_with_identical_plans() -> None:
    num_plans = 0
    for seed in range(12):
        scenario = recordable(make_replicated_scenario(seed))
        sinks: list[ListSink] = []

        def make_manager(config: SchedulerConfig, predictor: OutputLengthPredictor) -> WorkloadManager:
            sinks.append(ListSink(checkpoint_rate=0.01, seed=len(sinks)))  # noqa: B023
            return RecordedManager(config, sinks[-1], RecordEncoder(KEY), predictor)  # noqa: B023

        Simulation(scenario, check=False, make_manager=make_manager).run()
        assert len(sinks) == scenario.num_replicas
        for sink in sinks:
            assert not sink.failures
            records = sink.records()
            num_plans += replay(scenario, records).num_plans
            for index, record in enumerate(records):
                if isinstance(record, CheckpointRecord):
                    replay(scenario, records[index : index + 200])
    assert num_plans > 3_000


def test_where_there_is_one_replica_nothing_moves() -> None:
    simulation = Simulation(make_scenario(0))
    (replica,) = simulation.replicas
    simulation._move(replica, None)
    simulation.run()
    assert simulation.num_moved == 0 and simulation.clients


def test_sequences_that_arrive_out_of_order_are_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    withdraw = SimulatedReplica.withdraw
    monkeypatch.setattr(SimulatedReplica, "withdraw", lambda self, ids: list(withdraw(self, ids))[::-1])

    def run() -> None:
        for seed in range(100):
            Simulation(make_replicated_scenario(seed)).run()

    with pytest.raises(Violation, match="is out of order of arrival"):
        run()


# -- planted bugs ------------------------------------------------------------------------------------------------------

Patch = Callable[[object, str, Any], None]


def tokens_left_behind(patch: Patch) -> None:
    """A sequence that moves forgets its newest token."""

    def progress(self: Sequence) -> Any:
        answer = original(self)
        return replace(answer, output_token_ids=answer.output_token_ids[:-1])

    original = Sequence.progress
    patch(Sequence, "progress", progress)


def prompt_logprobs_left_behind(patch: Patch) -> None:
    original = Sequence.progress
    patch(Sequence, "progress", lambda self: replace(original(self), prompt_logprobs=()))


def blocks_left_behind(patch: Patch) -> None:
    """A withdrawn sequence keeps a block."""

    def withdraw(self: WorkloadManager, sequence_ids: Any) -> Any:
        if self.kv_cache.pool.num_available:
            self.kv_cache.pool.lease(1)
        return original(self, sequence_ids)

    original = WorkloadManager.withdraw
    patch(WorkloadManager, "withdraw", withdraw)


def fence_forgotten(patch: Patch) -> None:
    """Blocks of a sequence that moved are given away while a step still writes to them."""
    original = BlockPool.release
    patch(BlockPool, "release", lambda self, blocks, fence_step_id: original(self, blocks, None))


def crashes_left_behind(patch: Patch) -> None:
    """A sequence that moves begins with a clean record, and crashes one worker after the other."""
    patch(CrashQuarantine, "record_of", lambda self, sequence: None)


def bystanders_go_on(patch: Patch) -> None:
    """A suspect that moves does not run alone."""
    patch(WorkloadManager, "_displace_bystanders", lambda self: None)


def results_in_flight_applied(patch: Patch) -> None:
    """What the old worker samples after the withdrawal is taken for a token."""
    original = Sequence.reset_computation

    def reset_computation(self: Sequence) -> None:
        original(self)
        self.incarnation = 0

    patch(Sequence, "reset_computation", reset_computation)


BUGS = [
    tokens_left_behind,
    prompt_logprobs_left_behind,
    blocks_left_behind,
    fence_forgotten,
    crashes_left_behind,
    bystanders_go_on,
    results_in_flight_applied,
]


def make_short_lives(seed: int) -> Scenario:
    """A scenario in which prompt logprobs are requested, and each deadline passes soon after a move.

    A sequence that goes on computes them again, so what it left behind shows only if it ends before that.
    """
    scenario = make_replicated_scenario(seed)
    moves_s = sorted(fault.at_s for fault in scenario.faults if fault.kind in MOVES)
    arrivals = []
    for arrival in scenario.arrivals:
        later_s = [at_s for at_s in moves_s if at_s > arrival.at_s]
        deadline_s = later_s[arrival.name % len(later_s)] + 1e-4 - arrival.at_s if later_s else None
        arrivals.append(replace(arrival, prompt_logprobs=1, deadline_s=deadline_s))
    return replace(scenario, arrivals=tuple(arrivals))


def test_sequences_that_end_soon_after_a_move_lose_nothing() -> None:
    for seed in range(10):
        Simulation(make_short_lives(seed)).run()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_found(bug: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch.setattr)
    make = make_short_lives if bug is prompt_logprobs_left_behind else make_replicated_scenario
    for seed in range(100):
        try:
            Simulation(make(seed)).run()
        except Exception:
            return
    pytest.fail("not found in 100 scenarios")
