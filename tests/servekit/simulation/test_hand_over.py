"""Claims about prefill and decode replicas: a sequence that is handed over continues token for token, whatever happens.

Every simulated token is compared with a reference that serves one prompt at a time, and each manager is checked after
each step; see servekit/simulation/. Blocks that two sequences send under one key must have the same contents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.protocol.messages import StepPlan, TransferReport
from servekit.scheduler.kv_connector import KVConnector
from servekit.scheduler.output_length import OutputLengthPredictor
from servekit.scheduler.recording import CheckpointRecord, RecordedManager, RecordEncoder
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import Sequence
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation import service
from servekit.simulation.kv_transfer import SimulatedReceiver, SimulatedRing, SimulatedSender
from servekit.simulation.page import Page
from servekit.simulation.scenario import Arrival, Fault, Scenario
from servekit.simulation.service import Simulation
from servekit.simulation.worker import SimulatedConnector, Violation
from tests.servekit.simulation.recorded import KEY, ListSink, replay
from tests.servekit.simulation.scenarios import make_hand_over_scenario, recordable
from tests.servekit.simulation.test_planted_bugs import Patch, failed_load_ignored

STEPS_PER_SHARD = 40_000
BLOCK_SIZE = 4


def run_seed(seed: int) -> Simulation:
    """Run a scenario, which fails if a sequence loses or repeats a token."""
    simulation = Simulation(make_hand_over_scenario(seed))
    try:
        simulation.run()
    except Exception as error:
        error.add_note(f"make_hand_over_scenario({seed})")
        raise
    return simulation


def small_scenario(num_arrivals: int = 8, num_prefill: int = 1, num_decode: int = 1, **changes: Any) -> Scenario:
    scheduler = SchedulerConfig(
        num_blocks=64,
        block_size=BLOCK_SIZE,
        max_model_len=99,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_steps_in_flight=2,
    )
    arrivals = tuple(
        Arrival(name=name, at_s=0.01 * name, prompt=tuple(range(name, name + 22)), max_tokens=12, ignore_eos=True)
        for name in range(num_arrivals)
    )
    fields: dict[str, Any] = {
        "scheduler": scheduler,
        "arrivals": arrivals,
        "num_replicas": num_prefill + num_decode,
        "num_prefill_replicas": num_prefill,
        "num_transfer_blocks": 64,
    }
    return Scenario(**{**fields, **changes})


def play(scenario: Scenario) -> Simulation:
    simulation = Simulation(scenario)
    simulation.run()
    assert all(len(client.received) == client.arrival.max_tokens for client in simulation.clients.values())
    return simulation


def prefill_tokens(simulation: Simulation) -> list[int]:
    """Count the tokens of each replica's chunks that have more than one token, from now on."""
    counts = [0] * len(simulation.replicas)
    for index, replica in enumerate(simulation.replicas):

        def execute(plan: StepPlan, *more: Any, index: int = index, original: Any = replica.worker.execute) -> Any:
            counts[index] += sum(chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1)
            return original(plan, *more)

        replica.worker.execute = execute  # type: ignore[method-assign]
    return counts


def test_prompts_are_computed_on_prefill_replicas_and_answers_on_decode_replicas() -> None:
    simulation = Simulation(small_scenario())
    counts = prefill_tokens(simulation)
    simulation.run()
    assert simulation.num_handed_over == 8
    prefill, decode = simulation.replicas
    assert decode.manager.kv_connector.num_loaded_blocks == 8 * (22 // BLOCK_SIZE)
    assert decode.manager.kv_connector.num_failed_loads == 0
    assert prefill.manager.kv_connector.num_sent_blocks >= 8 * (22 // BLOCK_SIZE)
    assert counts[0] >= 8 * 22, "all prompts"
    # The last block of a prompt is not full: the decode replica computes it, with the first token.
    assert counts[1] <= 8 * (22 % BLOCK_SIZE + 1)


def test_forks_follow_their_leader_and_share_its_blocks() -> None:
    arrivals = tuple(
        Arrival(name=name, at_s=0.0, prompt=tuple(range(22)), max_tokens=12, forks=0 if name else None, logprobs=1)
        for name in range(4)
    )
    simulation = play(small_scenario(arrivals=arrivals, num_decode=2))
    assert simulation.num_handed_over == 4
    loaded = sorted(replica.manager.kv_connector.num_loaded_blocks for replica in simulation.replicas)
    assert loaded == [0, 0, 5], "one of the two decode replicas has all of them, and loads the prompt once"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_that_is_killed_midway_loses_nothing_and_the_other_kind_does_everything(lost: int) -> None:
    faults = tuple(Fault(at_s=0.013 * number, kind="kill", target=6 * lost + 1) for number in range(1, 5))
    simulation = play(small_scenario(faults=faults, recovery_s=0.03))
    assert simulation.num_losses >= 2 and simulation.num_moved > 0


def test_blocks_that_were_overwritten_before_they_are_loaded_are_computed() -> None:
    simulation = play(small_scenario(num_transfer_blocks=1))
    assert simulation.num_handed_over == 0, "nothing could be loaded, so the prefill replica goes on with it"
    damages = tuple(Fault(at_s=0.001 * number, kind="damage", target=number % 6) for number in range(100))
    simulation = play(small_scenario(faults=damages))
    assert simulation.replicas[1].manager.kv_connector.num_failed_loads > 0


def test_without_room_on_decode_replicas_the_prefill_replica_goes_on() -> None:
    scenario = small_scenario(num_arrivals=30)
    scheduler = replace(scenario.scheduler, max_num_seqs=4)
    arrivals = tuple(replace(each, at_s=0.0, max_tokens=40) for each in scenario.arrivals)
    simulation = play(replace(scenario, scheduler=scheduler, arrivals=arrivals))
    assert 0 < simulation.num_handed_over <= 30


def test_a_preempted_sequence_finds_its_blocks_again() -> None:
    scenario = small_scenario(num_arrivals=12)
    scheduler = replace(scenario.scheduler, num_blocks=16)
    arrivals = tuple(replace(each, at_s=0.0, max_tokens=30, has_length_bound=False) for each in scenario.arrivals)
    simulation = play(replace(scenario, scheduler=scheduler, arrivals=arrivals, is_reckless=True))
    assert sum(replica.manager.num_preemptions for replica in simulation.replicas) > 0


@pytest.mark.exhaustive
def test_the_seeds_cover_every_kind_of_hand_over() -> None:
    """And no sequence loses or repeats a token. A simulation in which nothing happens proves nothing."""
    seen = dict.fromkeys(["handed over", "loaded", "failed loads", "losses", "moved"], 0)
    num_steps = seed = 0
    while seed < 60 or num_steps < STEPS_PER_SHARD:
        simulation = run_seed(seed)
        num_steps += simulation.num_steps
        seed += 1
        connectors = [replica.manager.kv_connector for replica in simulation.replicas]
        seen["handed over"] += simulation.num_handed_over
        seen["loaded"] += sum(each.num_loaded_blocks for each in connectors)
        seen["failed loads"] += sum(each.num_failed_loads for each in connectors)
        seen["losses"] += simulation.num_losses
        seen["moved"] += simulation.num_moved
    assert min(seen.values()) > 30 and seen["handed over"] > 500, seen


@pytest.mark.long
@pytest.mark.parametrize("shard", range(1, 5))
def test_sequences_that_are_handed_over_lose_no_token_and_repeat_none(shard: int) -> None:
    num_steps, seed = 0, shard * 1_000_000
    while num_steps < STEPS_PER_SHARD:
        num_steps += run_seed(seed).num_steps
        seed += 1


def test_each_manager_is_replayed_with_identical_plans() -> None:
    num_plans = 0
    for seed in range(8):
        scenario = recordable(make_hand_over_scenario(seed))
        sinks: list[ListSink] = []

        def make_manager(config: SchedulerConfig, predictor: OutputLengthPredictor) -> WorkloadManager:
            sinks.append(ListSink(checkpoint_rate=0.01, seed=len(sinks)))  # noqa: B023
            return RecordedManager(config, sinks[-1], RecordEncoder(KEY), predictor)  # noqa: B023

        Simulation(scenario, check=False, make_manager=make_manager).run()
        for sink, config in zip(sinks, service.replica_configs(scenario), strict=True):
            assert not sink.failures
            of_replica, records = replace(scenario, scheduler=config), sink.records()
            num_plans += replay(of_replica, records).num_plans
            for index, record in enumerate(records):
                if isinstance(record, CheckpointRecord):
                    replay(of_replica, records[index : index + 200])
    assert num_plans > 1_000


# -- what the simulation refuses ---------------------------------------------------------------------------------------

KEY_A, PAGES = bytes(16), [Page.of([1, 2]), Page.of([3, 4])]
SENDS, LOADS = StepPlan(0, 0, (), (), sends=((0, KEY_A),)), StepPlan(0, 0, (), (), loads=((KEY_A, 0),))


def test_blocks_that_are_sent_with_other_contents_are_a_violation() -> None:
    sender = SimulatedSender(SimulatedRing(4))
    sender.send(SENDS, PAGES, TransferReport())
    sender.send(SENDS, PAGES, TransferReport())
    with pytest.raises(Violation, match="with other contents"):
        sender.send(SENDS, PAGES[::-1], TransferReport())


def test_plans_for_another_kind_of_worker_are_a_violation() -> None:
    receiver = SimulatedReceiver([SimulatedRing(4)])
    with pytest.raises(Violation, match="for a worker that loads"):
        SimulatedSender(SimulatedRing(4)).execute(LOADS, PAGES)
    with pytest.raises(Violation, match="for a worker that sends"):
        receiver.execute(SENDS, PAGES)
    with pytest.raises(Violation, match="for a prefill worker"):
        SimulatedConnector(4).send(SENDS, PAGES, TransferReport())
    receiver.damage(0)
    assert receiver.execute(LOADS, [Page.of([5, 6])]).failed_loads == (0,)


# -- planted bugs ------------------------------------------------------------------------------------------------------


def sent_before_it_is_computed(patch: Patch) -> None:
    """A worker sends blocks at the beginning of the step that computes them."""

    def execute(self: SimulatedSender, plan: StepPlan, pages: list[list[int]]) -> Any:
        report = original(self, plan, pages)
        return sends(self, plan, pages, report)

    original, sends = SimulatedSender.execute, SimulatedSender.send
    patch(SimulatedSender, "execute", execute)
    patch(SimulatedSender, "send", lambda self, plan, pages, report: report)


def sent_although_it_was_reused(patch: Patch) -> None:
    """A block that was published, and reused before it was sent, is sent with its new contents."""
    patch(KVConnector, "cancel_send", lambda self, block: self._on_the_way.discard(self._pending.get(block, b"")))


def token_lost_at_the_hand_over(patch: Patch) -> None:
    """The first token is not handed over."""

    def progress(self: Sequence) -> Any:
        answer = original(self)
        return replace(answer, output_token_ids=answer.output_token_ids[1:])

    original = Sequence.progress
    patch(Sequence, "progress", progress)


BUGS = [sent_before_it_is_computed, sent_although_it_was_reused, token_lost_at_the_hand_over, failed_load_ignored]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_found(bug: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch.setattr)
    for seed in range(100):
        try:
            Simulation(make_hand_over_scenario(seed)).run()
        except (Violation, AssertionError):
            return
    pytest.fail("not found in 100 scenarios")
