"""Simulate a whole service in virtual time: the real workload managers, simulated workers, clients and faults.

A `Scenario` is a value: the manager's configuration, all arrivals and all faults with their times. `Simulation` plays
it, deterministically, and raises a `Violation` as soon as an invariant does not hold. After every step it checks the
manager's own invariants, the policy's promise, and every token against a reference that serves one prompt at a time; at
the end it checks that every sequence was served. A failing scenario can be shrunk, saved and played again.

With several replicas, sequences move from one to another: when a worker is lost, when a replica leaves, and at random.
Where some of them are prefill replicas, these hand sequences over to the others.

It is part of the product and not of the tests, because it also answers what another policy or size would do.

The design is that of FoundationDB's and TigerBeetle's simulators: one thread, one seed, all nondeterminism injected.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection
from math import inf

from msgspec.structs import replace

from servekit.protocol.sampling_params import SamplingParams
from servekit.routing.hand_over import MAX_RECOMPUTED_BLOCKS, find_hand_overs
from servekit.routing.service_exchange import ServiceExchange
from servekit.scheduler.commands import AddSequence, AnnounceBlocks, Finish
from servekit.scheduler.crash_quarantine import CRASHES_TO_FAIL
from servekit.scheduler.draft_length import DraftLengths
from servekit.scheduler.kv_connector import ReplicaRole
from servekit.scheduler.output_length import OutputLengthPredictor
from servekit.scheduler.prefix_cache import continue_chain
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import NEVER, FinishReason, Sequence
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.kv_transfer import SimulatedRing
from servekit.simulation.promises import ServiceLag
from servekit.simulation.replica import SimulatedReplica
from servekit.simulation.scenario import Arrival, Client, Fault, Scenario
from servekit.simulation.shared_turns import SharedTurns
from servekit.simulation.worker import NaiveReference, Violation


class Simulation:
    """Plays one scenario. After `run`, `clients` holds what each client received, and when."""

    def __init__(
        self,
        scenario: Scenario,
        check: bool = True,
        watch_lag: bool = False,
        make_manager: Callable[[SchedulerConfig, OutputLengthPredictor], WorkloadManager] = WorkloadManager,
    ) -> None:
        self.scenario = scenario
        self.now_s = 0.0
        self.clients: dict[int, Client] = {}
        make_predictor = RecklessPredictor if scenario.is_reckless else OutputLengthPredictor
        self._managers = [
            make_manager(config, make_predictor(config.block_size)) for config in replica_configs(scenario)
        ]
        rings = [SimulatedRing(scenario.num_transfer_blocks) for _ in range(scenario.num_prefill_replicas)]
        if scenario.has_eager_drafts:
            for manager in self._managers:
                manager.draft_lengths = EagerDraftLengths(scenario.scheduler.max_drafts)
        has_shared_turns = check and scenario.num_replicas > 1 and scenario.scheduler.scheduling_policy == "fair"
        self.turns = SharedTurns(self._managers) if has_shared_turns else None
        self.replicas = [
            SimulatedReplica(scenario, manager, check, watch_lag, index, self.turns, rings)
            for index, manager in enumerate(self._managers)
        ]
        self._exchange = ServiceExchange()
        self._next_exchange_s = 0.0
        self._check = check
        self._has_random_crashes = any(fault.kind in ("kill", "memory") for fault in scenario.faults)
        self._reference = NaiveReference(scenario.scheduler.eos_token_ids)
        events: list[Arrival | Fault] = [*scenario.arrivals, *scenario.faults]
        self._events = deque(sorted(events, key=lambda event: event.at_s))
        self.num_failed = 0  # sequences, over which workers crash
        self.num_suspects = 0  # sequences that were in quarantine after a crash, each one once for each crash
        self.num_moved = 0  # times that a sequence went on elsewhere
        self.num_handed_over = 0  # times that a decode replica went on with a sequence
        self.num_losses = 0  # of workers
        num_deadly = sum(arrival.crashes_at is not None for arrival in scenario.arrivals)
        # A move may forgive a crash: what a withdrawn sequence has in flight is not held against it.
        self._max_losses = 2 * (CRASHES_TO_FAIL * num_deadly + len(scenario.faults))

    # -- the first replica, which is the only one in most scenarios ---------------------------------------------------

    @property
    def manager(self) -> WorkloadManager:
        return self.replicas[0].manager

    @property
    def lag(self) -> ServiceLag:
        return self.replicas[0].lag

    @property
    def num_steps(self) -> int:
        return sum(replica.num_steps for replica in self.replicas)

    def run(self) -> None:
        """Play the scenario to its end. Raises Violation, or the AssertionError of the manager's own checks."""
        max_steps, max_total_tokens = self._max_steps(), self.scenario.scheduler.max_total_tokens
        while self._events or any(replica.clients or replica.num_in_flight for replica in self.replicas):
            for replica in self.replicas:
                replica.expire(self.now_s)
                if self._is_ready(replica):
                    replica.plan(self.now_s)
            self._wait()
            self._exchange_service()
            num_failed_loads = sum(manager.kv_connector.num_failed_loads for manager in self._managers)
            num_again = num_failed_loads * max_total_tokens
            num_again += self.num_handed_over * self.scenario.scheduler.block_size * (1 + MAX_RECOMPUTED_BLOCKS)
            if self.num_steps > max_steps + num_again:
                alive = [client for replica in self.replicas for client in replica.clients.values()]
                raise Violation(f"no end after {self.num_steps} steps; alive: {alive}")
        for replica in self.replicas:
            replica.check_idle()

    def _max_steps(self) -> int:
        """More steps than any schedule needs: a simulation that exceeds them makes no progress."""
        config = self.scenario.scheduler
        num_setbacks = sum(fault.kind in ("kill", "memory", "leave", "move") for fault in self.scenario.faults)
        num_setbacks += sum(CRASHES_TO_FAIL for arrival in self.scenario.arrivals if arrival.crashes_at is not None)
        num_tokens = sum(len(arrival.prompt) + arrival.max_tokens for arrival in self.scenario.arrivals)
        num_tries = sum(20 * arrival.max_tokens for arrival in self.scenario.arrivals if arrival.deferred_percent)
        return 100 + num_tokens * (2 + config.max_preemptions + num_setbacks) + num_tries

    # -- one iteration of the loop -----------------------------------------------------------------------------------

    def _is_ready(self, replica: SimulatedReplica) -> bool:
        return replica.ready_s <= self.now_s

    def _wait(self) -> None:
        """Advance the clock to the next event, and handle it."""
        first = min(self.replicas, key=lambda replica: replica.next_s)
        recovering = min(
            (replica for replica in self.replicas if not self._is_ready(replica)),
            key=lambda replica: replica.ready_s,
            default=None,
        )
        event_s = self._events[0].at_s if self._events else NEVER
        if recovering is not None and recovering.ready_s < min(event_s, first.next_s):
            self.now_s = recovering.ready_s
            self._recovered(recovering)
        elif first.next_s < event_s:
            self.now_s = max(self.now_s, first.next_s)
            end = first.execute(self.now_s)
            if end is not None:
                self._restart(first, is_out_of_memory=end == "memory")
                first.deliver_late_results(self.now_s)
            self._hand_over(first)
        elif self._events:
            event = self._events.popleft()
            self.now_s = max(self.now_s, event.at_s)
            if isinstance(event, Arrival):
                self._arrive(event)
            else:
                self._inject(event)

    def _exchange_service(self) -> None:
        """Tell the replicas what the others computed for each tenant, if it is time."""
        if len(self.replicas) == 1 or self.now_s < self._next_exchange_s:
            return
        self._next_exchange_s = self.now_s + self.scenario.exchange_interval_s
        for replica, command in zip(self.replicas, self._exchange.commands(self._managers), strict=True):
            if command is not None:
                replica.apply(command)
        if self.turns is not None:
            self.turns.exchanged()

    def _arrive(self, arrival: Arrival) -> None:
        sampling = SamplingParams(
            max_tokens=arrival.max_tokens,
            ignore_eos=arrival.ignore_eos,
            logprobs=arrival.logprobs,
            prompt_logprobs=arrival.prompt_logprobs,
        )
        leader = self.clients.get(arrival.forks) if arrival.forks is not None else None
        hashes: list[bytes] = []
        config = self.manager.config
        # The manager does the same with and without hashes.
        if config.enable_prefix_caching and leader is None and len(self.clients) % 2:
            num_blocks = len(arrival.prompt) // config.block_size
            continue_chain(hashes, arrival.tenant, array("i", arrival.prompt), num_blocks, config.block_size)
        add = AddSequence(
            sequence_id=len(self.clients),
            prompt_token_ids=arrival.prompt,
            sampling=sampling,
            arrival_s=self.now_s,
            tenant=arrival.tenant,
            priority=arrival.priority,
            ttft_deadline_s=NEVER if arrival.ttft_s is None else self.now_s + arrival.ttft_s,
            deadline_s=NEVER if arrival.deadline_s is None else self.now_s + arrival.deadline_s,
            leader_id=leader.sequence.sequence_id if leader is not None else None,
            has_length_bound=arrival.has_length_bound,
            block_hashes=hashes,
            max_drafts=arrival.max_drafts,
        )
        replica = self._replica_of(leader) if leader is not None else None
        replica = replica or self._choose(arrival.name)
        sequence = replica.apply(add)
        client = Client(arrival, sequence, self._reference.output(arrival.prompt, sampling) if self._check else [])
        self.clients[arrival.name] = replica.clients[sequence.sequence_id] = client

    def _replica_of(self, client: Client) -> SimulatedReplica | None:
        """Return the replica that has a client's sequence; None if that has ended."""
        sequence_id = client.sequence.sequence_id
        return next((replica for replica in self.replicas if sequence_id in replica.clients), None)

    def _choose(self, number: int, but: SimulatedReplica | None = None) -> SimulatedReplica:
        """Choose a replica pseudo-randomly: one that is ready and has no quarantine, if there is one."""
        others = [replica for replica in self.replicas if replica is not but] or self.replicas
        ready = [replica for replica in others if self._is_ready(replica)]
        serving = [replica for replica in ready if not replica.has_quarantine]
        # Prompts are for prefill replicas. Some go to others, as when none of these was ready.
        for_prompts = [replica for replica in serving if replica.role is not ReplicaRole.DECODE]
        if number % 16 != 15 and for_prompts:
            serving = for_prompts
        candidates = serving or ready or others
        return candidates[hash((number, len(candidates))) % len(candidates)]

    # -- faults -------------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        replica = self.replicas[fault.target // 6 % len(self.replicas)]
        if fault.kind == "abort":
            client = self.clients.get(fault.target)
            if client is not None:
                self._abort(client)
        elif fault.kind == "kill" and replica.num_in_flight and fault.target % 3 == 0:
            replica.result_faults.append("kill")  # between a result and the plan that would follow it
        elif fault.kind == "kill":
            if self._is_ready(replica):
                # In half of the cases the first step in flight was executed, and its result comes late.
                if fault.target % 2:
                    replica.execute_late()
                self._restart(replica)
        elif fault.kind == "leave":
            self._leave(replica)
        elif fault.kind == "move":
            ids = sorted(replica.clients)
            self._move(replica, tuple(each for each in ids if hash((each, fault.target)) % 2))
        elif fault.kind == "damage":
            replica.damage(fault.target)
        elif fault.kind == "delay":
            replica.delay_s = 50 * self.scenario.step_base_s
        else:
            replica.result_faults.append(fault.kind)

    def _abort(self, client: Client) -> None:
        """End a client's sequence: in its replica it was alive, and in every other one it was not."""
        sequence_id = client.sequence.sequence_id
        for replica in self.replicas:
            was_alive = replica.clients.pop(sequence_id, None) is not None
            if replica.apply(Finish(sequence_id, FinishReason.ABORT)) != was_alive:
                raise Violation(f"{client.sequence}: the manager and its client disagree on whether it had ended")

    def _restart(self, replica: SimulatedReplica, is_out_of_memory: bool = False) -> None:
        """Restart a replica whose worker was lost, or ran out of memory in a step."""
        for client in replica.restart(is_out_of_memory):
            self.num_failed += 1
            # With random crashes, a sequence that runs alone may be hit several times in a row by chance.
            if client.arrival.crashes_at is None and not self._has_random_crashes:
                raise Violation(f"{client.sequence} failed, but does not crash workers")
        self.num_suspects += len(replica.manager.quarantine)
        if not is_out_of_memory:
            self.num_losses += 1
            if self.num_losses > self._max_losses:
                raise Violation(f"workers crash again and again: {self.num_losses} times until now")
            replica.ready_s = self.now_s + self.scenario.recovery_s
            self._fail_over(replica)

    def _fail_over(self, replica: SimulatedReplica) -> None:
        """Move the sequences of a replica without a worker to others. Suspects stay, or join the suspects of another.

        So a suspect crashes the worker of one replica at a time.
        """
        if self._is_ready(replica) or len(self.replicas) == 1:
            return
        suspects = set(replica.manager.quarantine.sequence_ids)
        if any(self._is_ready(other) and not other.has_quarantine for other in self.replicas):
            self._move(replica, tuple(replica.clients.keys() - suspects))
        isolating = next((each for each in self.replicas if each is not replica and each.has_quarantine), None)
        if suspects and isolating is not None:
            self._move(replica, tuple(suspects), isolating)

    def _leave(self, replica: SimulatedReplica) -> None:
        """Let a replica leave although its worker runs. It is ready again after `recovery_s`."""
        if len(self.replicas) > 1 and self._is_ready(replica):
            self._move(replica, None)
            replica.ready_s = self.now_s + self.scenario.recovery_s

    def _recovered(self, replica: SimulatedReplica) -> None:
        """Move what waits at replicas without a worker to one that is ready again, except suspects."""
        if not replica.has_quarantine:
            for other in self.replicas:
                if not self._is_ready(other):
                    suspects = other.manager.quarantine.sequence_ids
                    self._move(other, tuple(other.clients.keys() - suspects), replica)

    def _move(
        self, source: SimulatedReplica, sequence_ids: tuple[int, ...] | None, target: SimulatedReplica | None = None
    ) -> None:
        """Move sequences from one replica to another, or to several."""
        if len(self.replicas) == 1:
            return
        last_id = -1
        for command, client in source.withdraw(sequence_ids):
            if command.sequence_id <= last_id:
                raise Violation(f"{client.sequence} is out of order of arrival")
            last_id = command.sequence_id
            leader_id = command.sequence_id if command.leader_id is None else command.leader_id
            (target or self._choose(leader_id, but=source)).resume(command, client)
            self.num_moved += 1

    def _hand_over(self, source: SimulatedReplica) -> None:
        """Let decode replicas go on with the sequences of a prefill replica that have tokens."""
        if source.role is not ReplicaRole.PREFILL:
            return
        targets = {
            index: replica.manager
            for index, replica in enumerate(self.replicas)
            if replica.role is ReplicaRole.DECODE and self._is_ready(replica) and not replica.has_quarantine
        }
        for hand_over in find_hand_overs(source.manager, targets):
            target = self.replicas[hand_over.target_id]
            if hand_over.keys:
                target.apply(AnnounceBlocks(hand_over.keys))
            for command, client in source.withdraw((hand_over.sequence_id,), is_hand_over=True):
                target.resume(command, client)
                self.num_handed_over += 1


def replica_configs(scenario: Scenario) -> list[SchedulerConfig]:
    """Return the configuration of each replica's manager."""
    scheduler, num_prefill = scenario.scheduler, scenario.num_prefill_replicas
    if not num_prefill:
        return [scheduler] * scenario.num_replicas
    roles = [ReplicaRole.PREFILL] * num_prefill + [ReplicaRole.DECODE] * (scenario.num_replicas - num_prefill)
    return [replace(scheduler, has_kv_connector=True, role=role) for role in roles]


class EagerDraftLengths(DraftLengths):
    """Chooses as many drafts as a sequence may have, in each step. The real one stops where they are wrong."""

    def choose(
        self,
        sequences: Collection[Sequence],
        step_id: int,
        position_s: float,
        num_prefill_tokens: int = 0,
        mean_answer_tokens: float = inf,
    ) -> list[int]:
        self.num_paying = len(sequences)  # so the results of long steps are awaited, as with the real one
        return [sequence.max_drafts for sequence in sequences]


class RecklessPredictor(OutputLengthPredictor):
    """Predicts no output where lengths are not bounded. The real one is so good that tiny pools rarely preempt."""

    def tokens_to_come(self, sequence: Sequence) -> int:
        return super().tokens_to_come(sequence) if sequence.has_length_bound else 0
