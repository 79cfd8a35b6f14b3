"""Run several engine cores as one: choose the core of each sequence, and move sequences from one core to another.

A sequence is on one core at a time. When it moves, its manager removes it, and returns the command that continues it
elsewhere with the same tokens (docs/design/replicas.md). The supervisor (`servekit/engine/replica_supervisor.py`)
decides when workers start, and what happens when they are lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from servekit.engine.engine_core import KEYS_PER_COMMAND, EngineCore
from servekit.engine.replica import Replica
from servekit.engine.request_registry import RequestRegistry
from servekit.observability.metrics import SchedulerStats
from servekit.protocol.messages import MAX_FETCHED_KEYS, BlocksFetched
from servekit.routing.block_fetches import BlockFetches, Fetch
from servekit.routing.hand_over import can_move, find_hand_overs
from servekit.routing.router import Router
from servekit.routing.service_exchange import ServiceExchange
from servekit.scheduler.commands import AddSequence, AnnounceBlocks, Finish, Withdraw
from servekit.scheduler.kv_connector import ReplicaRole
from servekit.scheduler.queued_work import CombinedWork, QueuedCounts
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.workload_manager import WorkloadManager

log = logging.getLogger("servekit")

MOVED_PER_SLICE = 32  # sequences that move without a pause; each takes some 0.1 ms
MAX_REBALANCED = 16  # prompts at a time: a sequence that moves because of a wrong prediction has to wait twice
SUSPECTS_WAIT_S = 60.0  # for a worker that joins in place of the one that they were lost on; perhaps none does


class Replicas:
    """All replicas of one engine, and which of them has which sequence. Everything runs on the event loop's thread."""

    def __init__(self, block_size: int, registry: RequestRegistry, *, may_grow: bool = False) -> None:
        """Begin without replicas. `may_grow` says that others may be added while there are sequences."""
        self.all: list[Replica] = []
        self._registry = registry
        self._may_grow = may_grow
        self._router = Router(block_size)
        self._service_exchange = ServiceExchange()
        self.num_handed_over = 0  # times that a decode replica went on with a sequence
        self.fetches = BlockFetches()
        self.on_failed_fetch: Callable[[int], None] = lambda _: None  # gets the number of the decode replica

    def add(self, replica: Replica) -> None:
        """Append a replica. It may have no core yet, until all that the server begins with have one."""
        assert replica.index == len(self.all)
        self.all.append(replica)

    def give_core(self, replica: Replica, core: EngineCore) -> None:
        """Begin to send sequences to a replica: it has a core from now on, because its first worker is ready."""
        replica.core = core
        self._router.add_replica(replica.index, core.manager)

    def of(self, core: EngineCore) -> Replica:
        """Return the replica of a core."""
        return next(replica for replica in self.all if replica.core is core)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def cores(self) -> list[EngineCore]:
        """The cores of all replicas; none before all are ready for the first time."""
        return [replica.core for replica in self.all if replica.has_core]

    @property
    def taking_cores(self) -> list[EngineCore]:
        """The cores of the replicas at which a new sequence can run at once."""
        return [replica.core for replica in self._for_prompts(self.all)]

    @property
    def num_ready(self) -> int:
        return sum(replica.executor.is_ready for replica in self.all)

    @property
    def stage(self) -> str:
        """What the first replica that is not ready is doing, as text for log lines and errors."""
        return next((each.executor.stage for each in self.all if not each.executor.is_ready), "serving")

    @property
    def limits(self) -> SchedulerConfig:
        """The limits of the replica with the most KV blocks, of those that have a worker or wait for one.

        What fits there can be served.
        """
        limits = (replica.core.manager.config for replica in self.all if not replica.is_vacated)
        return max(limits, key=lambda config: config.max_total_tokens)

    @property
    def num_waiting(self) -> int:
        """Waiting sequences of all replicas."""
        return sum(core.manager.num_waiting for core in self.cores)

    @property
    def has_free_slots(self) -> bool:
        """Whether the replicas with a worker have more slots than there are sequences, running and waiting."""
        managers = [core.manager for core in self.cores]
        num_sequences = sum(manager.num_running + manager.num_waiting for manager in managers)
        slots = (replica.core.manager.config.max_num_seqs for replica in self.all if replica.is_ready)
        return num_sequences < sum(slots)

    @property
    def queued(self) -> QueuedCounts:
        """What is queued at all replicas."""
        cores = self.cores
        return cores[0].manager.queued if len(cores) == 1 else CombinedWork([each.manager.queued for each in cores])

    @property
    def is_stalled(self) -> bool:
        """Whether a core with a worker makes no progress."""
        return any(replica.is_ready and replica.core.is_stalled for replica in self.all)

    def stats(self) -> list[SchedulerStats]:
        """Return the state of each scheduler, for metrics."""
        return [core.stats() for core in self.cores]

    # -- sequences ----------------------------------------------------------------------------------------------------

    def finish(self, commands: Iterable[Finish]) -> None:
        """End sequences, wherever they are: for the other cores, Finish does nothing."""
        for command in commands:
            for core in self.cores:
                core.apply(command)

    def choose(self, commands: Sequence[AddSequence]) -> EngineCore:
        """Return the core for all answers to one prompt, the first of which is the leader of the others.

        Raises ContextTooLong if none can: the largest replica may have been given up since the request was checked.
        """
        if len(self.all) == 1:
            if self._may_grow:
                self._router.record(0, commands)  # what still waits when a replica is added moves there
            return self.all[0].core
        self.limits.check_fits(len(commands[0].prompt_token_ids), commands[0].sampling.max_tokens)
        return self._choose([each for each in self.all if not each.is_vacated], commands).core

    def _choose(self, candidates: list[Replica], commands: Sequence[AddSequence]) -> Replica:
        """Return the candidate for all answers to one prompt, preferably one that can begin at once."""
        fitting = [each for each in candidates if each.fits(_max_length(commands[0]))] or candidates
        for_prompts = self._for_prompts(fitting)
        for replica in self.all:
            self._router.set_available(replica.index, replica in for_prompts)
        route = self._router.route(commands)
        if route is not None:
            return self.all[route.replica_id]
        chosen = min(fitting, key=lambda each: (not each.is_ready, each.core.manager.num_waiting))
        self._router.record(chosen.index, commands)
        return chosen

    @staticmethod
    def _for_prompts(replicas: Iterable[Replica]) -> list[Replica]:
        """Return those that can compute a prompt at once: not decode replicas, if there are others."""
        taking = [replica for replica in replicas if replica.takes_sequences]
        return [replica for replica in taking if replica.role is not ReplicaRole.DECODE] or taking

    # -- moving -------------------------------------------------------------------------------------------------------

    async def move_from(self, source: Replica) -> None:
        """Move what a replica without a worker has to others that can run it at once.

        Suspects of a crash stay, and run alone when its worker is replaced. Where workers join, none may ever do so:
        then suspects go to others after SUSPECTS_WAIT_S. Only one replica has suspects: if another one has, they go
        there. So a sequence that crashes workers does not take them down one after the other.
        """
        self.fetches.forget_target(source.index)
        manager = source.core.manager
        suspects = set(manager.quarantine.sequence_ids)
        others = [replica for replica in self.all if replica is not source and not replica.is_vacated]
        isolating = [replica for replica in others if replica.core.manager.quarantine]
        has_waited = source.waited_s >= SUSPECTS_WAIT_S and any(each.is_ready for each in others)
        if suspects and (isolating or source.is_vacated or has_waited):
            self._move(source, sorted(suspects), isolating[:1] or others)
        ids = [each for each in manager.sequence_ids if each not in suspects]
        for start in range(0, len(ids), MOVED_PER_SLICE):
            targets = [replica for replica in others if replica.takes_sequences] or (
                others if source.is_vacated else []
            )
            if not targets or source.is_ready:
                return
            self._move(source, ids[start : start + MOVED_PER_SLICE], targets)
            await asyncio.sleep(0)

    def _move(self, source: Replica, sequence_ids: Sequence[int], targets: list[Replica]) -> None:
        """Move sequences, all answers to one prompt together."""
        num_moved = 0
        largest = max(targets, key=lambda replica: replica.core.manager.config.max_total_tokens)
        ids = tuple(each for each in sequence_ids if self._fits(each, source, largest))  # the others wait
        commands = source.core.apply(Withdraw(ids))
        for prompt in _by_prompt(commands):
            target = self._choose(targets, prompt)
            for command in prompt:
                self._resume(command, target)
                num_moved += 1
        if num_moved:
            log.info("%d sequences of replica %d continue on others", num_moved, source.index)

    @staticmethod
    def _fits(sequence_id: int, source: Replica, target: Replica) -> bool:
        sequence = source.core.manager.find(sequence_id)
        return sequence is not None and target.fits(sequence.max_length)

    async def rebalance(self) -> None:
        """Move waiting sequences to where they start much sooner. Other work is done between any two prompts."""
        for_prompts = self._for_prompts(self.all)
        for replica in self.all:
            self._router.set_available(replica.index, replica in for_prompts)
        for move in self._router.find_moves(MAX_REBALANCED):
            if move is not None:
                source, target = self.all[move.source_id], self.all[move.target_id]
                if target.takes_sequences and all(self._fits(each, source, target) for each in move.sequence_ids):
                    for command in source.core.apply(Withdraw(move.sequence_ids)):
                        self._resume(command, target)
            await asyncio.sleep(0)

    def hand_over(self, source: Replica) -> None:
        """Let decode replicas go on with sequences of a prefill replica, as far as they have room."""
        targets = {
            replica.index: replica.core.manager
            for replica in self.all
            if replica.role is ReplicaRole.DECODE and replica.takes_sequences
        }
        if source.is_joined:
            self._hand_over_by_network(source, targets)
            return
        for hand_over in find_hand_overs(source.core.manager, targets):
            target = self.all[hand_over.target_id]
            if hand_over.keys:
                target.core.apply(AnnounceBlocks(hand_over.keys))
            self._move_to_decode(hand_over.sequence_id, source, target)

    def _move_to_decode(self, sequence_id: int, source: Replica, target: Replica) -> None:
        for command in source.core.apply(Withdraw((sequence_id,), is_hand_over=True)):
            self._resume(command, target)
        self.num_handed_over += 1

    def _hand_over_by_network(self, source: Replica, targets: dict[int, WorkloadManager]) -> None:
        """Let the agents of decode replicas fetch blocks from the source's. `fetched` moves the sequences."""
        now_s, addresses = asyncio.get_running_loop().time(), source.transfer_addresses
        for fetch in self.fetches.expire(now_s):
            log.warning("%s", _describe(fetch, "did not report in time which of its KV blocks it has fetched"))
            self.on_failed_fetch(fetch.target_id)
        if not addresses:
            return
        manager = source.core.manager
        targets = {index: each for index, each in targets.items() if self.fetches.may_begin(source.index, index, now_s)}
        for hand_over in find_hand_overs(manager, targets, self.fetches):
            sequence, target = manager.find(hand_over.sequence_id), self.all[hand_over.target_id]
            assert sequence is not None
            num_there = target.core.manager.kv_cache.prefixes.num_known(list(hand_over.keys))
            keys = hand_over.keys[num_there : num_there + MAX_FETCHED_KEYS]
            if not keys:
                self._move_to_decode(hand_over.sequence_id, source, target)
                continue
            num_blocks = target.core.manager.kv_cache.num_blocks_at_end(sequence, 0)
            fetch = self.fetches.begin(sequence.sequence_id, source.index, target.index, keys, num_blocks, now_s)
            target.executor.fetch(fetch.number, addresses, keys)

    def fetched(self, target: Replica, answer: BlocksFetched) -> None:
        """Move a sequence to a replica whose agent has its blocks. Otherwise it stays where it is."""
        now_s = asyncio.get_running_loop().time()
        fetch = self.fetches.end(answer.number, target.index, answer.keys, now_s)
        if fetch is None:
            return
        if answer.keys != fetch.keys:
            self.on_failed_fetch(target.index)
            what = f"has fetched {len(answer.keys)} of its {len(fetch.keys)} KV blocks; the agent's log says why"
            log.warning("%s", _describe(fetch, what))
        if not target.is_ready:
            return
        keys = fetch.keys[: len(answer.keys)]
        for first in range(0, len(keys), KEYS_PER_COMMAND):
            target.core.apply(AnnounceBlocks(keys[first : first + KEYS_PER_COMMAND]))
        source = self.all[fetch.source_id]
        if target.takes_sequences and can_move(source.core.manager, fetch.sequence_id, target.core.manager):
            self._move_to_decode(fetch.sequence_id, source, target)

    def _resume(self, command: AddSequence, target: Replica) -> None:
        """Continue a sequence that another core has forgotten."""
        output = self._registry.output(command.sequence_id)
        assert output is not None, "a sequence that has not ended is in the registry"
        output.sequence = target.core.resume(command)

    # -- fairness -----------------------------------------------------------------------------------------------------

    async def exchange_service(self) -> None:
        """Tell each manager what the others computed for each tenant. Other work is done between any two managers."""
        exchange, cores = self._service_exchange, self.cores
        exchange.begin([core.manager for core in cores])
        for core in cores:
            exchange.collect(core.manager)
            await asyncio.sleep(0)
        for core in cores:
            command = exchange.command(core.manager)
            if command is not None:
                core.apply(command)
            await asyncio.sleep(0)


def _describe(fetch: Fetch, what: str) -> str:
    return (
        f"sequence {fetch.sequence_id} stays on replica {fetch.source_id} for now: the agent of replica "
        f"{fetch.target_id} {what}"
    )


def _max_length(command: AddSequence) -> int:
    return len(command.prompt_token_ids) + command.sampling.max_tokens


def _by_prompt(commands: Iterable[AddSequence]) -> Iterator[list[AddSequence]]:
    """Return the answers to each prompt, in order of the first one's arrival."""
    prompts: dict[int, list[AddSequence]] = {}
    for command in commands:
        leader_id = command.sequence_id if command.leader_id is None else command.leader_id
        prompts.setdefault(leader_id, []).append(command)
    return iter(prompts.values())
