"""Compare the router with simple policies on a simulated fleet: the real workload managers, in virtual time.

    python -m benchmarks.routing [--replicas 8] [--seconds 25] [--seeds 3]

It prints three tables. *Policies*: hit rate and TTFT of each policy at three loads, beside one replica that has the
memory and the speed of all. *Outage*: what happens when a replica is lost and returns with an empty cache. *Cost*: the
time of one decision on this machine; all other figures are the same on every machine.

Load 1 is what the fleet carries if each replica serves its own part of the conversations. That is measured with one
replica: with more conversations a second than CONVERSATIONS_PER_S, its queue grows for as long as they come.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from itertools import pairwise
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.progress import progress
from servekit.protocol.messages import StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.routing.replica import Replica
from servekit.routing.router import Move, Route, Router
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.prefix_cache import continue_chain
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.fleet import Conversation, Fleet, FleetSimulation, Outage, RoutingPolicy, Turn, TurnRecord
from servekit.simulation.model import SimulatedModel

BLOCK_SIZE = 32
# The order of a model of 70 billion parameters on one H100, with 8-bit weights; its memory is scaled to the load.
MODEL = SimulatedModel(step_s=20e-3, prefill_s=200e-6, decode_s=100e-6, context_s=250e-9)
REPLICA = SchedulerConfig(
    num_blocks=1_700,
    block_size=BLOCK_SIZE,
    max_model_len=32_768,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    max_steps_in_flight=2,
    scheduling_policy="shortest",
)
CONVERSATIONS_PER_S = 2.6  # of one replica at load 1
WARM_UP_S = 15.0  # until caches are full and as many conversations end as begin
LOADS = (0.5, 0.8, 0.95)

# -- the simple policies ----------------------------------------------------------------------------------------------


class SimplePolicy(Router):
    """A policy that needs one line, looks into no prefix cache and moves nothing."""

    def choose(self, command: AddSequence) -> Replica:
        raise NotImplementedError

    def route(self, commands: Sequence[AddSequence]) -> Route:
        return Route(self.choose(commands[0]).replica_id, 0, 0.0)

    def rebalance(self, max_moves: int) -> list[Move]:
        return []


class RoundRobin(SimplePolicy):
    """Each replica in turn."""

    _count = 0

    def choose(self, command: AddSequence) -> Replica:
        self._count += 1
        return list(self.replicas.values())[self._count % len(self.replicas)]


class LeastRequests(SimplePolicy):
    """The replica with the fewest requests, waiting or running."""

    def choose(self, command: AddSequence) -> Replica:
        return min(self.replicas.values(), key=num_requests)


def num_requests(replica: Replica) -> int:
    return replica.manager.num_running + replica.manager.num_waiting


SYSTEM_PROMPT_TOKENS, MIN_USER_TOKENS = 600, 8
NUM_POINTS = 64  # of a replica on the ring of consistent hashing


class PrefixHash(SimplePolicy):
    """Consistent hashing of the prompt's first tokens: with so few of them, of the system prompt."""

    num_tokens = 256
    max_load = inf  # of a replica, relative to the mean

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._ring: list[tuple[int, int]] = []  # (point, replica id), sorted

    def add_replica(self, replica_id: int, manager: WorkloadManager) -> None:
        super().add_replica(replica_id, manager)
        points = [(hash_point(f"{replica_id}/{number}"), replica_id) for number in range(NUM_POINTS)]
        self._ring = sorted(self._ring + points)

    def remove_replica(self, replica_id: int) -> None:
        super().remove_replica(replica_id)
        self._ring = [point for point in self._ring if point[1] != replica_id]

    def choose(self, command: AddSequence) -> Replica:
        point = hash_point(repr(tuple(command.prompt_token_ids[: self.num_tokens])))
        start = bisect_left(self._ring, (point, 0))
        limit = self.max_load * (1 + sum(map(num_requests, self.replicas.values()))) / len(self.replicas)
        order = (self.replicas[replica_id] for _, replica_id in self._ring[start:] + self._ring[:start])
        return next(replica for replica in order if num_requests(replica) < limit)


def hash_point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


class BoundedPrefixHash(PrefixHash):
    """The same with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018)."""

    max_load = 1.25


class ConversationHash(PrefixHash):
    """Consistent hashing of the conversation: of its first tokens, with some of the client's own."""

    num_tokens = SYSTEM_PROMPT_TOKENS + MIN_USER_TOKENS


class BoundedConversationHash(ConversationHash):
    """The same with bounded loads."""

    max_load = 1.25


POLICIES: dict[str, Callable[[int], RoutingPolicy]] = {
    "router": Router,
    "round robin": RoundRobin,
    "least requests": LeastRequests,
    "prefix hash": PrefixHash,
    "prefix hash, bounded": BoundedPrefixHash,
    "conversation hash": ConversationHash,
    "conversation hash, bounded": BoundedConversationHash,
}
ONE_BIG = "one big replica"

# -- the load ---------------------------------------------------------------------------------------------------------


def make_conversations(seed: int, per_s: float, span_s: float) -> tuple[Conversation, ...]:
    """Conversations of six tenants that begin at random, each with one of its tenant's three system prompts.

    One in twenty is an agent's: it has three times as many turns, and asks the next one within half a second.
    """
    rng = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(50_000), k=length))

    tenants = [f"tenant {number}" for number in range(6)]
    system_prompts = {tenant: [tokens(SYSTEM_PROMPT_TOKENS) for _ in range(3)] for tenant in tenants}
    found: list[Conversation] = []
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(per_s)) < span_s:
        tenant = rng.choices(tenants, [1 / (1 + number) for number in range(6)])[0]
        is_agent = rng.random() < 0.05
        num_turns = min(12, 1 + int(rng.expovariate(1 / 4))) * (3 if is_agent else 1)
        turns = []
        for number in range(num_turns):
            words = tokens(int(min(3000, max(MIN_USER_TOKENS, rng.lognormvariate(4.3, 1.0)))))
            if not number:
                words = rng.choice(system_prompts[tenant]) + words
            num_output_tokens = int(min(200, max(4, rng.lognormvariate(3.4, 0.6))))
            turns.append(Turn(words, num_output_tokens, 0.5 if is_agent else rng.lognormvariate(1.2, 0.6)))
        found.append(Conversation(at_s, tenant, tuple(turns)))
    return tuple(found)


def make_fleet(num_replicas: int, load: float, span_s: float, seed: int, outages: tuple[Outage, ...] = ()) -> Fleet:
    conversations = make_conversations(seed, load * CONVERSATIONS_PER_S * num_replicas, span_s)
    return Fleet(scheduler=REPLICA, models=(MODEL,) * num_replicas, conversations=conversations, outages=outages)


def one_big(fleet: Fleet) -> Fleet:
    """One replica with the memory and the speed of all, for the same conversations."""
    num, config = len(fleet.models), fleet.scheduler
    fast = SimulatedModel(**{name: getattr(MODEL, name) / num for name in MODEL.__struct_fields__})
    config = replace(config, num_blocks=num * config.num_blocks, max_num_seqs=num * config.max_num_seqs)
    return replace(fleet, scheduler=config, models=(fast,))


# -- policies ---------------------------------------------------------------------------------------------------------


class Figures(Struct, frozen=True):
    hit_rate: float
    p50_s: float
    p99_s: float


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def play(fleet: Fleet, policy: str) -> FleetSimulation:
    """Simulate a fleet with the policy of this name, or in its place one big replica."""
    if policy == ONE_BIG:
        fleet = one_big(fleet)
    simulation = FleetSimulation(fleet, POLICIES.get(policy, Router)(BLOCK_SIZE))
    simulation.run()
    return simulation


def figures(records: list[TurnRecord], from_s: float, to_s: float) -> Figures:
    """Hit rate and TTFT of the turns that were asked in this time."""
    return figures_of([record for record in records if from_s <= record.asked_s < to_s])


def figures_of(turns: list[TurnRecord]) -> Figures:
    ttft_s = [turn.ttft_s for turn in turns]
    hit_rate = sum(turn.num_cached_tokens for turn in turns) / sum(turn.num_prompt_tokens for turn in turns)
    return Figures(hit_rate, percentile(ttft_s, 0.5), percentile(ttft_s, 0.99))


def measure(num_replicas: int, load: float, seconds: float, seed: int, policy: str) -> list[TurnRecord]:
    """Play a fleet, and return the turns of some seconds after it has warmed up."""
    span_s = WARM_UP_S + seconds
    records = play(make_fleet(num_replicas, load, span_s, seed), policy).records
    return [record for record in records if WARM_UP_S <= record.asked_s < span_s]


def compare_policies(num_replicas: int, seconds: float, num_seeds: int) -> None:
    names = [ONE_BIG, *POLICIES]
    runs = [(load, name, seed) for load in LOADS for name in names for seed in range(1, num_seeds + 1)]
    turns: defaultdict[tuple[float, str], list[TurnRecord]] = defaultdict(list)
    with ProcessPoolExecutor(min(len(runs), os.cpu_count() or 1)) as pool:
        futures = [pool.submit(measure, num_replicas, load, seconds, seed, name) for load, name, seed in runs]
        for (load, name, _), future in progress(
            list(zip(runs, futures, strict=True)), "policies", lambda run: f"{run[0][1]} at {run[0][0]}"
        ):
            turns[load, name] += future.result()
    print(f"{num_replicas} replicas, {num_seeds} times {seconds:g} s. Hit rate of prompt tokens in %; TTFT in ms\n")
    print("| policy | " + " | ".join(f"load {load}: hit rate | TTFT p50 | p99" for load in LOADS) + " |")
    print("|---|" + "---:|---:|---:|" * len(LOADS))
    for name in names:
        cells = [figures_of(turns[load, name]) for load in LOADS]
        row = " | ".join(f"{100 * f.hit_rate:.1f} | {1e3 * f.p50_s:,.0f} | {1e3 * f.p99_s:,.0f}" for f in cells)
        print(f"| {name} | {row} |", flush=True)


# -- outage -----------------------------------------------------------------------------------------------------------


def num_moved(records: list[TurnRecord], from_s: float, to_s: float) -> tuple[int, int]:
    """Of the turns asked in this time: how many went to another replica than the turn before, and how many could."""
    last: dict[int, int] = {}
    moved = total = 0
    for record in records:
        before = last.get(record.conversation)
        last[record.conversation] = record.replica_id
        if before is not None and from_s <= record.asked_s < to_s:
            total += 1
            moved += before != record.replica_id
    return moved, total


def share_of(replica_id: int, records: list[TurnRecord], from_s: float, to_s: float) -> float:
    """Return the replica's share of the turns asked in this time."""
    asked = [record.replica_id for record in records if from_s <= record.asked_s < to_s]
    return asked.count(replica_id) / len(asked)


def show_outage(num_replicas: int, load: float, seed: int) -> None:
    lost_s, returns_s, span_s = 20.0, 30.0, 50.0
    fleet = make_fleet(num_replicas, load, span_s, seed, (Outage(0, lost_s, returns_s),))
    records = play(fleet, "router").records
    print(f"\nload {load}: replica 0 is lost at {lost_s:g} s and returns at {returns_s:g} s with an empty cache\n")
    print("| from s | to s | turns of replica 0, % | turns that changed the replica, % | hit rate, % | TTFT p99, ms |")
    print("|---:|---:|---:|---:|---:|---:|")
    edges = [10, 15, 20, 25, 30, 32, 34, 36, 40, 45, 50]
    for from_s, to_s in pairwise(edges):
        (moved, total), found = num_moved(records, from_s, to_s), figures(records, from_s, to_s)
        print(
            f"| {from_s} | {to_s} | {100 * share_of(0, records, from_s, to_s):.1f} | {100 * moved / total:.1f} "
            f"| {100 * found.hit_rate:.1f} | {1e3 * found.p99_s:,.0f} |"
        )


# -- cost -------------------------------------------------------------------------------------------------------------


def decision_us(num_tokens: int, num_cached: int, num_replicas: int = 8, block_size: int = 16) -> tuple[float, float]:
    """Median microseconds of hashing one prompt, and of a decision; `num_cached` replicas have the whole prompt."""
    router = Router(block_size)
    config = replace(REPLICA, block_size=block_size, num_blocks=4_000, max_num_batched_tokens=2048)
    prompt = array("i", random.Random(0).choices(range(50_000), k=num_tokens))
    sampling = SamplingParams(max_tokens=20)
    for replica_id in range(num_replicas):
        manager = WorkloadManager(config)
        router.add_replica(replica_id, manager)
        if replica_id < num_cached:
            manager.add(AddSequence(sequence_id=0, prompt_token_ids=prompt, sampling=sampling))
            while (plan := manager.plan(0.0)) is not None:  # a prompt's blocks are published when it is dispatched
                num_sampled = sum(chunk.samples for chunk in plan.chunks)
                manager.commit(StepResult(plan.epoch, plan.step_id, (0,) * num_sampled, 0.0), 0.0)
    hashing, deciding = [], []
    for _ in range(200):
        hashes: list[bytes] = []
        began = time.perf_counter()
        continue_chain(hashes, "", prompt, num_tokens // block_size, block_size)
        hashed = time.perf_counter()
        router.route([AddSequence(sequence_id=1, prompt_token_ids=prompt, sampling=sampling, block_hashes=hashes)])
        ended = time.perf_counter()
        hashing.append(1e6 * (hashed - began))
        deciding.append(1e6 * (ended - hashed))
    return statistics.median(hashing), statistics.median(deciding)


def show_cost() -> None:
    print("\none decision among 8 replicas, blocks of 16 tokens; hashing the prompt comes before it\n")
    print("| prompt tokens | replicas that have it | hashing, µs | deciding, µs |")
    print("|---:|---:|---:|---:|")
    for num_tokens in (512, 4096):
        for num_cached in (0, 1, 8):
            hashing, deciding = decision_us(num_tokens, num_cached)
            print(f"| {num_tokens:,} | {num_cached} | {hashing:.0f} | {deciding:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=25.0, help="of virtual time, after warming up")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    compare_policies(arguments.replicas, arguments.seconds, arguments.seeds)
    show_outage(arguments.replicas, 0.8, seed=1)
    show_cost()


if __name__ == "__main__":
    main()
