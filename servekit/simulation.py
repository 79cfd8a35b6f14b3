"""A whole service in virtual time: the real workload manager, a simulated worker, clients and faults.

A `Scenario` is a value: what the manager is told to keep, who arrives when, what goes wrong when. `Simulation` plays
it, deterministically, and raises a `Violation` as soon as anything is not as it must be: the manager's own laws and the
policy's promise after every step, every token against a reference that serves one prompt at a time, and at the end that
nobody was forgotten. A failing scenario can be shrunk, saved and played again.

It lies beside the manager and not with the tests because it is also the way to ask what a policy or a size would do.

The shape is that of FoundationDB's and TigerBeetle's simulators: one thread, one seed, all nondeterminism injected.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import combinations

from msgspec import Struct
from msgspec.structs import replace

from servekit.admission import OutputForecast
from servekit.messages import StepPlan, StepResult, TokenLogprobs
from servekit.policy import Fair, Shortest
from servekit.quarantine import CONVICTING
from servekit.sampling_params import SamplingParams
from servekit.scheduler_config import SchedulerConfig
from servekit.sequence import NEVER, FinishReason, Sequence, Status
from servekit.simulated_worker import VOCAB_SIZE, NaiveReference, SimulatedWorker, Violation
from servekit.step import SequenceToken
from servekit.workload_manager import WorkloadManager

# -- the world --------------------------------------------------------------------------------------------------------


class Arrival(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Somebody asks for something."""

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
    crashes_at: int | None = None  # a worker that computes this position of it ends


class Fault(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something goes wrong."""

    at_s: float
    kind: str  # abort | duplicate | forge | reorder | delay | kill | memory
    target: int = 0  # of an abort: whose


class Scenario(Struct, frozen=True, kw_only=True):
    """All that a simulation depends on."""

    scheduler: SchedulerConfig
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...] = ()
    is_reckless: bool = False  # the manager expects no output at all where nothing bounds it
    step_base_s: float = 1e-3
    step_token_s: float = 1e-4


class Client:
    """What one arrival has received."""

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
            told = NaiveReference.logprobs([*arrival.prompt, *expected], arrival.logprobs)
            self.expected_logprobs = told[len(arrival.prompt) - 1 :]
        if arrival.prompt_logprobs is not None:
            self.expected_prompt_logprobs = NaiveReference.logprobs(arrival.prompt, arrival.prompt_logprobs)
        self.received: list[int] = []
        self.token_times_s: list[float] = []


class _Dispatched(Struct, frozen=True):
    """A step on its way through the worker."""

    done_s: float
    plan: StepPlan
    in_use: set[int]  # blocks that it writes to or copies
    crashes: bool


class Simulation:
    """Plays one scenario. After `run`, `clients` holds who received what, and when."""

    def __init__(self, scenario: Scenario, check: bool = True, watch_lag: bool = False) -> None:
        self.scenario = scenario
        self.now_s = 0.0
        self.num_steps = 0
        self.clients: dict[int, Client] = {}
        forecast = RecklessForecast(scenario.scheduler.block_size) if scenario.is_reckless else None
        self.manager = WorkloadManager(scenario.scheduler, forecast)
        self.worker = self._new_worker()
        self._check = check
        self._is_struck_by_chance = any(fault.kind in ("kill", "memory") for fault in scenario.faults)
        self._watch_lag = watch_lag
        self._reference = NaiveReference(scenario.scheduler.eos_token_ids)
        events: list[Arrival | Fault] = [*scenario.arrivals, *scenario.faults]
        self._events = deque(sorted(events, key=lambda event: event.at_s))
        self._alive: dict[int, Client] = {}  # by sequence_id
        self._in_flight: deque[_Dispatched] = deque()
        self.num_convicted = 0
        self._held: list[StepResult] = []  # results that will come late
        self._armed: list[str] = []  # what happens to the next results
        self._delay_s = 0.0  # of the next step
        self.lag = ServiceLag()
        self._promise = _Promise(self.manager, self.lag)

    def run(self) -> None:
        """To the end of everything. Raises Violation, or the AssertionError of a law that was broken."""
        most_steps = self._most_steps()
        while self._events or self._alive or self._in_flight:
            self._plan()
            self._wait()
            if self.num_steps > most_steps:
                raise Violation(f"no end after {self.num_steps} steps; alive: {list(self._alive.values())}")
        if self.manager.has_work:
            raise Violation("the manager has work, and nobody waits for it")
        pool = self.manager.memory.pool
        if pool.num_available != pool.num_blocks:
            raise Violation(f"{pool.num_blocks - pool.num_available} blocks were lost")

    def _most_steps(self) -> int:
        """More than any schedule needs, so that whoever exceeds it has come to a standstill or runs in circles."""
        config = self.scenario.scheduler
        num_kills = sum(fault.kind in ("kill", "memory") for fault in self.scenario.faults)
        num_kills += sum(CONVICTING for arrival in self.scenario.arrivals if arrival.crashes_at is not None)
        num_tokens = sum(len(arrival.prompt) + arrival.max_tokens for arrival in self.scenario.arrivals)
        return 100 + num_tokens * (2 + config.max_preemptions + num_kills)

    # -- one turn of the loop ---------------------------------------------------------------------------------------

    def _plan(self) -> None:
        manager, now = self.manager, self.now_s
        for sequence in manager.expire(now):
            client = self._alive.pop(sequence.sequence_id)
            if min(sequence.deadline_s, sequence.ttft_deadline_s) > now:
                raise Violation(f"{sequence} was ended before its deadline")
            self._check_end(client)
        while True:
            if self._check:
                self._promise.before_plan(self._alive.values())
            plan = manager.plan(now)
            if plan is None:
                break
            if manager.line.keeps_accounts or self._watch_lag:
                self.lag.observe(plan, self._alive.values())
            in_use: set[int] = set()
            if self._check:
                manager.check()
                self._promise.after_plan(plan, now, self._alive.values())
                in_use = self._blocks_in_use(plan)
            started_s = max(now, self._in_flight[-1].done_s if self._in_flight else now)
            duration_s = self.scenario.step_base_s + self.scenario.step_token_s * plan.num_tokens
            done_s = started_s + duration_s + self._delay_s
            self._in_flight.append(_Dispatched(done_s, plan, in_use, self._crashes(plan)))
            self._delay_s = 0.0
        if not self._in_flight and self._alive:
            raise Violation(f"at a standstill: {[client.sequence for client in self._alive.values()]}")

    def _wait(self) -> None:
        """Until the next thing happens."""
        if self._in_flight and (not self._events or self._in_flight[0].done_s < self._events[0].at_s):
            step = self._in_flight.popleft()
            self.now_s = max(self.now_s, step.done_s)
            if step.crashes:
                self.num_steps += 1
                self._lose_worker()
            elif "memory" in self._armed:
                self._armed.remove("memory")
                self.num_steps += 1
                self._restart(is_out_of_memory=True)
            else:
                self._deliver(self.worker.execute(step.plan))
        elif self._events:
            event = self._events.popleft()
            self.now_s = max(self.now_s, event.at_s)
            if isinstance(event, Arrival):
                self._arrive(event)
            else:
                self._strike(event)

    def _arrive(self, arrival: Arrival) -> None:
        sampling = SamplingParams(
            max_tokens=arrival.max_tokens,
            ignore_eos=arrival.ignore_eos,
            logprobs=arrival.logprobs,
            prompt_logprobs=arrival.prompt_logprobs,
        )
        leader = self.clients.get(arrival.forks) if arrival.forks is not None else None
        sequence = Sequence(
            len(self.clients),
            list(arrival.prompt),
            sampling,
            self.now_s,
            tenant=arrival.tenant,
            priority=arrival.priority,
            ttft_deadline_s=NEVER if arrival.ttft_s is None else self.now_s + arrival.ttft_s,
            deadline_s=NEVER if arrival.deadline_s is None else self.now_s + arrival.deadline_s,
            leader=leader.sequence if leader is not None else None,
            has_length_bound=arrival.has_length_bound,
        )
        client = Client(arrival, sequence, self._reference.output(arrival.prompt, sampling) if self._check else [])
        self.manager.add(sequence)
        self.clients[arrival.name] = self._alive[sequence.sequence_id] = client

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "abort":
            client = self.clients.get(fault.target)
            if client is not None:
                was_alive = client.sequence.sequence_id in self._alive
                if self.manager.finish(client.sequence, FinishReason.ABORT) != was_alive:
                    raise Violation(f"{client.sequence}: the manager and its client disagree on whether it had ended")
                self._alive.pop(client.sequence.sequence_id, None)
        elif fault.kind == "kill" and self._in_flight and fault.target % 3 == 0:
            self._armed.append("kill")  # between a result and the plan that would follow it
        elif fault.kind == "kill":
            # Half of what was under way is done, and its result is on the way; the rest is lost.
            if self._in_flight and fault.target % 2:
                self._held.append(self.worker.execute(self._in_flight[0].plan))
            self._lose_worker()
        elif fault.kind == "delay":
            self._delay_s = 50 * self.scenario.step_base_s
        else:
            self._armed.append(fault.kind)

    def _lose_worker(self) -> None:
        self.worker = self._new_worker()
        self._restart()

    def _restart(self, is_out_of_memory: bool = False) -> None:
        self._in_flight.clear()
        for sequence in self.manager.restart(is_out_of_memory):
            self.num_convicted += 1
            client = self._alive.pop(sequence.sequence_id)
            # Who loses a worker while somebody has it alone cannot be told from who was hit by chance.
            if client.arrival.crashes_at is None and not self._is_struck_by_chance:
                raise Violation(f"{sequence} was convicted, and is innocent")
            self.manager.finish(sequence, FinishReason.ERROR)
            self._check_end(client)

    def _crashes(self, plan: StepPlan) -> bool:
        """Whether the worker will not survive this step."""
        deadly = {
            client.sequence.slot: client.arrival.crashes_at
            for client in self._alive.values()
            if client.arrival.crashes_at is not None
        }
        return any(
            (position := deadly.get(row.slot)) is not None and row.start <= position < row.start + row.num_tokens
            for row in plan.rows
        )

    def _deliver(self, result: StepResult) -> None:
        self.num_steps += 1
        kind = self._armed.pop(0) if self._armed else None
        if kind == "reorder" and self._in_flight:
            self._held.append(result)
            return
        if kind == "forge":  # from a worker of before, with what would be wrong tokens
            wrong = replace(result, token_ids=tuple((token_id + 1) % VOCAB_SIZE for token_id in result.token_ids))
            self._commit(replace(wrong, epoch=result.epoch - 1), is_stale=True)
            self._commit(replace(wrong, step_id=result.step_id + 7), is_stale=True)
        self._commit(result)
        if kind == "duplicate":
            self._commit(result, is_stale=True)
        elif kind == "kill":
            self._lose_worker()
        self._flush_held()

    def _flush_held(self) -> None:
        while self._held:
            result = self._held.pop()
            self._commit(result, is_stale=result.epoch != self.manager.epoch)

    def _commit(self, result: StepResult, is_stale: bool = False) -> None:
        before = self.manager.num_stale_results
        tokens = self.manager.commit(result, self.now_s)
        if is_stale and (tokens or self.manager.num_stale_results != before + 1):
            raise Violation(f"a result that nobody awaits was applied: {result}")
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

    # -- what must be so ----------------------------------------------------------------------------------------------

    def _blocks_in_use(self, plan: StepPlan) -> set[int]:
        """The blocks that a step writes to or copies; a Violation if one that it takes is in use by another step.

        A worker that runs its steps in order would never show such a mistake, so nothing else would.
        """
        tables = {client.sequence.slot: client.sequence for client in self._alive.values()}
        seats = {seat.slot for seat in plan.seats}
        block_size = self.scenario.scheduler.block_size
        in_use = {source for source, _ in plan.copies}
        taken: list[int] = []
        for row in plan.rows:
            sequence = tables[row.slot]
            last = (row.start + row.num_tokens - 1) // block_size
            in_use.update(sequence.block_table[row.start // block_size : last + 1])
            if row.new_block_ids:  # a seat's first ones are shared, and may well be under way
                taken += row.new_block_ids[sequence.num_found_blocks if row.slot in seats else 0 :]
        for step in self._in_flight:
            if not step.in_use.isdisjoint(taken):
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
            raise Violation(f"{client.sequence} has its first token, and its prompt is not explained")
        if reason is not None:
            self._check_end(client)

    def _check_end(self, client: Client) -> None:
        sequence, told = client.sequence, client.sequence.prompt_logprobs
        if told != client.expected_prompt_logprobs[: None if client.received else len(told)]:
            raise Violation(f"{sequence} was told {told}, the reference says {client.expected_prompt_logprobs}")
        if sequence.status is not Status.FINISHED or sequence.output_token_ids != client.received:
            raise Violation(f"{sequence} ended with {sequence.output_token_ids}, its client got {client.received}")

    def _new_worker(self) -> SimulatedWorker:
        config = self.scenario.scheduler
        return SimulatedWorker(config.num_blocks, config.block_size, config.max_num_batched_tokens)


class RecklessForecast(OutputForecast):
    """The real one learns so well that tiny pools hardly ever run short. This one brings preemption about."""

    def tokens_to_come(self, sequence: Sequence) -> int:
        return super().tokens_to_come(sequence) if sequence.has_length_bound else 0


class ServiceLag:
    """How far apart the service of two tenants drifts while both have somebody waiting, measured from outside."""

    def __init__(self) -> None:
        self.worst = 0  # tokens computed for one more than for the other, over any such span from its beginning
        self._service: defaultdict[str, int] = defaultdict(int)
        self._spans: dict[tuple[str, str], int] = {}  # tenants who both wait: their difference as that began

    def observe(self, plan: StepPlan, clients: Iterable[Client]) -> None:
        sequences = [client.sequence for client in clients]
        owners = {sequence.slot: sequence.tenant for sequence in sequences}
        for row in plan.rows:
            self._service[owners[row.slot]] += row.num_tokens
        waiting = {s.tenant for s in sequences if s.status is Status.WAITING and s.leader is None}
        spans = {}
        for pair in combinations(sorted(waiting), 2):
            apart = self._service[pair[0]] - self._service[pair[1]]
            spans[pair] = self._spans.get(pair, apart)
            self.worst = max(self.worst, abs(apart - spans[pair]))
        self._spans = spans


class _Promise:
    """What the policy promised, watched from outside."""

    def __init__(self, manager: WorkloadManager, lag: ServiceLag) -> None:
        self._manager = manager
        self._lag = lag
        self._policy = manager.config.scheduling_policy
        self._first: Sequence | None = None
        self._is_judging = False
        self._oldest: Sequence | None = None
        self._num_passed = self._longest = 0

    def before_plan(self, clients: Iterable[Client]) -> None:
        running = [client.sequence for client in clients if client.sequence.status is Status.RUNNING]
        # Suspects take turns, whatever their rank, and nobody else has one.
        is_judging = bool(self._manager.quarantine)
        self._first = min(running, key=self._manager.line.rank) if running and not is_judging else None
        self._is_judging = is_judging

    def after_plan(self, plan: StepPlan, now: float, clients: Iterable[Client]) -> None:
        if self._first is not None and self._first.status is Status.WAITING:
            raise Violation(f"{self._first} was preempted, and was the first")
        seats = {seat.slot for seat in plan.seats}
        seated, waiting = [], []
        for client in clients:
            sequence = client.sequence
            if sequence.last_step_id == plan.step_id:
                if sequence.deadline_s <= now or (sequence.ttft_deadline_s <= now and not client.received):
                    raise Violation(f"{sequence} is computed after its deadline")
                if sequence.slot in seats:
                    seated.append(sequence)
            if sequence.status is Status.WAITING:
                waiting.append(sequence)
        if self._policy == "fair":
            most = Fair.max_lag(self._manager.config.max_num_seqs, self._manager.config.max_total_tokens)
            if self._lag.worst > most:
                raise Violation(f"two tenants drifted {self._lag.worst} tokens apart, the bound is {most}")
        elif not seated or not waiting or self._is_judging:
            return
        elif self._policy == "shortest":
            self._check_patience(seated, waiting)
        else:
            rank = self._manager.line.rank
            last = max(seated, key=rank)
            for sequence in waiting:  # forks may wait for their leader instead of for a turn
                if sequence.leader is None and rank(sequence) < rank(last):
                    raise Violation(f"{last} was seated before {sequence}")

    def _check_patience(self, seated: list[Sequence], waiting: list[Sequence]) -> None:
        oldest = min(waiting, key=lambda sequence: sequence.sequence_id)
        if oldest is not self._oldest:
            self._oldest, self._num_passed, self._longest = oldest, 0, 0
        lengths = [sequence.num_missing for sequence in seated if sequence.sequence_id > oldest.sequence_id]
        self._num_passed += sum(lengths)
        self._longest = max(self._longest, *lengths, 0)
        # Its patience, and once more while it is overdue and a seated prompt is first; either may end in a prompt that
        # goes over it.
        most = 2 * Shortest.patience(oldest) + 2 * self._longest
        if self._num_passed > most:
            raise Violation(f"{self._num_passed} tokens passed {oldest}, at most {most:.0f} may")
