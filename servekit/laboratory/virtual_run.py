"""Run a workload in virtual time: a gate, the real workload manager, and simulated steps."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Protocol

from msgspec import Struct

from servekit.errors import ConfigError
from servekit.laboratory.batching import BatchingMode, Gate
from servekit.laboratory.timeline import Timeline
from servekit.laboratory.workload import LabRequest, Workload
from servekit.protocol.messages import StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import NEVER
from servekit.scheduler.workload_manager import WorkloadManager

ANSWER_TOKEN = 0  # every answer consists of it


class StepDurations(Protocol):
    """How long steps take: a simulated model, or a roofline of a device."""

    def duration_s(self, plan: StepPlan) -> float:
        """Return the duration of a step."""


class LabSettings(Struct, frozen=True, kw_only=True):
    """What all ways of batching have in common."""

    num_slots: int = 8
    num_kv_tokens: int = 8192  # places in the KV cache
    block_size: int = 16
    max_model_len: int = 1024
    chunk_tokens: int = 64  # of all sequences in one step, with chunked prefill
    max_delay_s: float = 0.1  # of dynamic batching
    is_paged: bool = True  # otherwise each sequence holds memory for max_model_len tokens
    has_prefix_cache: bool = True
    max_steps_in_flight: int = 2
    admission_s: float = 0.0  # from the arrival of a request until the scheduler has it

    def num_slots_of(self, mode: BatchingMode) -> int:
        """How many requests run at a time. Raises ConfigError if contiguous memory is too small for one."""
        num_slots = mode.max_batch_size or self.num_slots
        if self.is_paged:
            return num_slots
        num_fitting = self.num_kv_tokens // self.max_model_len
        if not num_fitting:
            raise ConfigError(
                f"a contiguous KV cache of {self.num_kv_tokens:,} tokens has no room for one sequence of "
                f"{self.max_model_len:,} tokens; give more with --kv-tokens"
            )
        return min(num_slots, num_fitting)

    def max_num_batched_tokens(self, mode: BatchingMode) -> int:
        """The most tokens of one step: without chunks, the prompts of all slots at once."""
        if mode.is_chunked:
            return max(self.chunk_tokens, self.num_slots)
        return self.num_slots * self.max_model_len

    def scheduler(self, mode: BatchingMode) -> SchedulerConfig:
        """The configuration of the workload manager."""
        return SchedulerConfig(
            num_blocks=self.num_kv_tokens // self.block_size,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.num_slots_of(mode),
            max_num_batched_tokens=self.max_num_batched_tokens(mode),
            max_steps_in_flight=self.max_steps_in_flight,
            enable_prefix_caching=self.has_prefix_cache,
        )

    def make_timeline(self) -> Timeline:
        return Timeline(None if self.is_paged else self.max_model_len)


class VirtualRun:
    """Plays one workload in one mode. After `play`, the timeline has all of it."""

    def __init__(self, workload: Workload, mode: BatchingMode, settings: LabSettings, model: StepDurations) -> None:
        config = settings.scheduler(mode)
        self.timeline = settings.make_timeline()
        self._manager = WorkloadManager(config)
        self._gate = Gate(mode, config.max_num_seqs, settings.max_delay_s)
        self._model = model
        self._admission_s = settings.admission_s
        self._coming = deque(workload.requests)
        self._at_gate: deque[tuple[int, LabRequest]] = deque()
        self._num_arrived = 0
        self._num_inside = 0
        self._in_flight: deque[tuple[float, StepPlan]] = deque()  # when each step is done
        self._now_s = 0.0

    def play(self) -> Timeline:
        """Play until every answer has ended."""
        while self._coming or self._at_gate or self._num_inside:
            while self._coming and self._coming[0].arrival_s + self._admission_s <= self._now_s:
                self._at_gate.append((self._num_arrived, self._coming.popleft()))
                self._num_arrived += 1
            self._pass_gate()
            self._plan()
            self._now_s = self._next_s()
            if self._in_flight and self._in_flight[0][0] <= self._now_s:
                self._commit()
        return self.timeline

    def _pass_gate(self) -> None:
        arrivals_s = [request.arrival_s for _, request in self._at_gate]
        for _ in range(self._gate.num_admitted(arrivals_s, self._num_inside, bool(self._coming), self._now_s)):
            sequence_id, request = self._at_gate.popleft()
            self._num_inside += 1
            self.timeline.add(sequence_id, request.arrival_s, len(request.prompt))
            self._manager.add(
                AddSequence(
                    sequence_id=sequence_id,
                    prompt_token_ids=array("i", request.prompt),
                    sampling=SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True),
                    arrival_s=request.arrival_s,
                )
            )

    def _plan(self) -> None:
        while (plan := self._manager.plan(self._now_s)) is not None:
            self.timeline.planned(self._manager, plan, self._now_s)
            began_s = max(self._now_s, self._in_flight[-1][0]) if self._in_flight else self._now_s
            self._in_flight.append((began_s + self._model.duration_s(plan), plan))

    def _next_s(self) -> float:
        """When something happens next: a step is done, a request arrives, or a batch begins."""
        done_s = self._in_flight[0][0] if self._in_flight else NEVER
        arrival_s = self._coming[0].arrival_s + self._admission_s if self._coming else NEVER
        opens_s = NEVER
        if not self._num_inside:
            opens_s = self._gate.opens_s([request.arrival_s for _, request in self._at_gate])
        next_s = min(done_s, arrival_s, opens_s)
        assert next_s != NEVER, "requests wait, and nothing will happen"
        return max(next_s, self._now_s)

    def _commit(self) -> None:
        _, plan = self._in_flight.popleft()
        num_sampled = sum(chunk.samples for chunk in plan.chunks)
        tokens = self._manager.commit(
            StepResult(plan.epoch, plan.step_id, (ANSWER_TOKEN,) * num_sampled, 0.0), self._now_s
        )
        self.timeline.committed(self._manager, tokens, self._now_s)
        self._num_inside -= sum(token.finish_reason is not None for token in tokens)
