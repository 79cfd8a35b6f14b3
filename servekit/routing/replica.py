"""Read the state of one replica for the router: load, speed, cached prefixes, and the prompts that were sent to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import takewhile

from msgspec import Struct
from msgspec.structs import replace

from servekit.scheduler.queued_work import WorkCount
from servekit.scheduler.workload_manager import WorkloadManager


class Speed(Struct, frozen=True, gc=False):
    """The measured times of which a step consists, in seconds."""

    prefill_s: float  # for each token of a prompt
    decode_s: float  # for each decode: a token of a running sequence
    overhead_s: float  # for each step, whatever is in it

    def step_s(self, num_running: int) -> float:
        """Return the time of a step without prompts, in seconds."""
        return self.overhead_s + self.decode_s * num_running


class RoutedPrompt(Struct, gc=False):
    """The answers to one prompt that were sent to a replica."""

    sequence_ids: tuple[int, ...]  # of the answers; the leader comes first
    hashes: list[bytes]  # of the prompt's full blocks
    num_tokens: int  # of the prompt
    num_found: int  # blocks of `hashes` that were in the prefix cache
    tenant: str
    is_moved: bool = False  # whether it was moved here from another replica's queue


class Load(Struct, gc=False):
    """The work of a replica that delays the next sequence."""

    num_running: int
    num_waiting: int
    num_prefill_tokens: int  # to be computed for the prompts that wait or run
    num_queued_tokens: int  # of the prompts that wait, cached or not
    num_tokens_in_flight: int  # of prompts, in steps that the worker executes
    num_steps_in_flight: int
    num_free_blocks: int
    num_leased_blocks: int
    queued: dict[str, WorkCount] | None = None  # waiting for the first step, by tenant; None if these take no turns

    def copy(self) -> Load:
        """Return a load that `add` can change without changing this one."""
        return replace(self, queued=copy_counts(self.queued))

    def add(self, tenant: str, num_sequences: int, num_tokens: int, num_missing: int) -> None:
        """Add the answers to one prompt; with negative numbers, subtract them."""
        self.num_waiting += num_sequences
        self.num_queued_tokens += num_tokens
        self.num_prefill_tokens += num_missing
        if self.queued is not None:
            count = self.queued.setdefault(tenant, WorkCount())
            count.add(num_sequences, num_tokens)
            if not count.num_sequences:
                del self.queued[tenant]


def copy_counts(counts: Mapping[str, WorkCount] | None) -> dict[str, WorkCount] | None:
    """Return a copy of what each tenant has queued."""
    if counts is None:
        return None
    return {tenant: WorkCount(count.num_sequences, count.num_tokens) for tenant, count in counts.items()}


class Replica:
    """What the router knows of one workload manager."""

    def __init__(self, replica_id: int, manager: WorkloadManager) -> None:
        self.replica_id = replica_id
        self.manager = manager
        self.is_available = True
        self.last_chosen = 0  # number of the newest route that chose this replica
        # Blocks that the prompts sent here will publish: the leader that computes each, by the block's hash. A leader
        # may have ended.
        self._expected: dict[bytes, int] = {}
        self._sent: deque[RoutedPrompt] = deque()  # in no order; some are computed already, or have ended

    def speed(self) -> Speed | None:
        """Return how fast the replica is; None until it has computed a prompt."""
        step_times = self.manager.prefill_limiter.step_times
        return Speed(step_times.prefill_s, step_times.decode_s, step_times.overhead_s) if step_times.prefill_s else None

    def load(self) -> Load:
        """Return the load at this moment."""
        manager, pool = self.manager, self.manager.kv_cache.pool
        return Load(
            manager.num_running,
            manager.num_waiting,
            manager.num_prefill_tokens,
            manager.queued.total.num_tokens,
            manager.num_prefill_tokens_in_flight,
            manager.num_in_flight,
            pool.num_available,
            pool.num_leased,
            copy_counts(manager.queued.by_tenant()) if manager.waiting_queue.has_shares else None,
        )

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def num_found(self, hashes: list[bytes]) -> int:
        """Return how many blocks at the beginning of this chain are in the prefix cache, or can be loaded into it."""
        return self.manager.kv_cache.prefixes.num_known(hashes)

    def num_expected(self, hashes: list[bytes], start: int) -> int:
        """Return how many blocks from `start` on earlier prompts will compute before the next one starts."""
        if start == len(hashes) or hashes[start] not in self._expected:
            return 0
        expected, find = self._expected, self.manager.find
        leaders: dict[int, bool] = {}

        def is_alive(block_hash: bytes) -> bool:
            leader_id = expected.get(block_hash, -1)
            if leader_id not in leaders:
                leaders[leader_id] = find(leader_id) is not None
            return leaders[leader_id]

        return sum(1 for _ in takewhile(is_alive, hashes[start:]))

    # -- what was sent ------------------------------------------------------------------------------------------------

    def add(self, sent: RoutedPrompt) -> None:
        """Record what was sent.

        Takes constant time: it checks two older entries, and drops them if they are computed.
        """
        for _ in range(min(2, len(self._sent))):
            older = self._sent.popleft()
            if self._is_computed(older):
                self._forget(older)
            else:
                self._sent.append(older)
        self._sent.append(sent)
        leader_id = sent.sequence_ids[0]
        for block_hash in sent.hashes[sent.num_found :]:
            self._expected[block_hash] = leader_id

    def remove(self, sent: RoutedPrompt) -> None:
        """Drop an entry that moves to another replica."""
        self._sent.remove(sent)
        self._forget(sent)

    def waiting(self) -> list[RoutedPrompt]:
        """Return the prompts that have not begun, newest first, without those that moved here from another replica."""
        found = [sent for sent in self._sent if not sent.is_moved and self.is_waiting(sent)]
        return sorted(found, key=lambda sent: sent.sequence_ids[0], reverse=True)

    def is_waiting(self, sent: RoutedPrompt) -> bool:
        """Return whether all answers to a prompt that was sent here still wait: none has begun, ended or left."""
        sequences = map(self.manager.find, sent.sequence_ids)
        return all(each is not None and each.first_scheduled_s is None for each in sequences)

    def _is_computed(self, sent: RoutedPrompt) -> bool:
        """Return whether the prompt is computed, or will never be, because its leader has ended."""
        leader = self.manager.find(sent.sequence_ids[0])
        return leader is None or leader.first_sampled_step_id is not None

    def _forget(self, sent: RoutedPrompt) -> None:
        leader_id = sent.sequence_ids[0]
        for block_hash in sent.hashes[sent.num_found :]:
            if self._expected.get(block_hash) == leader_id:
                del self._expected[block_hash]
