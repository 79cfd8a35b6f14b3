"""Simulate the requests of a journal in virtual time, with other scheduler settings or other step times.

The loop is that of `EngineCore`: it plans after each result, and when a request comes to an idle scheduler. The rest of
the world is as it was recorded: when requests come, how long answers become, when a client leaves, when the worker is
lost and when the next one is ready. A client that left some time after its latest token does so after the same time.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from typing import Protocol

from servekit.errors import ContextTooLong
from servekit.protocol.messages import PromptLogprobs, StepPlan, StepResult
from servekit.replaying.recorded_run import FIRST_BLOCK_ID, Outage, RecordedRequest, RecordedRun
from servekit.replaying.run_record import RunRecord
from servekit.scheduler.checkpoint import ENDS, NO_LOGPROBS
from servekit.scheduler.commands import ChargeElsewhere
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import NEVER, FinishReason
from servekit.scheduler.workload_manager import WorkloadManager


class StepDurations(Protocol):
    """How long steps take."""

    def duration_s(self, plan: StepPlan, began_s: float) -> float:
        """Return how long a step takes that begins then."""


class ChangedRun:
    """Plays the requests of one journal. After `play`, `record` says what would have happened."""

    def __init__(self, recorded: RecordedRun, config: SchedulerConfig, durations: StepDurations) -> None:
        self.record = RunRecord()
        self._manager = WorkloadManager(config)
        self._durations = durations
        self._block_size = recorded.config.block_size
        self._pause_s = recorded.pause_s
        self._unused_id = FIRST_BLOCK_ID + recorded.num_block_ids  # of tokens in no full block, one for each request
        self._coming = deque(sorted(recorded.requests.values(), key=lambda each: (each.added_s, each.sequence_id)))
        self._outages = deque(recorded.outages)
        self._charges: deque[tuple[float, ChargeElsewhere]] = deque(recorded.charges)
        self._requests: dict[int, RecordedRequest] = {}  # alive
        self._tokens: dict[int, array[int]] = {}  # of prompts and answers of these
        self._leaving: list[tuple[float, int]] = []  # a heap: when something ends which request
        self._in_flight: deque[tuple[float, StepPlan]] = deque()  # when each step is done
        self._plans_s = NEVER  # when the loop plans next; it takes no result before that
        self._now_s = recorded.began_s

    def play(self) -> RunRecord:
        """Play until every request has ended, and the last step is done."""
        while self._coming or self._requests or self._in_flight:
            self._now_s = max(self._now_s, self._next_s())
            self._commit()
            self._let_world_act()
            self._end_late_requests()
            if self._now_s >= self._plans_s:
                self._plan()
        return self.record

    def _next_s(self) -> float:
        """When something happens next."""
        done_s = self._in_flight[0][0] if self._in_flight and self._plans_s == NEVER else NEVER
        next_s = min(
            done_s,
            self._plans_s,
            self._coming[0].added_s if self._coming else NEVER,
            self._leaving[0][0] if self._leaving else NEVER,
            self._outages[0].at_s if self._outages else NEVER,
            self._charges[0][0] if self._charges else NEVER,
            self._manager.next_deadline_s,
        )
        assert next_s != NEVER, "requests are alive, and nothing will happen"
        return next_s

    # -- the engine ---------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        self._plans_s = NEVER
        while (plan := self._manager.plan(self._now_s)) is not None:
            began_s = max(self._now_s, self._in_flight[-1][0]) if self._in_flight else self._now_s
            self._in_flight.append((began_s + self._durations.duration_s(plan, began_s), plan))
            self.record.planned(self._manager, plan, self._now_s)

    def _commit(self) -> None:
        """Take the result of a step that is done."""
        if not self._in_flight or self._plans_s != NEVER or self._in_flight[0][0] > self._now_s:
            return
        _, plan = self._in_flight.popleft()
        manager = self._manager
        step = manager.steps_in_flight[0]
        token_ids = tuple([self._next_token(sequence.sequence_id) for sequence, _ in step.sampled])
        parts = []
        for index, (sequence, _) in step.prompt_logprobs.items():
            chunk = plan.chunks[index]
            num_predicted = min(chunk.num_tokens, sequence.prompt_length - chunk.start - 1)
            if num_predicted > 0:
                parts.append(PromptLogprobs(index, chunk.start + 1, (NO_LOGPROBS,) * num_predicted))
        result = StepResult(manager.epoch, step.step_id, token_ids, 0.0, prompt_logprobs=tuple(parts))
        tokens = manager.commit(result, self._now_s)
        self.record.committed(manager, tokens, self._now_s)
        for token in tokens:
            sequence_id = token.sequence.sequence_id
            if token.finish_reason is not None:
                self._forget(sequence_id)
            elif token.sequence.num_output_tokens == self._requests[sequence_id].num_output_tokens:
                self._watch_end(self._requests[sequence_id])
        self._plans_s = self._now_s + self._pause_s

    def _next_token(self, sequence_id: int) -> int:
        """The next token of an answer. Behind what was recorded, it goes on with tokens that mean nothing."""
        sequence, request = self._manager.find(sequence_id), self._requests.get(sequence_id)
        if sequence is None or request is None:
            return FIRST_BLOCK_ID  # of a sequence that has ended: it is ignored
        number = sequence.num_output_tokens
        if request.ends_with_token and number + 1 >= request.num_output_tokens:
            return ENDS
        tokens = self._tokens[sequence_id]
        position = request.prompt_length + number
        return tokens[position] if position < len(tokens) else tokens[-1]

    # -- the world ----------------------------------------------------------------------------------------------------

    def _let_world_act(self) -> None:
        """Let everything happen that was recorded for this time."""
        while self._outages and self._outages[0].at_s <= self._now_s:
            self._lose_worker(self._outages.popleft())
        while self._charges and self._charges[0][0] <= self._now_s:
            self._manager.apply(self._charges.popleft()[1])
        while self._coming and self._coming[0].added_s <= self._now_s:
            self._add(self._coming.popleft())
        while self._leaving and self._leaving[0][0] <= self._now_s:
            _, sequence_id = heapq.heappop(self._leaving)
            if sequence_id in self._requests:
                self._finish(sequence_id, self._requests[sequence_id].end_reason)

    def _add(self, request: RecordedRequest) -> None:
        tokens = request.token_ids(self._block_size, self._unused_id)
        self._unused_id += 1
        leader_tokens = None if request.leader_id is None else self._tokens.get(request.leader_id)
        if leader_tokens is not None:  # forks have the prompt of their leader
            tokens[: request.prompt_length] = leader_tokens[: request.prompt_length]
        try:
            sequence = self._manager.add(request.command(tokens))
        except ContextTooLong:
            self.record.num_refused += 1
            return
        self.record.added(self._manager, sequence)
        self._requests[request.sequence_id], self._tokens[request.sequence_id] = request, tokens
        if request.num_output_tokens <= request.num_given:
            self._watch_end(request)
        if not self._in_flight and self._plans_s == NEVER:
            self._plans_s = self._now_s

    def _watch_end(self, request: RecordedRequest) -> None:
        """Note when something from outside ends a request that has as many tokens as it had then."""
        if request.end_delay_s is not None:
            heapq.heappush(self._leaving, (self._now_s + request.end_delay_s, request.sequence_id))

    def _lose_worker(self, outage: Outage) -> None:
        self._in_flight.clear()
        failed = [sequence.sequence_id for sequence in self._manager.restart(outage.is_out_of_memory)]
        for sequence_id in failed:
            self._finish(sequence_id, FinishReason.ERROR)
        self._plans_s = max(self._now_s, outage.ready_s)

    def _end_late_requests(self) -> None:
        for sequence in self._manager.expire(self._now_s):
            self.record.ended(sequence, FinishReason.DEADLINE, self._now_s)
            self._forget(sequence.sequence_id)

    def _finish(self, sequence_id: int, reason: FinishReason) -> None:
        sequence = self._manager.find(sequence_id)
        if sequence is not None:
            self._manager.finish(sequence_id, reason)
            self.record.ended(sequence, reason, self._now_s)
        self._forget(sequence_id)

    def _forget(self, sequence_id: int) -> None:
        self._requests.pop(sequence_id, None)
        self._tokens.pop(sequence_id, None)
