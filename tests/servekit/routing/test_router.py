"""Claims about which replica computes which sequence."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from servekit.protocol.messages import StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.routing.router import Route, Router
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import FinishReason, Status
from servekit.scheduler.workload_manager import WorkloadManager

BLOCK_SIZE = 16
SAMPLING = SamplingParams(max_tokens=20, ignore_eos=True)


class Fleet:
    """Managers behind a router, stepped by hand: a step takes `base_s` and `token_s` for each token of a prompt."""

    def __init__(self, num_replicas: int, **limits: Any) -> None:
        config = {"num_blocks": 4000, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 30_000}
        self.config = SchedulerConfig(block_size=BLOCK_SIZE, **{**config, **limits})
        self.router = Router(BLOCK_SIZE)
        self.managers: dict[int, WorkloadManager] = {}
        self.now_s = dict.fromkeys(range(num_replicas), 0.0)
        self.num_sent = 0
        for replica_id in range(num_replicas):
            self.join(replica_id)

    def join(self, replica_id: int) -> None:
        self.managers[replica_id] = WorkloadManager(self.config)
        self.now_s[replica_id] = 0.0
        self.router.add_replica(replica_id, self.managers[replica_id])

    def send(self, prompt: Iterable[int], num_answers: int = 1, **fields: Any) -> Route:
        ids = range(self.num_sent, self.num_sent + num_answers)
        self.num_sent += num_answers
        leaders = [None, *[ids[0]] * (num_answers - 1)]
        fields = {"sampling": SAMPLING, **fields}
        commands = [
            AddSequence(sequence_id=sequence_id, prompt_token_ids=tuple(prompt), leader_id=leader_id, **fields)
            for sequence_id, leader_id in zip(ids, leaders, strict=True)
        ]
        route = self.router.route(commands)
        assert route is not None
        for command in commands:
            self.managers[route.replica_id].apply(command)
        return route

    def step(self, replica_id: int, num_steps: int = 1, base_s: float = 0.01, token_s: float = 50e-6) -> None:
        manager = self.managers[replica_id]
        for _ in range(num_steps):
            plan = manager.plan(self.now_s[replica_id])
            if plan is None:
                return
            samples = [chunk for chunk in plan.chunks if chunk.samples]
            prefill = plan.num_tokens - sum(chunk.num_tokens == 1 for chunk in plan.chunks)
            self.now_s[replica_id] += base_s + token_s * prefill
            tokens = tuple(7 for _ in samples)
            manager.commit(StepResult(plan.epoch, plan.step_id, tokens, 0.0), self.now_s[replica_id])

    def measure(self, replica_id: int, base_s: float = 0.01, token_s: float = 50e-6) -> None:
        """Let a replica compute some prompts, so that the router knows its speed; nothing of them remains."""
        manager = self.managers[replica_id]
        for number, length in enumerate((100, 900, 300, 1500)):
            command = AddSequence(
                sequence_id=10_000 + number, prompt_token_ids=(number,) * length, sampling=SAMPLING, tenant="measure"
            )
            manager.apply(command)
            self.step(replica_id, 30, base_s, token_s)


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(50_000) for _ in range(length))


def measured_fleet(num_replicas: int, **limits: Any) -> Fleet:
    fleet = Fleet(num_replicas, **limits)
    for replica_id in range(num_replicas):
        fleet.measure(replica_id)
    return fleet


def test_the_hashes_are_those_that_the_manager_computes() -> None:
    fleet = Fleet(1)
    prompt = prompt_of(0, 100)
    fleet.send(prompt, tenant="another")
    sequence = fleet.managers[0].find(0)
    assert sequence is not None
    (sent,) = fleet.router.replicas[0].waiting()
    assert sent.hashes == sequence.kv.hashes[:6]
    given = [b"%d" % number for number in range(7)]
    fleet.send(prompt, tenant="another", block_hashes=given)
    assert fleet.router.replicas[0].waiting()[0].hashes == given[:6], "they are not computed again"


def test_arrivals_within_one_step_do_not_all_go_to_one_replica() -> None:
    fleet = measured_fleet(4)
    counts = Counter(fleet.send(prompt_of(number, 500)).replica_id for number in range(40))
    assert set(counts.values()) == {10}


def test_arrivals_before_the_first_step_of_all_are_spread_too() -> None:
    fleet = Fleet(4)
    counts = Counter(fleet.send(prompt_of(number, 500)).replica_id for number in range(40))
    assert set(counts.values()) == {10}


def test_a_conversation_stays_where_its_prefix_is_cached() -> None:
    fleet = measured_fleet(4)
    history = prompt_of(0, 1000)
    first = fleet.send(history)
    fleet.step(first.replica_id, 60)
    for turn in range(3):
        for other in range(4):
            fleet.send(prompt_of(100 + 4 * turn + other, 200))  # some load everywhere
        history += prompt_of(50 + turn, 40)
        route = fleet.send(history)
        assert route.replica_id == first.replica_id
        assert route.num_cached_tokens >= 992
        for replica_id in range(4):
            fleet.step(replica_id, 60)


def test_a_conversation_leaves_when_waiting_costs_more_than_computing_it_again() -> None:
    fleet = measured_fleet(2)
    history = prompt_of(0, 1000)
    home = fleet.send(history).replica_id
    fleet.step(home, 60)
    fleet.router.set_available(1 - home, False)
    for number in range(20):
        fleet.send(prompt_of(1 + number, 1000))
    fleet.router.set_available(1 - home, True)
    assert fleet.send(history + prompt_of(99, 10)).replica_id == 1 - home


def test_a_prompt_that_waits_counts_as_cached_for_the_next_one() -> None:
    fleet = measured_fleet(2)
    document = prompt_of(0, 2000)
    first = fleet.send(document + prompt_of(1, 20))
    fleet.send(prompt_of(9, 300))  # to the other one
    second = fleet.send(document + prompt_of(2, 20))
    assert (second.replica_id, second.num_cached_tokens) == (first.replica_id, 2000)
    other_tenant = fleet.send(document + prompt_of(2, 20), tenant="other")
    assert other_tenant.num_cached_tokens == 0


def test_a_prompt_whose_sequence_ended_before_it_was_computed_does_not_count() -> None:
    fleet = measured_fleet(4)
    document = prompt_of(0, 2000)
    first = fleet.send(document)
    fleet.managers[first.replica_id].finish(0, FinishReason.ABORT)
    assert fleet.send(document + prompt_of(2, 20)).num_cached_tokens == 0


def test_a_prompt_that_is_being_computed_counts_as_cached_for_the_next_one() -> None:
    fleet = measured_fleet(1, max_num_batched_tokens=512)
    document = prompt_of(0, 2010)
    fleet.send(document)
    fleet.step(0)
    assert fleet.managers[0].num_prefill_tokens == 2010 - 512
    assert fleet.send(document + prompt_of(2, 20)).num_cached_tokens == 2000


def test_what_is_computed_or_has_ended_is_forgotten() -> None:
    fleet = measured_fleet(1)
    for number in range(200):
        fleet.send(prompt_of(number, 40))
        fleet.step(0, 30)
    replica = fleet.router.replicas[0]
    assert len(replica._sent) <= 3 and len(replica._expected) <= 6


def test_answers_to_one_prompt_go_to_one_replica_and_cost_one_prompt() -> None:
    fleet = measured_fleet(2)
    route = fleet.send(prompt_of(0, 640), num_answers=8)
    manager = fleet.managers[route.replica_id]
    assert manager.num_waiting == 8
    assert manager.num_prefill_tokens == 640
    assert fleet.send(prompt_of(1, 640)).replica_id != route.replica_id


def test_prompts_with_logprobs_are_computed_anywhere() -> None:
    fleet = measured_fleet(2)
    fleet.send(prompt_of(0, 640))
    sampling = SamplingParams(max_tokens=4, prompt_logprobs=1)
    assert fleet.send(prompt_of(0, 640), sampling=sampling).num_cached_tokens == 0


def test_a_replica_that_is_not_available_takes_nothing() -> None:
    fleet = measured_fleet(3)
    history = prompt_of(0, 800)
    home = fleet.send(history).replica_id
    fleet.step(home, 60)
    fleet.router.set_available(home, False)
    assert home not in {fleet.send(history + prompt_of(1 + number, 10)).replica_id for number in range(20)}
    for replica_id in range(3):
        fleet.router.set_available(replica_id, False)
    command = AddSequence(sequence_id=99, prompt_token_ids=(1,), sampling=SAMPLING)
    assert fleet.router.route([command]) is None
    assert fleet.router.rebalance(8) == []
    fleet.router.remove_replica(0)
    fleet.router.remove_replica(1)
    fleet.router.set_available(2, True)
    assert fleet.send(history).replica_id == 2


def test_a_slow_replica_takes_its_part_and_no_more() -> None:
    fleet = Fleet(2)
    fleet.measure(0, base_s=0.01, token_s=50e-6)
    fleet.measure(1, base_s=0.01, token_s=200e-6)
    counts = Counter(fleet.send(prompt_of(number, 1000)).replica_id for number in range(50))
    assert 8 <= counts[1] <= 14


def test_a_replica_that_has_just_joined_is_assumed_to_be_as_fast_as_the_others() -> None:
    fleet = measured_fleet(2)
    fleet.join(2)
    counts = Counter(fleet.send(prompt_of(number, 1000)).replica_id for number in range(60))
    assert set(counts.values()) == {20}


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"num_blocks": 200}])
def test_a_replica_without_a_free_slot_or_block_is_avoided(limits: dict[str, int]) -> None:
    """Its prompts are computed, so that nothing waits there; but a new sequence would."""
    fleet = measured_fleet(2, **limits)
    fleet.router.set_available(1, False)
    for number in range(2):
        fleet.send(prompt_of(number, 1500))
    fleet.step(0, 5)
    assert fleet.managers[0].num_running == 2
    fleet.router.set_available(1, True)
    assert {fleet.send(prompt_of(number, 600)).replica_id for number in range(10, 12)} == {1}


# -- rebalance --------------------------------------------------------------------------------------------------------


def move(fleet: Fleet, max_moves: int) -> list[tuple[int, int]]:
    """Carry out what the router proposes; return the pairs of source and target."""
    pairs = []
    for each in fleet.router.rebalance(max_moves):
        for sequence_id in each.sequence_ids:
            sequence = fleet.managers[each.source_id].find(sequence_id)
            assert sequence is not None and sequence.status is Status.WAITING and sequence.first_scheduled_s is None
            leader_id = None if sequence_id == each.sequence_ids[0] else each.sequence_ids[0]
            fleet.managers[each.source_id].finish(sequence_id, FinishReason.ABORT)
            fleet.managers[each.target_id].apply(
                AddSequence(
                    sequence_id=sequence_id,
                    prompt_token_ids=tuple(sequence.token_ids),
                    sampling=sequence.sampling,
                    leader_id=leader_id,
                    tenant=sequence.tenant,
                )
            )
        pairs.append((each.source_id, each.target_id))
    return pairs


def test_a_replica_that_joins_takes_its_part_of_the_queues_in_bounded_steps() -> None:
    fleet = measured_fleet(2)
    for number in range(60):
        fleet.send(prompt_of(number, 1000))
    fleet.join(2)
    num_moves = []
    while moves := move(fleet, max_moves=4):
        assert {target for _, target in moves} == {2}
        num_moves.append(len(moves))
    assert max(num_moves) <= 4
    assert 14 <= sum(num_moves) <= 20
    assert {source for source, _ in moves} <= {0, 1}


def test_a_group_moves_as_one() -> None:
    fleet = measured_fleet(1)
    for number in range(6):
        fleet.send(prompt_of(number, 1000), num_answers=3)
    fleet.join(1)
    assert move(fleet, 10)
    for manager in fleet.managers.values():
        assert {manager.num_waiting % 3, manager.num_followers % 2} == {0}


def test_what_runs_stays_and_so_does_what_is_found_sooner_where_it_waits() -> None:
    fleet = measured_fleet(2)
    document = prompt_of(0, 4000)
    home = fleet.send(document).replica_id
    fleet.step(home, 60)
    for number in range(6):
        assert fleet.send(document + prompt_of(1 + number, 30)).replica_id == home
    assert move(fleet, 10) == []


def test_nothing_moves_twice_and_nothing_moves_without_a_reason() -> None:
    """Random joins, arrivals and steps: no sequence is moved twice, and a second call in a row finds less to move."""
    num_moved = 0
    for seed in range(8):
        rng = random.Random(seed)
        fleet = measured_fleet(3, max_num_seqs=4)
        moved: Counter[int] = Counter()
        for number in range(60):
            fleet.send(prompt_of(rng.randrange(30), rng.choice([100, 1000, 3000])), num_answers=rng.choice([1, 1, 3]))
            for replica_id in fleet.managers:
                fleet.step(replica_id, rng.choice([0, 0, 1, 5]))
            fleet.router.set_available(rng.randrange(2), rng.random() < 0.7)
            if number % 5 == 0:
                before = {i: set(manager._sequences) for i, manager in fleet.managers.items()}
                move(fleet, 8)
                for i, manager in fleet.managers.items():
                    moved.update(set(manager._sequences) - before[i])
        for manager in fleet.managers.values():
            manager.check()
        assert max(moved.values(), default=0) <= 1
        num_moved += len(moved)
    assert num_moved > 20


def test_what_the_caller_sent_to_a_replica_moves_like_what_the_router_sent() -> None:
    """A replica is alone, so the caller needs no decision. Then another one joins."""
    routed, recorded = measured_fleet(1), measured_fleet(1)
    for number in range(10):
        command = AddSequence(sequence_id=number, prompt_token_ids=prompt_of(number, 1000), sampling=SAMPLING)
        recorded.router.record(0, [command])
        recorded.managers[0].apply(command)
        routed.send(command.prompt_token_ids)
    for fleet in (routed, recorded):
        fleet.join(1)
    moves = routed.router.rebalance(10)
    assert len(moves) >= 4
    assert recorded.router.rebalance(10) == moves


def test_a_replica_that_joins_gets_about_half_of_what_waits_for_slots() -> None:
    """Prompts are short, so they wait for answers to end. The new replica has free slots, but not for all of them."""
    fleet = measured_fleet(1, max_num_seqs=4)
    for number in range(16):
        fleet.send(prompt_of(number, 20))
    fleet.step(0, 3)
    assert (fleet.managers[0].num_running, fleet.managers[0].num_waiting) == (4, 12)
    fleet.join(1)
    assert 6 <= len(move(fleet, 12)) <= 9


def test_one_replica_alone_has_nowhere_to_move_anything() -> None:
    fleet = measured_fleet(1)
    for number in range(10):
        fleet.send(prompt_of(number, 1000))
    assert fleet.router.rebalance(8) == []


def test_what_ends_between_two_looks_does_not_move() -> None:
    fleet = measured_fleet(1)
    for number in range(10):
        fleet.send(prompt_of(number, 1000))
    fleet.join(1)
    looks = fleet.router.find_moves(10)
    first = next(looks)
    assert first is not None and (first.source_id, first.target_id) == (0, 1)
    for sequence_id in fleet.managers[0].sequence_ids:
        fleet.managers[0].finish(sequence_id, FinishReason.ABORT)
    assert list(looks) == []


# -- equal costs ------------------------------------------------------------------------------------------------------


def test_a_server_with_little_to_do_uses_all_replicas() -> None:
    """One prompt at a time: all replicas are idle, and none has anything of the prompt."""
    fleet = measured_fleet(4)
    counts: Counter[int] = Counter()
    for number in range(40):
        replica_id = fleet.send(prompt_of(number, 500)).replica_id
        fleet.step(replica_id, 60)
        assert not fleet.managers[replica_id].has_work
        counts[replica_id] += 1
    assert set(counts.values()) == {10}


def test_among_equal_costs_the_least_loaded_replica_is_chosen() -> None:
    """Steps of 10 ms take as long with three sequences as with one, so only the load differs."""
    fleet = measured_fleet(3)
    sampling = SamplingParams(max_tokens=500, ignore_eos=True)
    for replica_id, num_running in ((0, 3), (1, 1), (2, 2)):
        for other in range(3):
            fleet.router.set_available(other, other == replica_id)
        for number in range(num_running):
            fleet.send(prompt_of(10 * replica_id + number, 20), sampling=sampling)
        fleet.step(replica_id, 3)
    for replica_id in range(3):
        fleet.router.set_available(replica_id, True)
    assert fleet.send(prompt_of(99, 20)).replica_id == 1


# -- tenants that take turns ------------------------------------------------------------------------------------------


def flooded_fleet(policy: str) -> Fleet:
    """Two replicas with two slots each; the tenant "flood" holds all slots, and has 38 and 8 sequences waiting."""
    fleet = measured_fleet(2, max_num_seqs=2, scheduling_policy=policy)
    for replica_id, number in ((0, 40), (1, 10)):
        fleet.router.set_available(replica_id, True)
        fleet.router.set_available(1 - replica_id, False)
        for _ in range(number):
            fleet.send(prompt_of(fleet.num_sent, 100), tenant="flood")
        fleet.step(replica_id, 3)
    return fleet


def test_a_modest_tenant_is_predicted_to_overtake_a_flood() -> None:
    fleet = flooded_fleet("fair")
    assert fleet.send(prompt_of(1000, 100), tenant="modest").ttft_s < 0.1
    assert fleet.send(prompt_of(1001, 100), tenant="flood").ttft_s > 0.5
    fleet = flooded_fleet("fcfs")
    assert fleet.send(prompt_of(1000, 100), tenant="modest").ttft_s > 0.5


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_conversation_stays_on_a_replica_that_another_tenant_floods_if_it_overtakes(policy: str) -> None:
    fleet = measured_fleet(2, max_num_seqs=2, scheduling_policy=policy)
    history = prompt_of(0, 2000)
    home = fleet.send(history, tenant="modest").replica_id
    fleet.step(home, 60)
    fleet.router.set_available(1 - home, False)
    for number in range(20):
        fleet.send(prompt_of(1 + number, 100), tenant="flood")
    fleet.step(home, 3)
    fleet.router.set_available(1 - home, True)
    route = fleet.send(history + prompt_of(99, 10), tenant="modest")
    assert (route.replica_id == home) == (policy == "fair")


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_sequence_that_overtakes_a_queue_is_not_moved_away_from_it(policy: str) -> None:
    fleet = flooded_fleet(policy)
    fleet.router.set_available(0, True)
    fleet.router.set_available(1, False)
    modest = fleet.num_sent
    fleet.send(prompt_of(modest, 100), tenant="modest")
    fleet.router.set_available(1, True)
    moved = {sequence_id for each in fleet.router.rebalance(4) for sequence_id in each.sequence_ids}
    assert len(moved) == 4 and (modest in moved) == (policy == "fcfs")


def test_a_replica_that_joins_takes_its_part_of_each_tenants_queue() -> None:
    fleet = measured_fleet(2, scheduling_policy="fair")
    for number in range(60):
        fleet.send(prompt_of(number, 1000), tenant="modest" if number % 6 == 0 else "flood")
    fleet.join(2)
    num_moved = 0
    while moves := move(fleet, max_moves=4):
        num_moved += len(moves)
    assert 10 <= num_moved <= 24
    queued = {i: manager.queued.by_tenant() for i, manager in fleet.managers.items()}
    assert sum(counts["flood"].num_sequences for counts in queued.values()) == 50
    assert 8 <= queued[2]["flood"].num_sequences <= 24
