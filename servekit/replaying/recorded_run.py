"""Read a recorded run from a journal, with all data to simulate its requests with other settings.

A journal dates plans and results. What comes between two of them happened after the first one: a request that came to
an idle scheduler is dated with the plan that followed, and any other one with its arrival, or with what was before it.

A journal has no tokens. Which prompts begin alike is known by the hashes of their blocks, so each block is given
tokens of its own: two blocks have equal tokens if and only if they had equal hashes. With other block sizes, prompts
share what they have in common in whole blocks of the recorded size.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from statistics import median

from msgspec import Struct

from servekit.protocol.messages import StepPlan
from servekit.protocol.sampling_params import SamplingParams
from servekit.replaying.run_record import CUT, MOVED, RunRecord
from servekit.scheduler.checkpoint import ENDS
from servekit.scheduler.commands import AddSequence, ChargeElsewhere
from servekit.scheduler.recording import (
    AddRecord,
    ChargeElsewhereRecord,
    CommitRecord,
    ErrorRecord,
    ExpireRecord,
    FinishRecord,
    PlanRecord,
    Record,
    ReplayWatcher,
    RestartRecord,
    WithdrawRecord,
)
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import FinishReason, Progress, Sequence
from servekit.scheduler.step import SequenceToken
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.model import SimulatedModel
from servekit.simulation.step_time_fit import TIMES, MeasuredStep, StepTimeFit, fit_step_times

AFTER_PLAN_S = 1e-6  # what came after a plan is dated so much later, so that a replay does not plan it in that step
SAME_TIME_S = 1e-9  # times that differ by less differ by rounding
MAX_RATIO = 3.0  # a step that took longer than this times what is expected was held up: that is added, not multiplied
FIRST_BLOCK_ID = ENDS + 1


class RecordedRequest(Struct, kw_only=True):
    """One request, and how it ended. The tokens of its answer are known as far as it came."""

    sequence_id: int
    added_s: float
    arrival_s: float
    prompt_length: int
    num_given: int  # tokens of its answer that it had when it was added: it came from another replica, or checkpoint
    sampling: SamplingParams
    has_length_bound: bool
    tenant: str
    priority: int
    ttft_deadline_s: float
    deadline_s: float
    leader_id: int | None
    first_scheduled_s: float | None
    num_cached_tokens: int | None
    blocks: array[int] = array("i")  # for each full block a number; equal ones have equal tokens, and equal beginnings
    num_output_tokens: int = 0
    ends_with_token: bool = False  # its last token was one that stops it
    # After its last token, or after its arrival, something else ended it: a stop string, or the client.
    end_delay_s: float | None = None
    end_reason: FinishReason = FinishReason.ABORT

    def token_ids(self, block_size: int, unused_id: int) -> array[int]:
        """The tokens of prompt and answer; `unused_id` stands for those that are in no full block."""
        tokens = array("i")
        for block in self.blocks:
            tokens.extend(array("i", (block,)) * block_size)
        length = self.prompt_length + self.num_output_tokens
        tokens.extend(array("i", (unused_id,)) * (length - len(tokens)))
        return tokens[:length]

    def command(self, tokens: array[int]) -> AddSequence:
        """The command that adds it to a manager."""
        progress = None
        if self.num_given:
            progress = Progress(
                output_token_ids=tokens[self.prompt_length : self.prompt_length + self.num_given],
                prompt_logprobs=(),
                first_scheduled_s=self.first_scheduled_s,
                num_cached_tokens=self.num_cached_tokens,
                num_preemptions=0,
                num_share_preemptions=0,
                incarnation=0,
            )
        return AddSequence(
            sequence_id=self.sequence_id,
            prompt_token_ids=tokens[: self.prompt_length],
            sampling=self.sampling,
            arrival_s=self.arrival_s,
            tenant=self.tenant,
            priority=self.priority,
            ttft_deadline_s=self.ttft_deadline_s,
            deadline_s=self.deadline_s,
            leader_id=self.leader_id,
            has_length_bound=self.has_length_bound,
            progress=progress,
        )


class Outage(Struct, frozen=True):
    """The worker was lost, or a step did not fit into its memory."""

    at_s: float
    ready_s: float  # when the next step was planned
    is_out_of_memory: bool


class StepTimes:
    """How long steps take: what was fitted to the steps of a journal, and how far each of these was off.

    A step that begins while a recorded one ran is off by as much. So whatever held the machine up at some time of the
    recording does so again at that time, and a replay with the same settings repeats every step.
    """

    def __init__(self, began_s: array[float], steps: list[MeasuredStep]) -> None:
        self.fit: StepTimeFit = fit_step_times(steps)
        self._done_s = [begin_s + step.duration_s for begin_s, step in zip(began_s, steps, strict=True)]
        self._seconds = [step.duration_s for step in steps]
        times_s: list[float] = [getattr(self.fit.model, name) for name in TIMES]
        self._expected_s = [
            sum([amount * time_s for amount, time_s in zip(step.work, times_s, strict=True)]) for step in steps
        ]

    def duration_s(self, plan: StepPlan, began_s: float) -> float:
        """Return how long a step takes that begins then."""
        seconds = self.fit.model.duration_s(plan)
        index = bisect_right(self._done_s, began_s + SAME_TIME_S)
        if index == len(self._done_s):
            return seconds
        measured_s, expected_s = self._seconds[index], self._expected_s[index]
        if not expected_s:
            return seconds
        largest_s = MAX_RATIO * expected_s
        return seconds * min(measured_s, largest_s) / expected_s + max(0.0, measured_s - largest_s)


class ModelledSteps:
    """How long steps take on another device: what a simulated model says."""

    def __init__(self, model: SimulatedModel) -> None:
        self._model = model

    def duration_s(self, plan: StepPlan, began_s: float) -> float:
        """Return how long a step takes, whenever it begins."""
        return self._model.duration_s(plan)


class RecordedRun(ReplayWatcher):
    """Watches the replay of a journal."""

    def __init__(self, config: SchedulerConfig) -> None:
        """`config` is that of the recorded scheduler."""
        self.config = config
        self.record = RunRecord()
        self.requests: dict[int, RecordedRequest] = {}  # in the order in which they were added
        self.outages: list[Outage] = []
        self.charges: list[tuple[float, ChargeElsewhere]] = []  # of other replicas, each with its time
        self.has_hashes = False
        self._block_ids: dict[bytes, int] = {}  # by the hash of a block
        self._now_s = 0.0
        self._has_planned = False  # since the last result
        self._is_idle = False  # the manager, before the request that is being added
        self._idle: list[RecordedRequest] = []  # that came to an idle manager, and are not dated yet
        self._restart: tuple[float, bool] | None = None  # when, and whether the memory was too small
        self._alive: dict[int, Sequence] = {}
        self._in_flight: list[tuple[float, StepPlan]] = []  # planned when
        self._epoch = 0
        self._last_done_s = 0.0
        self._pauses_s: list[float] = []  # from a result to the next plan
        self._began_s = array("d")
        self._steps: list[MeasuredStep] = []

    # -- what it found ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Note the end of the journal."""
        for sequence in list(self._alive.values()):
            self._ended(sequence, FinishReason.ABORT, CUT)
        self._date_idle(self._now_s)

    def step_times(self) -> StepTimes | None:
        """How long its steps took; None if it has none."""
        return StepTimes(self._began_s, self._steps) if self._steps else None

    @property
    def pause_s(self) -> float:
        """How long the server needed from a result to the next plan: the median."""
        return median(self._pauses_s) if self._pauses_s else 0.0

    @property
    def began_s(self) -> float:
        """When the first request was added, or arrived before."""
        return self.record.began_s

    # -- watching -----------------------------------------------------------------------------------------------------

    def before(self, manager: WorkloadManager, record: Record) -> None:
        match record:
            case PlanRecord():
                is_after_result = self._now_s and not self._has_planned and not self._idle and self._restart is None
                if is_after_result and record.columns is not None:
                    self._pauses_s.append(record.now_s - self._now_s)
                self._date_idle(record.now_s)
                if self._restart is not None:
                    at_s, is_out_of_memory = self._restart
                    self.outages.append(Outage(at_s, record.now_s, is_out_of_memory))
                    self._restart = None
                self._now_s, self._has_planned = record.now_s, True
            case CommitRecord():
                self._now_s, self._has_planned = record.now_s, False
            case ExpireRecord():
                self._now_s = max(self._now_s, record.now_s)
                for sequence_id in record.sequence_ids:
                    self._note_end(manager, sequence_id, FinishReason.DEADLINE, FinishReason.DEADLINE)
            case FinishRecord():
                self._note_end(manager, record.sequence_id, record.reason, record.reason)
            case WithdrawRecord():
                for sequence_id in record.sequence_ids:
                    self._note_end(manager, sequence_id, FinishReason.ABORT, MOVED)
            case RestartRecord():
                self._restart = self._restart or (self._happened_s, record.is_out_of_memory)
                self._in_flight.clear()
            case ChargeElsewhereRecord():
                self.charges.append((self._happened_s, ChargeElsewhere(record.num_tokens, record.max_lead)))
            case ErrorRecord():
                self.before(manager, record.record)
            case AddRecord():
                self._is_idle = not manager.has_work

    def restored(self, manager: WorkloadManager) -> None:
        """Begin with the sequences of a checkpoint, as if they had come from another replica at that time."""
        self.record.restored(manager)
        self._is_idle = True
        for sequence_id in manager.sequence_ids:
            sequence = manager.find(sequence_id)
            assert sequence is not None
            self.added(manager, sequence)

    def added(self, manager: WorkloadManager, sequence: Sequence) -> None:
        leader = sequence.leader
        request = RecordedRequest(
            sequence_id=sequence.sequence_id,
            added_s=max(sequence.arrival_s, self._happened_s),
            arrival_s=sequence.arrival_s,
            prompt_length=sequence.prompt_length,
            num_given=sequence.num_output_tokens,
            sampling=sequence.sampling,
            has_length_bound=sequence.has_length_bound,
            tenant=sequence.tenant,
            priority=sequence.priority,
            ttft_deadline_s=sequence.ttft_deadline_s,
            deadline_s=sequence.deadline_s,
            leader_id=None if leader is None else leader.sequence_id,
            first_scheduled_s=sequence.first_scheduled_s,
            num_cached_tokens=sequence.num_cached_tokens,
        )
        if self._is_idle or self._idle:
            self._idle.append(request)
        self.requests[sequence.sequence_id] = request
        self._alive[sequence.sequence_id] = sequence
        self.record.added(manager, sequence)

    def planned(self, manager: WorkloadManager, plan: StepPlan, now_s: float) -> None:
        if plan.epoch != self._epoch:
            self._in_flight.clear()
            self._epoch = plan.epoch
        self._in_flight.append((now_s, plan))
        self.record.planned(manager, plan, now_s)

    def committed(self, manager: WorkloadManager, tokens: list[SequenceToken], now_s: float) -> None:
        if len(self._in_flight) > manager.num_in_flight:
            planned_s, plan = self._in_flight.pop(0)
            if len(self._in_flight) == manager.num_in_flight:  # otherwise the results of several steps came late
                began_s = max(planned_s, self._last_done_s)
                self._began_s.append(began_s)
                self._steps.append(MeasuredStep.of(plan, now_s - began_s))
            del self._in_flight[: len(self._in_flight) - manager.num_in_flight]
            self._last_done_s = now_s
        self.record.committed(manager, tokens, now_s)
        for token in tokens:
            if token.finish_reason is not None and token.sequence.sequence_id in self._alive:
                request = self.requests[token.sequence.sequence_id]
                request.ends_with_token = token.finish_reason is FinishReason.STOP
                if token.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):  # it failed
                    request.end_delay_s, request.end_reason = 0.0, token.finish_reason
                self._close(token.sequence)

    # -- parts --------------------------------------------------------------------------------------------------------

    @property
    def _happened_s(self) -> float:
        """When something happened that is recorded now."""
        return self._now_s + AFTER_PLAN_S if self._has_planned else self._now_s

    def _date_idle(self, now_s: float) -> None:
        for request in self._idle:
            request.added_s = max(request.arrival_s, now_s)
        self._idle.clear()

    def _note_end(self, manager: WorkloadManager, sequence_id: int, reason: FinishReason, how: str) -> None:
        sequence = manager.find(sequence_id)
        if sequence is not None and sequence_id in self._alive:
            self._ended(sequence, reason, how)

    def _ended(self, sequence: Sequence, reason: FinishReason, how: str) -> None:
        """Note an end that came from outside of the scheduler, some time after the last token."""
        request, times = self.requests[sequence.sequence_id], self.record.requests[sequence.sequence_id]
        if reason is not FinishReason.DEADLINE:  # which the replay finds itself
            since_s = times.last_token_s if times.num_tokens else max(request.arrival_s, request.added_s)
            request.end_delay_s = max(0.0, self._happened_s - since_s)
            request.end_reason = reason
        self.record.ended(sequence, how, self._happened_s)
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        """Keep what is known of the tokens of a sequence that has ended."""
        del self._alive[sequence.sequence_id]
        request = self.requests[sequence.sequence_id]
        request.num_output_tokens = sequence.num_output_tokens
        ids = self._block_ids
        hashes = sequence.kv.hashes[: sequence.num_tokens // self.config.block_size]
        self.has_hashes = self.has_hashes or bool(hashes)
        request.blocks = array("i", [ids.setdefault(each, FIRST_BLOCK_ID + len(ids)) for each in hashes])

    @property
    def num_block_ids(self) -> int:
        """How many different blocks there are; their numbers begin at FIRST_BLOCK_ID."""
        return len(self._block_ids)
