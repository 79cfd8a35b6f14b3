"""Simulate replicas behind a router in virtual time: the real workload managers, and conversations of several turns.

A `Fleet` is a value: the replicas, the conversations, and when replicas are lost and return. `FleetSimulation` plays it
with a routing policy, and records what each turn found in the prefix cache and how long it waited. Tokens are not
checked here; simulation/service.py does that. The first replicas may be for prefill: they hand sequences over.
"""

from __future__ import annotations

from array import array
from collections import deque
from heapq import heappop, heappush
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from servekit.protocol.messages import StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.routing.hand_over import find_hand_overs
from servekit.routing.router import Move, Route
from servekit.routing.service_exchange import ServiceExchange
from servekit.scheduler.commands import AddSequence, AnnounceBlocks
from servekit.scheduler.kv_connector import ReplicaRole
from servekit.scheduler.prefix_cache import continue_chain
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import FinishReason
from servekit.scheduler.workload_manager import WorkloadManager

ANSWER_TOKEN = 0  # every answer consists of it
REBALANCE_EVERY_S = EXCHANGE_EVERY_S = 0.25
MAX_MOVES = 8  # of one call of `rebalance`


class Turn(Struct, frozen=True):
    """What a client adds to a conversation, and how long the answer is."""

    token_ids: tuple[int, ...]
    num_output_tokens: int
    think_s: float = 0.0  # from the end of the answer before it


class Conversation(Struct, frozen=True):
    """The turns of one client. Each prompt consists of all that was said before and the turn's own tokens."""

    at_s: float
    tenant: str
    turns: tuple[Turn, ...]


class Outage(Struct, frozen=True):
    """A replica is lost: its sequences continue on others. It returns with an empty cache."""

    replica_id: int
    lost_s: float
    returns_s: float


class StepDuration(Protocol):
    """How long the steps of a replica take: a `SimulatedModel`, or a device's roofline."""

    def duration_s(self, plan: StepPlan) -> float: ...


class Fleet(Struct, frozen=True, kw_only=True):
    """Everything that a simulation depends on, but the policy."""

    scheduler: SchedulerConfig  # of each replica
    models: tuple[StepDuration, ...]  # one for each replica
    conversations: tuple[Conversation, ...]
    outages: tuple[Outage, ...] = ()
    num_prefill_replicas: int = 0  # the first ones; the policy sends prompts to them only
    transfer_s: float = 0.0  # for each block that a step sends or loads, beside what it computes


class RoutingPolicy(Protocol):
    """What `Router` does, and the policies that it is compared with."""

    def add_replica(self, replica_id: int, manager: WorkloadManager) -> None: ...

    def remove_replica(self, replica_id: int) -> None: ...

    def route(self, commands: list[AddSequence]) -> Route | None: ...

    def rebalance(self, max_moves: int) -> list[Move]: ...


class TurnRecord(Struct):
    """One turn, as its client saw it."""

    conversation: int  # its index
    turn: int
    asked_s: float
    replica_id: int  # that computed its prompt
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between tokens
    last_token_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.asked_s


class _Replica:
    def __init__(self, replica_id: int, config: SchedulerConfig, model: StepDuration) -> None:
        self.replica_id = replica_id
        self.manager = WorkloadManager(config)
        self.model = model
        self.in_flight: deque[tuple[float, StepPlan]] = deque()  # when each step is done


class FleetSimulation:
    """Plays one fleet with one policy. After `run`, `records` has every turn, in the order in which they were asked."""

    def __init__(self, fleet: Fleet, policy: RoutingPolicy) -> None:
        self.fleet = fleet
        self.policy = policy
        self.now_s = 0.0
        self.num_moves = 0
        self.num_handed_over = 0
        self.records: list[TurnRecord] = []
        self._replicas: dict[int, _Replica] = {}
        self._exchange = ServiceExchange()
        self._alive: dict[int, tuple[AddSequence, TurnRecord]] = {}
        # (when, order, what): the index of a conversation that asks its next turn, or a replica's id and its work.
        self._events: list[tuple[float, int, _Event]] = []
        self._num_events = 0
        self._num_turns = [0] * len(fleet.conversations)  # that were asked
        self._histories: dict[int, array[int]] = {}  # of conversations between two turns

    def run(self) -> None:
        """Play until every answer has ended."""
        for replica_id in range(len(self.fleet.models)):
            self._join(replica_id)
        for index, conversation in enumerate(self.fleet.conversations):
            self._schedule(conversation.at_s, _Asks(index))
        for outage in self.fleet.outages:
            self._schedule(outage.lost_s, _Loses(outage.replica_id))
            self._schedule(outage.returns_s, _Joins(outage.replica_id))
        num_left = sum(len(conversation.turns) for conversation in self.fleet.conversations)
        self._schedule(REBALANCE_EVERY_S, _Rebalances())
        self._schedule(EXCHANGE_EVERY_S, _Exchanges())
        while num_left:
            self.now_s, _, event = heappop(self._events)
            match event:
                case _Asks():
                    self._ask(event.conversation)
                case _Steps():
                    num_left -= self._finish_step(event.replica)
                case _Loses():
                    self._lose(event.replica_id)
                case _Joins():
                    self._join(event.replica_id)
                case _Exchanges():
                    self._exchange_service()
                    self._schedule(self.now_s + EXCHANGE_EVERY_S, event)
                case _:
                    self._rebalance()
                    self._schedule(self.now_s + REBALANCE_EVERY_S, event)

    def _schedule(self, at_s: float, event: _Event) -> None:
        self._num_events += 1
        heappush(self._events, (at_s, self._num_events, event))

    # -- clients ------------------------------------------------------------------------------------------------------

    def _ask(self, index: int) -> None:
        conversation = self.fleet.conversations[index]
        number = self._num_turns[index]
        self._num_turns[index] += 1
        turn = conversation.turns[number]
        prompt = self._histories.pop(index, array("i")) + array("i", turn.token_ids)
        block_size = self.fleet.scheduler.block_size
        hashes: list[bytes] = []
        continue_chain(hashes, conversation.tenant, prompt, len(prompt) // block_size, block_size)
        command = AddSequence(
            sequence_id=len(self.records),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=turn.num_output_tokens, ignore_eos=True),
            arrival_s=self.now_s,
            tenant=conversation.tenant,
            has_length_bound=False,
            block_hashes=hashes,
        )
        record = TurnRecord(index, number, self.now_s, -1, len(prompt))
        self.records.append(record)
        self._add(command, record)

    def _add(self, command: AddSequence, record: TurnRecord) -> None:
        route = self.policy.route([command])
        assert route is not None, "one replica is always there"
        self._add_to(self._replicas[route.replica_id], command, record)

    def _add_to(self, replica: _Replica, command: AddSequence, record: TurnRecord) -> None:
        self._alive[command.sequence_id] = command, record
        if not record.first_token_s:
            record.replica_id = replica.replica_id
        replica.manager.apply(command)
        self._plan(replica)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _plan(self, replica: _Replica) -> None:
        while (plan := replica.manager.plan(self.now_s)) is not None:
            begins_s = max(self.now_s, replica.in_flight[-1][0]) if replica.in_flight else self.now_s
            transfers_s = self.fleet.transfer_s * (len(plan.sends) + len(plan.loads))
            replica.in_flight.append((begins_s + replica.model.duration_s(plan) + transfers_s, plan))
            if len(replica.in_flight) == 1:
                self._schedule(replica.in_flight[0][0], _Steps(replica))

    def _finish_step(self, replica: _Replica) -> int:
        """Commit the step that is done; return how many answers end with it."""
        if self._replicas.get(replica.replica_id) is not replica:
            return 0  # it was lost meanwhile
        _, plan = replica.in_flight.popleft()
        num_sampled = sum(chunk.samples for chunk in plan.chunks)
        result = StepResult(plan.epoch, plan.step_id, (ANSWER_TOKEN,) * num_sampled, 0.0)
        num_ended = 0
        for token in replica.manager.commit(result, self.now_s):
            sequence = token.sequence
            record = self._alive[sequence.sequence_id][1]
            if record.last_token_s:
                record.gaps_s.append(self.now_s - record.last_token_s)
            record.last_token_s = self.now_s
            if not sequence.num_output_tokens > 1 or token.finish_reason is not None:
                if not record.first_token_s:
                    record.first_token_s = self.now_s
                    record.num_cached_tokens = sequence.num_cached_tokens or 0
                if token.finish_reason is not None:
                    record.ended_s = self.now_s
                    num_ended += 1
                    self._end(record, sequence.token_ids[:])
                    del self._alive[sequence.sequence_id]
        if replica.in_flight:
            self._schedule(replica.in_flight[0][0], _Steps(replica))
        if replica.manager.kv_connector.sends:
            self._hand_over(replica)
        self._plan(replica)
        return num_ended

    def _hand_over(self, source: _Replica) -> None:
        targets = {
            replica_id: replica.manager
            for replica_id, replica in self._replicas.items()
            if replica.manager.config.role is ReplicaRole.DECODE
        }
        for hand_over in find_hand_overs(source.manager, targets):
            target = self._replicas[hand_over.target_id]
            target.manager.apply(AnnounceBlocks(hand_over.keys))
            (command,) = source.manager.withdraw((hand_over.sequence_id,), is_hand_over=True)
            self._add_to(target, command, self._alive[hand_over.sequence_id][1])
            self.num_handed_over += 1

    def _end(self, record: TurnRecord, history: array[int]) -> None:
        turns = self.fleet.conversations[record.conversation].turns
        if record.turn + 1 < len(turns):
            self._histories[record.conversation] = history
            self._schedule(self.now_s + turns[record.turn + 1].think_s, _Asks(record.conversation))

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _join(self, replica_id: int) -> None:
        config, num_prefill = self.fleet.scheduler, self.fleet.num_prefill_replicas
        if num_prefill:
            role = ReplicaRole.PREFILL if replica_id < num_prefill else ReplicaRole.DECODE
            config = replace(config, has_kv_connector=True, role=role)
        replica = _Replica(replica_id, config, self.fleet.models[replica_id])
        self._replicas[replica_id] = replica
        self.policy.add_replica(replica_id, replica.manager)

    def _lose(self, replica_id: int) -> None:
        """Lose a replica; its sequences go on elsewhere from their tokens, in order of arrival."""
        manager = self._replicas.pop(replica_id).manager
        self.policy.remove_replica(replica_id)
        for sequence_id in sorted(self._alive):
            sequence = manager.find(sequence_id)
            if sequence is not None:
                command, record = self._alive[sequence_id]
                sampling = replace(command.sampling, max_tokens=sequence.max_length - sequence.num_tokens)
                command = replace(command, prompt_token_ids=sequence.token_ids[:], sampling=sampling, progress=None)
                self._add(command, record)

    def _rebalance(self) -> None:
        for move in self.policy.rebalance(MAX_MOVES):
            source = self._replicas[move.source_id]
            for sequence_id in move.sequence_ids:
                source.manager.finish(sequence_id, FinishReason.ABORT)
                self._add_to(self._replicas[move.target_id], *self._alive[sequence_id])
                self.num_moves += 1

    def _exchange_service(self) -> None:
        managers = [replica.manager for replica in self._replicas.values()]
        for manager, command in zip(managers, self._exchange.commands(managers), strict=True):
            if command is not None:
                manager.apply(command)


class _Asks(Struct, frozen=True):
    conversation: int


class _Steps(Struct, frozen=True):
    replica: _Replica


class _Loses(Struct, frozen=True):
    replica_id: int


class _Joins(Struct, frozen=True):
    replica_id: int


class _Rebalances(Struct, frozen=True):
    pass


class _Exchanges(Struct, frozen=True):
    pass


_Event = _Asks | _Steps | _Loses | _Joins | _Rebalances | _Exchanges
