"""Record the timeline of a run: when each request had a slot and got its tokens, and what each step computed.

A `Timeline` watches a workload manager. It is the same whether that plays in virtual time or is replayed from the
journal of a real run, so both are summarised and drawn by the same code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec import Struct, field

from servekit.protocol.messages import StepPlan
from servekit.scheduler.step import SequenceToken
from servekit.scheduler.workload_manager import WorkloadManager


class RequestTimeline(Struct, kw_only=True):
    """One request. Times are in seconds."""

    sequence_id: int
    arrival_s: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    slot: int = -1
    admitted_s: float | None = None  # when it got a slot for the first time
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    prefills: list[tuple[float, float]] = field(default_factory=list)  # beginning and end of the steps with its prompt


class StepTimeline(Struct, frozen=True):
    """One step, and the KV memory behind it."""

    began_s: float
    done_s: float
    plan: StepPlan
    num_reserved_tokens: int  # places in the KV cache that running sequences hold; shared ones count once
    num_unused_tokens: int  # of these: without keys and values of a token


class Timeline:
    """Watches one workload manager."""

    def __init__(self, reserved_tokens_per_sequence: int | None = None) -> None:
        """With contiguous memory each running sequence holds the same number of places, whatever it uses."""
        self.requests: dict[int, RequestTimeline] = {}
        self.steps: list[StepTimeline] = []
        self._reserved_tokens_per_sequence = reserved_tokens_per_sequence
        self._in_slots: dict[int, int] = {}  # sequence ids by slot
        self._in_flight: deque[tuple[float, StepPlan, list[int]]] = deque()  # planned when; whose prompts it computes

    def add(self, sequence_id: int, arrival_s: float, num_prompt_tokens: int) -> None:
        """Note a request that is given to the manager."""
        self.requests[sequence_id] = RequestTimeline(
            sequence_id=sequence_id, arrival_s=arrival_s, num_prompt_tokens=num_prompt_tokens
        )

    def planned(self, manager: WorkloadManager, plan: StepPlan, now_s: float) -> None:
        """Note a step that was planned."""
        if plan.slot_assignments:
            self._note_slots(manager, now_s)
        prompts = [
            self._in_slots[chunk.slot]
            for chunk in plan.chunks
            if chunk.slot in self._in_slots and not (chunk.samples and chunk.num_tokens == 1 + chunk.num_drafts)
        ]
        self._in_flight.append((now_s, plan, prompts))

    def _note_slots(self, manager: WorkloadManager, now_s: float) -> None:
        """Read which request has which slot. A preempted one may have another slot than before."""
        self._in_slots.clear()
        for sequence_id in manager.sequence_ids:
            sequence, request = manager.find(sequence_id), self.requests.get(sequence_id)
            if sequence is None or sequence.slot is None or request is None:
                continue
            self._in_slots[sequence.slot] = sequence_id
            request.slot = sequence.slot
            if request.admitted_s is None:
                request.admitted_s = now_s
                request.num_cached_tokens = sequence.num_cached_tokens or 0

    def committed(self, manager: WorkloadManager, tokens: Iterable[SequenceToken], now_s: float) -> None:
        """Note that the oldest step in flight is done."""
        planned_s, plan, prompts = self._in_flight.popleft()
        began_s = max(planned_s, self.steps[-1].done_s if self.steps else planned_s)
        for sequence_id in prompts:
            self.requests[sequence_id].prefills.append((began_s, now_s))
        running = [
            sequence for sequence_id in self._in_slots.values() if (sequence := manager.find(sequence_id)) is not None
        ]
        for token in tokens:
            request = self.requests.get(token.sequence.sequence_id)
            if request is not None:
                request.token_times_s.append(now_s)
                if token.finish_reason is not None:
                    request.ended_s = now_s
                    self._in_slots.pop(request.slot, None)
        block_size = manager.config.block_size
        if self._reserved_tokens_per_sequence is None:
            num_reserved = manager.kv_cache.pool.num_leased * block_size
            num_unused = sum(len(each.kv.table) * block_size - each.num_computed for each in running)
        else:
            num_reserved = len(running) * self._reserved_tokens_per_sequence
            num_unused = num_reserved - sum(each.num_computed for each in running)
        self.steps.append(StepTimeline(began_s, now_s, plan, num_reserved, num_unused))
