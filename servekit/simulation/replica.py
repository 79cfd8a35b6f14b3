"""Simulate one replica: a workload manager, a worker that executes its plans, and the clients of its sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from servekit.protocol.messages import StepPlan, StepResult
from servekit.scheduler.commands import (
    AddSequence,
    AnnounceBlocks,
    Commit,
    Expire,
    Finish,
    Operation,
    Outcome,
    Plan,
    Restart,
    Withdraw,
)
from servekit.scheduler.kv_connector import ReplicaRole
from servekit.scheduler.sequence import FinishReason, Sequence, Status
from servekit.scheduler.step import SequenceToken
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.kv_transfer import SimulatedReceiver, SimulatedRing, SimulatedSender
from servekit.simulation.promises import Promise, ServiceLag
from servekit.simulation.scenario import Client, Scenario
from servekit.simulation.shared_turns import SharedTurns
from servekit.simulation.worker import VOCAB_SIZE, SimulatedConnector, SimulatedWorker, Violation


class _Dispatched(Struct, frozen=True):
    """A step that the worker executes, or has before it."""

    done_s: float
    plan: StepPlan
    blocks_in_use: set[int]  # that it writes to or copies
    crashes: bool
    deferring: set[int]  # the slots whose tokens the worker defers
    drafts: dict[int, tuple[int, int]]  # by slot: how many the worker makes, and how many of them are right


class SimulatedReplica:
    """Plays one replica of a scenario. Every time is an argument, or the time until something happens."""

    def __init__(
        self,
        scenario: Scenario,
        manager: WorkloadManager,
        check: bool,
        watch_lag: bool,
        index: int = 0,
        turns: SharedTurns | None = None,
        rings: Collection[SimulatedRing] = (),
    ) -> None:
        """`turns` watches the replica of this index together with the others. `rings` are those of prefill replicas."""
        self.scenario = scenario
        self.manager = manager
        self._rings = list(rings)
        self._index = index
        self.worker = self._new_worker()
        self.clients: dict[int, Client] = {}  # whose sequences are here, by sequence id
        self.ready_s = 0.0  # when its worker is ready, if it is not
        self.result_faults: list[str] = []  # that happen to the next results
        self.lag = ServiceLag()
        self.num_steps = 0
        self.delay_s = 0.0  # of the next step
        self._check = check
        self._watch_lag = watch_lag
        self._in_flight: deque[_Dispatched] = deque()
        self._late_results: list[StepResult] = []
        self._promise = Promise(manager, self.lag if scenario.num_replicas == 1 else None)
        self._turns = turns

    def apply(self, command: Operation[Outcome]) -> Outcome:
        return self.manager.apply(command)

    @property
    def role(self) -> ReplicaRole:
        return self.manager.config.role

    @property
    def has_quarantine(self) -> bool:
        """Whether only suspects run here."""
        return bool(self.manager.quarantine)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def next_s(self) -> float:
        """When its next step is done; infinite if none is in flight."""
        return self._in_flight[0].done_s if self._in_flight else inf

    # -- steps --------------------------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> None:
        for sequence in self.apply(Expire(now_s)):
            client = self.clients.pop(sequence.sequence_id)
            if min(sequence.deadline_s, sequence.ttft_deadline_s) > now_s:
                raise Violation(f"{sequence} was ended before its deadline")
            self.check_end(client)

    def plan(self, now_s: float) -> None:
        """Dispatch all steps that can be planned."""
        manager, max_steps_in_flight = self.manager, self.scenario.scheduler.max_steps_in_flight
        while True:
            # Most calls find as many steps in flight as there may be. Then nothing is planned, and nothing to be noted.
            is_full = len(self._in_flight) >= max_steps_in_flight
            if self._check and not is_full:
                self._promise.before_plan(self.clients.values())
            if self._turns is not None and not is_full:
                self._turns.before_plan(self._index, self.clients.values())
            plan = self.apply(Plan(now_s))
            if plan is None:
                break
            if is_full:
                raise Violation(f"{plan} is planned with {len(self._in_flight)} steps in flight")
            if manager.waiting_queue.has_shares or self._watch_lag:
                self.lag.observe(plan, self.clients.values())
            if self._turns is not None:
                self._turns.after_plan(self._index, plan, self.clients.values())
            blocks_in_use: set[int] = set()
            if self._check:
                manager.check()
                self._promise.after_plan(plan, now_s, self.clients.values())
                blocks_in_use = self._blocks_in_use(plan)
            started_s = max(now_s, self._in_flight[-1].done_s if self._in_flight else now_s)
            duration_s = self.scenario.step_base_s + self.scenario.step_token_s * plan.num_tokens
            duration_s += self.scenario.drafting_s * max((chunk.num_drafts for chunk in plan.chunks), default=0)
            done_s = started_s + duration_s + self.delay_s
            self._in_flight.append(
                _Dispatched(done_s, plan, blocks_in_use, self._crashes(plan), self._deferring(plan), self._drafts(plan))
            )
            self.delay_s = 0.0
        if not self._in_flight and self.clients:
            alive = [client.sequence for client in self.clients.values()]
            raise Violation(f"nothing is in flight, but these are alive: {alive}")

    def execute(self, now_s: float) -> str | None:
        """Execute the first step in flight, and commit its result. Returns kill or memory if that was the worker's end.

        The caller restarts the replica then.
        """
        step = self._in_flight.popleft()
        self.num_steps += 1
        if step.crashes:
            return "kill"
        if "memory" in self.result_faults:
            self.result_faults.remove("memory")
            return "memory"
        return self._deliver(self.worker.execute(step.plan, step.deferring, step.drafts), now_s)

    def execute_late(self) -> None:
        """Execute the first step in flight, but keep its result back until the worker is lost."""
        if self._in_flight:
            step = self._in_flight[0]
            self._late_results.append(self.worker.execute(step.plan, step.deferring, step.drafts))

    def restart(self, is_out_of_memory: bool = False) -> list[Client]:
        """Forget what the worker had. Returns the clients whose sequences crash workers; they have ended."""
        self._in_flight.clear()
        lost = self.apply(Restart(is_out_of_memory))
        if not is_out_of_memory:
            self._replace_worker()
        failed = []
        for sequence in lost:
            client = self.clients.pop(sequence.sequence_id)
            self.apply(Finish(sequence.sequence_id, FinishReason.ERROR))
            self.check_end(client)
            failed.append(client)
        return failed

    def _new_worker(self) -> SimulatedWorker:
        config, scenario = self.manager.config, self.scenario
        connector: SimulatedConnector | SimulatedSender | SimulatedReceiver | None = None
        if self.role is ReplicaRole.PREFILL:
            connector = SimulatedSender(self._rings[self._index])
        elif self.role is ReplicaRole.DECODE:
            connector = SimulatedReceiver(self._rings)
        elif config.has_kv_connector:
            connector = SimulatedConnector(scenario.num_offloaded_blocks)
        return SimulatedWorker(
            config.num_blocks, config.block_size, config.max_num_batched_tokens, scenario.drafting_s, connector
        )

    def _replace_worker(self) -> None:
        """Start another worker. If the connector is durable, the worker finds what the lost one stored."""
        connector, self.worker = self.worker.connector, self._new_worker()
        new = self.worker.connector
        if isinstance(new, SimulatedSender | SimulatedReceiver):
            self.apply(AnnounceBlocks(new.keys))
        elif isinstance(connector, SimulatedConnector) and self.scenario.is_connector_durable:
            self.worker.connector = connector
            self.apply(AnnounceBlocks(tuple(connector.pages)))

    def _crashes(self, plan: StepPlan) -> bool:
        """Whether the worker crashes in this step."""
        crashing = {
            client.sequence.slot: client.arrival.crashes_at
            for client in self.clients.values()
            if client.arrival.crashes_at is not None
        }
        return any(
            (position := crashing.get(chunk.slot)) is not None
            and chunk.start <= position < chunk.start + chunk.num_tokens
            for chunk in plan.chunks
        )

    def _deferring(self, plan: StepPlan) -> set[int]:
        """The slots whose tokens the worker defers in this step, as if by chance."""
        percents = {
            client.sequence.slot: client.arrival.deferred_percent
            for client in self.clients.values()
            if client.arrival.deferred_percent
        }
        return {
            chunk.slot for chunk in plan.chunks if hash((plan.step_id, chunk.slot)) % 100 < percents.get(chunk.slot, 0)
        }

    def _drafts(self, plan: StepPlan) -> dict[int, tuple[int, int]]:
        """How many drafts the worker makes for each slot, and how many of them are right, as if by chance."""
        drafters = {client.sequence.slot: client.arrival.drafter for client in self.clients.values()}
        return {
            chunk.slot: make_drafts(drafters[chunk.slot], chunk.num_drafts, plan.step_id, chunk.slot)
            for chunk in plan.chunks
            if chunk.num_drafts
        }

    def _deliver(self, result: StepResult, now_s: float) -> str | None:
        kind = self.result_faults.pop(0) if self.result_faults else None
        if kind == "reorder" and self._in_flight:
            self._late_results.append(result)
            return None
        if kind == "forge":  # results of an earlier worker and of an unknown step, with wrong tokens
            wrong = replace(result, token_ids=tuple((token_id + 1) % VOCAB_SIZE for token_id in result.token_ids))
            self._commit(replace(wrong, epoch=result.epoch - 1), now_s, is_stale=True)
            self._commit(replace(wrong, step_id=result.step_id + 7), now_s, is_stale=True)
        self._commit(result, now_s)
        if kind == "duplicate":
            self._commit(result, now_s, is_stale=True)
        if kind == "kill":
            return kind
        self.deliver_late_results(now_s)
        return None

    def damage(self, number: int) -> None:
        """Let the loads of some of the blocks fail that its KV connector keeps, if it has one."""
        if self.worker.connector is not None:
            self.worker.connector.damage(number)

    def deliver_late_results(self, now_s: float) -> None:
        while self._late_results:
            result = self._late_results.pop()
            self._commit(result, now_s, is_stale=result.epoch != self.manager.epoch)

    def _commit(self, result: StepResult, now_s: float, is_stale: bool = False) -> None:
        before = self.manager.num_stale_results
        tokens = self.apply(Commit(result, now_s))
        if is_stale and (tokens or self.manager.num_stale_results != before + 1):
            raise Violation(f"a stale result was applied: {result}")
        for token in tokens:
            client = self.clients.get(token.sequence.sequence_id)
            if client is None:
                raise Violation(f"a token for {token.sequence}, which has ended, or continues elsewhere")
            num_accepted = token.sequence.num_accepted_tokens
            if num_accepted > client.num_accepted_tokens:
                self.lag.accept(client.sequence.tenant, num_accepted - client.num_accepted_tokens)
                if self._turns is not None:
                    self._turns.accept(self._index, client.sequence.tenant, num_accepted - client.num_accepted_tokens)
                client.num_accepted_tokens = num_accepted
            client.received.append(token.token_id)
            client.token_times_s.append(now_s)
            if token.finish_reason is not None:
                del self.clients[token.sequence.sequence_id]
            if self._check:
                self._check_token(client, token)
        if self._check:
            self.manager.check()

    # -- sequences that move ------------------------------------------------------------------------------------------

    def withdraw(
        self, sequence_ids: tuple[int, ...] | None, is_hand_over: bool = False
    ) -> list[tuple[AddSequence, Client]]:
        """Forget sequences. Returns the commands that continue them, each with its client."""
        commands = self.apply(Withdraw(sequence_ids, is_hand_over))
        return [(command, self.clients.pop(command.sequence_id)) for command in commands]

    def resume(self, command: AddSequence, client: Client) -> None:
        """Continue a sequence of another replica."""
        client.sequence = self.apply(command)
        self.clients[command.sequence_id] = client
        if self._check:
            self.manager.check()

    # -- checks -------------------------------------------------------------------------------------------------------

    def check_end(self, client: Client) -> None:
        """Check what a client has received whose sequence has ended."""
        sequence, logprobs = client.sequence, client.sequence.prompt_logprobs
        if logprobs != client.expected_prompt_logprobs[: None if client.received else len(logprobs)]:
            raise Violation(f"{sequence} has {logprobs}, the reference says {client.expected_prompt_logprobs}")
        if sequence.status is not Status.FINISHED or sequence.output_token_ids != client.received:
            raise Violation(f"{sequence} ended with {sequence.output_token_ids}, its client got {client.received}")

    def check_idle(self) -> None:
        """Check that nothing is left when all sequences have ended."""
        if self.manager.has_work:
            raise Violation("the manager has work, but no client waits for any")
        pool = self.manager.kv_cache.pool
        if pool.num_available != pool.num_blocks:
            raise Violation(f"{pool.num_blocks - pool.num_available} blocks were leaked")

    def _blocks_in_use(self, plan: StepPlan) -> set[int]:
        """The blocks that a step writes to or copies. Raises Violation if it takes a block that another step uses.

        A worker that runs its steps in order never shows such a mistake, so no other check would find it.
        """
        sequences: dict[int | None, Sequence] = {each.sequence.slot: each.sequence for each in self.clients.values()}
        new_slots = {assignment.slot for assignment in plan.slot_assignments}
        block_size = self.scenario.scheduler.block_size
        drafts = self._drafts_in_flight()
        in_use = {source for source, _ in plan.copies}
        loaded = {block for _, block in plan.loads}
        in_use |= loaded
        taken: list[int] = []
        for chunk in plan.chunks:
            sequence = sequences[chunk.slot]
            last = (chunk.start + chunk.num_tokens - 1) // block_size
            may_begin_earlier = not chunk.token_ids and chunk.slot not in new_slots
            first = (chunk.start - (drafts.get(chunk.slot, 0) if may_begin_earlier else 0)) // block_size
            in_use.update(sequence.kv.table[first : last + 1])
            # The first blocks of a new slot assignment are shared, so another step may well use them.
            num_shared = sequence.kv.num_found if chunk.slot in new_slots else 0
            leased = chunk.new_block_ids[num_shared:]
            if sum(block not in loaded for block in leased) > -(-chunk.num_tokens // block_size) + 1:
                raise Violation(f"{len(leased)} blocks are taken for {chunk.num_tokens} tokens of {sequence}")
            taken += leased
        for step in self._in_flight:
            if not step.blocks_in_use.isdisjoint(taken):
                raise Violation(f"{plan} takes a block that a step in flight uses")
        return in_use

    def _drafts_in_flight(self) -> dict[int, int]:
        """How many drafts are in flight, by slot. If all are rejected, the slot's next chunk begins so much earlier."""
        drafts: dict[int, int] = {}
        for step in self._in_flight:
            for assignment in step.plan.slot_assignments:
                drafts.pop(assignment.slot, None)  # of the sequence that had the slot
            for chunk in step.plan.chunks:
                if chunk.num_drafts:
                    drafts[chunk.slot] = drafts.get(chunk.slot, 0) + chunk.num_drafts
        return drafts

    def _check_token(self, client: Client, token: SequenceToken) -> None:
        num_received, reason = len(client.received), token.finish_reason
        if client.received[-1] != client.expected[num_received - 1]:
            raise Violation(f"{client.sequence} got {client.received}, the reference says {client.expected}")
        if (reason is not None) != (num_received == len(client.expected)):
            raise Violation(f"{client.sequence} ended after {client.received}, the reference says {client.expected}")
        if token.logprobs != (client.expected_logprobs[num_received - 1] if client.expected_logprobs else None):
            raise Violation(f"{client.sequence} got {token}, the reference says {client.expected_logprobs}")
        if num_received == 1 and client.sequence.prompt_logprobs != client.expected_prompt_logprobs:
            raise Violation(f"{client.sequence} has its first token, but not all of its prompt logprobs")
        if reason is not None:
            self.check_end(client)


def make_drafts(drafter: str, num_planned: int, step_id: int, slot: int) -> tuple[int, int]:
    """How many drafts a drafter makes in a step, and how many of them are right before the first wrong one."""
    match drafter:
        case "right":
            return num_planned, num_planned
        case "wrong":
            return num_planned, 0
        case "alternates":
            return num_planned, num_planned * (step_id % 2)
        case "few":
            num_made = hash((slot, step_id)) % (num_planned + 1)
            return num_made, hash((step_id, slot)) % (num_made + 1)
        case _:
            return num_planned, hash((step_id, slot)) % (num_planned + 1)
