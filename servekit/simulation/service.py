"""Simulate a whole service in virtual time: the real workload manager, a simulated worker, clients and faults.

A `Scenario` is a value: the manager's configuration, all arrivals and all faults with their times. `Simulation` plays
it, deterministically, and raises a `Violation` as soon as an invariant does not hold. After every step it checks the
manager's own invariants, the policy's promise, and every token against a reference that serves one prompt at a time; at
the end it checks that every sequence was served. A failing scenario can be shrunk, saved and played again.

It is part of the product and not of the tests, because it also answers what another policy or size would do.

The design is that of FoundationDB's and TigerBeetle's simulators: one thread, one seed, all nondeterminism injected.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import combinations

from msgspec import Struct
from msgspec.structs import replace

from servekit.protocol.messages import StepPlan, StepResult, TokenLogprobs
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence, Commit, Expire, Finish, Plan, Restart
from servekit.scheduler.crash_quarantine import CRASHES_TO_FAIL
from servekit.scheduler.output_length import OutputLengthPredictor
from servekit.scheduler.policy import Fair, Shortest
from servekit.scheduler.prefix_cache import continue_chain
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import NEVER, FinishReason, Sequence, Status
from servekit.scheduler.step import SequenceToken
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.worker import VOCAB_SIZE, NaiveReference, SimulatedWorker, Violation

# -- the world --------------------------------------------------------------------------------------------------------


class Arrival(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request for one answer."""

    name: int
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False
    has_length_bound: bool = True
    tenant: str = ""
    priority: int = 0
    ttft_s: float | None = None
    deadline_s: float | None = None
    forks: int | None = None  # the name of the arrival with the same prompt that this one is forked from
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    crashes_at: int | None = None  # a worker that computes this position crashes
    deferred_percent: int = 0  # of the steps that would sample a token for it, how many defer the token


class Fault(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault, and when it happens."""

    at_s: float
    kind: str  # abort | duplicate | forge | reorder | delay | kill | memory
    target: int = 0  # of an abort: the arrival's name


class Scenario(Struct, frozen=True, kw_only=True):
    """Everything that a simulation depends on."""

    scheduler: SchedulerConfig
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...] = ()
    is_reckless: bool = False  # the manager predicts no output at all where the client does not bound it
    step_base_s: float = 1e-3
    step_token_s: float = 1e-4


class Client:
    """An arrival, what it has received, and what it should receive."""

    __slots__ = (
        "arrival",
        "expected",
        "expected_logprobs",
        "expected_prompt_logprobs",
        "received",
        "sequence",
        "token_times_s",
    )

    def __init__(self, arrival: Arrival, sequence: Sequence, expected: list[int]) -> None:
        self.arrival = arrival
        self.sequence = sequence
        self.expected = expected
        self.expected_logprobs: list[TokenLogprobs] = []
        self.expected_prompt_logprobs: list[TokenLogprobs] = []
        if arrival.logprobs is not None:
            logprobs = NaiveReference.logprobs([*arrival.prompt, *expected], arrival.logprobs)
            self.expected_logprobs = logprobs[len(arrival.prompt) - 1 :]
        if arrival.prompt_logprobs is not None:
            self.expected_prompt_logprobs = NaiveReference.logprobs(arrival.prompt, arrival.prompt_logprobs)
        self.received: list[int] = []
        self.token_times_s: list[float] = []


class _Dispatched(Struct, frozen=True):
    """A step that the worker executes, or has before it."""

    done_s: float
    plan: StepPlan
    blocks_in_use: set[int]  # that it writes to or copies
    crashes: bool
    deferring: set[int]  # the slots whose tokens the worker defers


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
        self.num_steps = 0
        self.clients: dict[int, Client] = {}
        make_predictor = RecklessPredictor if scenario.is_reckless else OutputLengthPredictor
        self.manager = make_manager(scenario.scheduler, make_predictor(scenario.scheduler.block_size))
        self.worker = self._new_worker()
        self._check = check
        self._has_random_crashes = any(fault.kind in ("kill", "memory") for fault in scenario.faults)
        self._watch_lag = watch_lag
        self._reference = NaiveReference(scenario.scheduler.eos_token_ids)
        events: list[Arrival | Fault] = [*scenario.arrivals, *scenario.faults]
        self._events = deque(sorted(events, key=lambda event: event.at_s))
        self._alive: dict[int, Client] = {}  # by sequence_id
        self._in_flight: deque[_Dispatched] = deque()
        self.num_failed = 0  # sequences, over which workers crash
        self.num_suspects = 0  # sequences that were in quarantine after a crash, each one once for each crash
        self._late_results: list[StepResult] = []
        self._result_faults: list[str] = []  # that happen to the next results
        self._delay_s = 0.0  # of the next step
        self.lag = ServiceLag()
        self._promise = _Promise(self.manager, self.lag)

    def run(self) -> None:
        """Play the scenario to its end. Raises Violation, or the AssertionError of the manager's own checks."""
        max_steps = self._max_steps()
        while self._events or self._alive or self._in_flight:
            self._plan()
            self._wait()
            if self.num_steps > max_steps:
                raise Violation(f"no end after {self.num_steps} steps; alive: {list(self._alive.values())}")
        if self.manager.has_work:
            raise Violation("the manager has work, but no client waits for any")
        pool = self.manager.kv_cache.pool
        if pool.num_available != pool.num_blocks:
            raise Violation(f"{pool.num_blocks - pool.num_available} blocks were leaked")

    def _max_steps(self) -> int:
        """More steps than any schedule needs: a simulation that exceeds them makes no progress."""
        config = self.scenario.scheduler
        num_kills = sum(fault.kind in ("kill", "memory") for fault in self.scenario.faults)
        num_kills += sum(CRASHES_TO_FAIL for arrival in self.scenario.arrivals if arrival.crashes_at is not None)
        num_tokens = sum(len(arrival.prompt) + arrival.max_tokens for arrival in self.scenario.arrivals)
        num_tries = sum(20 * arrival.max_tokens for arrival in self.scenario.arrivals if arrival.deferred_percent)
        return 100 + num_tokens * (2 + config.max_preemptions + num_kills) + num_tries

    # -- one iteration of the loop -----------------------------------------------------------------------------------

    def _plan(self) -> None:
        manager, now = self.manager, self.now_s
        for sequence in manager.apply(Expire(now)):
            client = self._alive.pop(sequence.sequence_id)
            if min(sequence.deadline_s, sequence.ttft_deadline_s) > now:
                raise Violation(f"{sequence} was ended before its deadline")
            self._check_end(client)
        while True:
            if self._check:
                self._promise.before_plan(self._alive.values())
            plan = manager.apply(Plan(now))
            if plan is None:
                break
            if manager.waiting_queue.has_shares or self._watch_lag:
                self.lag.observe(plan, self._alive.values())
            blocks_in_use: set[int] = set()
            if self._check:
                manager.check()
                self._promise.after_plan(plan, now, self._alive.values())
                blocks_in_use = self._blocks_in_use(plan)
            started_s = max(now, self._in_flight[-1].done_s if self._in_flight else now)
            duration_s = self.scenario.step_base_s + self.scenario.step_token_s * plan.num_tokens
            done_s = started_s + duration_s + self._delay_s
            self._in_flight.append(_Dispatched(done_s, plan, blocks_in_use, self._crashes(plan), self._deferring(plan)))
            self._delay_s = 0.0
        if not self._in_flight and self._alive:
            alive = [client.sequence for client in self._alive.values()]
            raise Violation(f"nothing is in flight, but these are alive: {alive}")

    def _wait(self) -> None:
        """Advance the clock to the next event, and handle it."""
        if self._in_flight and (not self._events or self._in_flight[0].done_s < self._events[0].at_s):
            step = self._in_flight.popleft()
            self.now_s = max(self.now_s, step.done_s)
            if step.crashes:
                self.num_steps += 1
                self._lose_worker()
            elif "memory" in self._result_faults:
                self._result_faults.remove("memory")
                self.num_steps += 1
                self._restart(is_out_of_memory=True)
            else:
                self._deliver(self.worker.execute(step.plan, step.deferring))
        elif self._events:
            event = self._events.popleft()
            self.now_s = max(self.now_s, event.at_s)
            if isinstance(event, Arrival):
                self._arrive(event)
            else:
                self._inject(event)

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
        )
        sequence = self.manager.apply(add)
        client = Client(arrival, sequence, self._reference.output(arrival.prompt, sampling) if self._check else [])
        self.clients[arrival.name] = self._alive[sequence.sequence_id] = client

    # -- faults -------------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        if fault.kind == "abort":
            client = self.clients.get(fault.target)
            if client is not None:
                was_alive = client.sequence.sequence_id in self._alive
                if self.manager.apply(Finish(client.sequence.sequence_id, FinishReason.ABORT)) != was_alive:
                    raise Violation(f"{client.sequence}: the manager and its client disagree on whether it had ended")
                self._alive.pop(client.sequence.sequence_id, None)
        elif fault.kind == "kill" and self._in_flight and fault.target % 3 == 0:
            self._result_faults.append("kill")  # between a result and the plan that would follow it
        elif fault.kind == "kill":
            # In half of the cases the first step in flight was executed, and its result comes late.
            if self._in_flight and fault.target % 2:
                step = self._in_flight[0]
                self._late_results.append(self.worker.execute(step.plan, step.deferring))
            self._lose_worker()
        elif fault.kind == "delay":
            self._delay_s = 50 * self.scenario.step_base_s
        else:
            self._result_faults.append(fault.kind)

    def _lose_worker(self) -> None:
        self.worker = self._new_worker()
        self._restart()

    def _restart(self, is_out_of_memory: bool = False) -> None:
        self._in_flight.clear()
        for sequence in self.manager.apply(Restart(is_out_of_memory)):
            self.num_failed += 1
            client = self._alive.pop(sequence.sequence_id)
            # With random crashes, a sequence that runs alone may be hit several times in a row by chance.
            if client.arrival.crashes_at is None and not self._has_random_crashes:
                raise Violation(f"{sequence} failed, but does not crash workers")
            self.manager.apply(Finish(sequence.sequence_id, FinishReason.ERROR))
            self._check_end(client)
        self.num_suspects += len(self.manager.quarantine)

    def _crashes(self, plan: StepPlan) -> bool:
        """Whether the worker crashes in this step."""
        crashing = {
            client.sequence.slot: client.arrival.crashes_at
            for client in self._alive.values()
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
            for client in self._alive.values()
            if client.arrival.deferred_percent
        }
        return {
            chunk.slot for chunk in plan.chunks if hash((plan.step_id, chunk.slot)) % 100 < percents.get(chunk.slot, 0)
        }

    def _deliver(self, result: StepResult) -> None:
        self.num_steps += 1
        kind = self._result_faults.pop(0) if self._result_faults else None
        if kind == "reorder" and self._in_flight:
            self._late_results.append(result)
            return
        if kind == "forge":  # results of an earlier worker and of an unknown step, with wrong tokens
            wrong = replace(result, token_ids=tuple((token_id + 1) % VOCAB_SIZE for token_id in result.token_ids))
            self._commit(replace(wrong, epoch=result.epoch - 1), is_stale=True)
            self._commit(replace(wrong, step_id=result.step_id + 7), is_stale=True)
        self._commit(result)
        if kind == "duplicate":
            self._commit(result, is_stale=True)
        elif kind == "kill":
            self._lose_worker()
        self._deliver_late_results()

    def _deliver_late_results(self) -> None:
        while self._late_results:
            result = self._late_results.pop()
            self._commit(result, is_stale=result.epoch != self.manager.epoch)

    def _commit(self, result: StepResult, is_stale: bool = False) -> None:
        before = self.manager.num_stale_results
        tokens = self.manager.apply(Commit(result, self.now_s))
        if is_stale and (tokens or self.manager.num_stale_results != before + 1):
            raise Violation(f"a stale result was applied: {result}")
        for token in tokens:
            client = self._alive.get(token.sequence.sequence_id)
            if client is None:
                raise Violation(f"a token for {token.sequence}, which has ended")
            client.received.append(token.token_id)
            client.token_times_s.append(self.now_s)
            if token.finish_reason is not None:
                del self._alive[token.sequence.sequence_id]
            if self._check:
                self._check_token(client, token)
        if self._check:
            self.manager.check()

    # -- checks -------------------------------------------------------------------------------------------------------

    def _blocks_in_use(self, plan: StepPlan) -> set[int]:
        """The blocks that a step writes to or copies. Raises Violation if it takes a block that another step uses.

        A worker that runs its steps in order never shows such a mistake, so no other check would find it.
        """
        sequences = {client.sequence.slot: client.sequence for client in self._alive.values()}
        new_slots = {assignment.slot for assignment in plan.slot_assignments}
        block_size = self.scenario.scheduler.block_size
        in_use = {source for source, _ in plan.copies}
        taken: list[int] = []
        for chunk in plan.chunks:
            sequence = sequences[chunk.slot]
            last = (chunk.start + chunk.num_tokens - 1) // block_size
            in_use.update(sequence.kv.table[chunk.start // block_size : last + 1])
            # The first blocks of a new slot assignment are shared, so another step may well use them.
            num_shared = sequence.kv.num_found if chunk.slot in new_slots else 0
            taken += chunk.new_block_ids[num_shared:]
        for step in self._in_flight:
            if not step.blocks_in_use.isdisjoint(taken):
                raise Violation(f"{plan} takes a block that a step in flight uses")
        return in_use

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
            self._check_end(client)

    def _check_end(self, client: Client) -> None:
        sequence, logprobs = client.sequence, client.sequence.prompt_logprobs
        if logprobs != client.expected_prompt_logprobs[: None if client.received else len(logprobs)]:
            raise Violation(f"{sequence} has {logprobs}, the reference says {client.expected_prompt_logprobs}")
        if sequence.status is not Status.FINISHED or sequence.output_token_ids != client.received:
            raise Violation(f"{sequence} ended with {sequence.output_token_ids}, its client got {client.received}")

    def _new_worker(self) -> SimulatedWorker:
        config = self.scenario.scheduler
        return SimulatedWorker(config.num_blocks, config.block_size, config.max_num_batched_tokens)


class RecklessPredictor(OutputLengthPredictor):
    """Predicts no output where lengths are not bounded. The real one is so good that tiny pools rarely preempt."""

    def tokens_to_come(self, sequence: Sequence) -> int:
        return super().tokens_to_come(sequence) if sequence.has_length_bound else 0


class ServiceLag:
    """Measures, from plans alone, how far the service of two tenants drifts apart while both wait."""

    def __init__(self) -> None:
        self.worst = 0  # by how many tokens one was served more, over any such span from its beginning
        self._service: defaultdict[str, int] = defaultdict(int)
        self._spans: dict[tuple[str, str], int] = {}  # two tenants that both wait: their difference when that began

    def observe(self, plan: StepPlan, clients: Iterable[Client]) -> None:
        sequences = [client.sequence for client in clients]
        tenants = {sequence.slot: sequence.tenant for sequence in sequences}
        for chunk in plan.chunks:
            self._service[tenants[chunk.slot]] += chunk.num_tokens
        waiting = {s.tenant for s in sequences if s.status is Status.WAITING and s.leader is None}
        spans = {}
        for pair in combinations(sorted(waiting), 2):
            apart = self._service[pair[0]] - self._service[pair[1]]
            spans[pair] = self._spans.get(pair, apart)
            self.worst = max(self.worst, abs(apart - spans[pair]))
        self._spans = spans


class _Promise:
    """Checks the policy's promise, from plans and sequences alone."""

    def __init__(self, manager: WorkloadManager, lag: ServiceLag) -> None:
        self._manager = manager
        self._lag = lag
        self._policy = manager.config.scheduling_policy
        self._first: Sequence | None = None
        self._is_quarantined = False
        self._oldest: Sequence | None = None
        self._num_overtaking = self._longest = 0
        self._num_suspect_tokens = 0  # computed by suspects, which run alone whatever the order
        self._entitled: Sequence | None = None  # it should start soon
        self._num_steps_entitled = 0
        self._kept: list[tuple[Sequence, int]] = []  # the first-ranked of each tenant, and its share preemptions

    def before_plan(self, clients: Iterable[Client]) -> None:
        clients = list(clients)
        running = [client.sequence for client in clients if client.sequence.status is Status.RUNNING]
        # Suspects run one after the other, whatever their rank, and no other sequence runs.
        self._is_quarantined = bool(self._manager.quarantine)
        self._first = None
        if running and not self._is_quarantined:
            self._first = min(running, key=self._manager.waiting_queue.rank)
        if self._policy == "fair":
            firsts = {each.tenant: each for each in sorted(running, key=lambda each: each.sequence_id, reverse=True)}
            self._kept = [(each, each.num_share_preemptions) for each in firsts.values()]
            entitled = self._find_entitled([client.sequence for client in clients], running)
            if entitled is not self._entitled:
                self._entitled, self._num_steps_entitled = entitled, 0

    def _find_entitled(self, alive: list[Sequence], running: list[Sequence]) -> Sequence | None:
        """The sequence that has a right to start: of the tenant that was served least, within its share of everything.

        Its tenant has a right to an equal part of the slots, and of the blocks less the longest running sequence: in
        whole sequences the others cannot always be reduced to an equal part. Forks may have to wait for their leader.
        """
        num_served = getattr(self._manager.waiting_queue, "num_served_tokens")  # noqa: B009 - only `fair` has it
        tenants = sorted({each.tenant for each in alive}, key=lambda tenant: num_served[tenant])
        if len(tenants) < 2 or num_served[tenants[0]] == num_served[tenants[1]] or self._is_quarantined:
            return None
        own = [each for each in alive if each.tenant == tenants[0]]
        sequence = min((s for s in own if s.status is Status.WAITING), key=lambda s: s.sequence_id, default=None)
        if sequence is None or sequence.leader is not None:
            return None
        config = self._manager.config
        own = [sequence, *(each for each in own if each.status is Status.RUNNING)]

        def max_blocks(sequences: list[Sequence]) -> list[int]:
            return [-(-each.max_length // config.block_size) for each in sequences]

        found = {block for each in running for block in each.kv.table[: each.kv.num_found]}
        num_blocks = config.num_blocks - len(found) - config.max_num_seqs  # rounding costs a block for each sequence
        has_slot = len(own) <= config.max_num_seqs // len(tenants)
        is_small = len(tenants) * (sum(max_blocks(own)) + max(max_blocks(running), default=0)) <= num_blocks
        return sequence if has_slot and is_small else None

    def after_plan(self, plan: StepPlan, now: float, clients: Iterable[Client]) -> None:
        if self._first is not None and self._first.status is Status.WAITING:
            raise Violation(f"{self._first} was preempted, but was the first-ranked")
        new_slots = {assignment.slot for assignment in plan.slot_assignments}
        admitted, waiting = [], []
        for client in clients:
            sequence = client.sequence
            if sequence.last_step_id == plan.step_id:
                if sequence.deadline_s <= now or (sequence.ttft_deadline_s <= now and not client.received):
                    raise Violation(f"{sequence} is computed after its deadline")
                if sequence.slot in new_slots:
                    admitted.append(sequence)
            if sequence.status is Status.WAITING:
                waiting.append(sequence)
        if self._policy == "fair":
            self._check_lag(plan)
            self._check_shares(plan, [client.sequence for client in clients])
        elif not admitted or not waiting or self._is_quarantined:
            return
        elif self._policy == "shortest":
            self._check_overtaking(admitted, waiting)
        else:
            rank = self._manager.waiting_queue.rank
            last = max(admitted, key=rank)
            for sequence in waiting:  # forks may wait for their leader instead
                if sequence.leader is None and rank(sequence) < rank(last):
                    raise Violation(f"{last} was admitted before {sequence}")

    def _check_lag(self, plan: StepPlan) -> None:
        config = self._manager.config
        if self._is_quarantined:
            self._num_suspect_tokens += plan.num_tokens
        max_lag = Fair.max_lag(config.max_num_seqs, config.max_total_tokens)
        max_lag += 2 * (self._manager.num_deferrals * config.max_steps_in_flight + self._num_suspect_tokens)
        if self._lag.worst > max_lag:
            raise Violation(f"two tenants drifted {self._lag.worst} tokens apart, the bound is {max_lag}")

    def _check_shares(self, plan: StepPlan, alive: list[Sequence]) -> None:
        for sequence, num_share_preemptions in self._kept:
            if sequence.num_share_preemptions > num_share_preemptions:
                raise Violation(f"{sequence} was preempted for a share, but was the first-ranked of its tenant")
        if self._entitled is None or self._entitled.status is not Status.WAITING:
            return
        in_step = [sequence for sequence in alive if sequence.last_step_id == plan.step_id]
        has_prefill = any(sequence.first_sampled_step_id in (None, plan.step_id) for sequence in in_step)
        if not has_prefill and plan.num_tokens < self._manager.step_token_limit:
            self._num_steps_entitled += 1
        max_num_steps = self._manager.config.max_steps_in_flight + 2
        if self._num_steps_entitled > max_num_steps:
            raise Violation(f"{self._entitled} waits for its share for more than {max_num_steps} steps")

    def _check_overtaking(self, admitted: list[Sequence], waiting: list[Sequence]) -> None:
        # Forks that wait for their leader's prompt are not in the queue: they have nothing to compute yet.
        queued = [sequence for sequence in waiting if sequence.num_missing]
        if not queued:
            return
        oldest = min(queued, key=lambda sequence: sequence.sequence_id)
        if oldest is not self._oldest:
            self._oldest, self._num_overtaking, self._longest = oldest, 0, 0
        lengths = [sequence.num_missing for sequence in admitted if sequence.sequence_id > oldest.sequence_id]
        self._num_overtaking += sum(lengths)
        self._longest = max(self._longest, *lengths, 0)
        # The policy's limit, and once more while it is overdue and a running prompt is first. In both cases the last
        # prompt may exceed the limit.
        limit = 2 * Shortest.max_overtaking_tokens(oldest) + 2 * self._longest
        if self._num_overtaking > limit:
            raise Violation(f"{self._num_overtaking} tokens overtook {oldest}, at most {limit:.0f} may")
