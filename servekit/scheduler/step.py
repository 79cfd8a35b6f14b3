"""Represent a step in the workload manager, from its plan until its result is committed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat

from msgspec import Struct

from servekit.errors import WorkerLost
from servekit.protocol.messages import PromptLogprobs, ScheduledChunk, SlotAssignment, StepResult, TokenLogprobs
from servekit.requests.time_causes import TimeCause
from servekit.scheduler.sequence import FinishReason, Sequence


class SequenceToken(Struct, frozen=True, gc=False):
    """One committed token, and what it did to its sequence."""

    sequence: Sequence
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None  # if requested
    failure: str | None = None  # why there is no token, if the worker could not choose one


class Step(Struct):
    """What is planned for a step, and which sequences wait for which part of its result."""

    step_id: int
    planned_s: float
    budget: int  # tokens that may still be scheduled
    slot_assignments: list[SlotAssignment] = []
    chunks: list[ScheduledChunk] = []
    copies: list[tuple[int, int]] = []
    loads: tuple[tuple[bytes, int], ...] = ()
    sends: tuple[tuple[int, bytes], ...] = ()
    sampled: list[tuple[Sequence, int]] = []  # (sequence, its incarnation) for each span
    num_drafts: dict[int, int] = {}  # planned ones, by index into `sampled`
    # By index of the chunk: the sequence, and its incarnation, whose prompt logprobs that chunk computes.
    prompt_logprobs: dict[int, tuple[Sequence, int]] = {}
    # What the step computes of prompts: sequence, incarnation, first position, number of positions, whether it samples.
    prefills: list[tuple[Sequence, int, int, int, bool]] = []
    # Which sequences have a slot but no part in the step: sequence, its incarnation, why, and by which setting.
    left_out: list[tuple[Sequence, int, TimeCause, str]] = []
    num_decodes: int = 0
    num_prefill_tokens: int = 0
    result: StepResult | None = None  # if it came before the result of an earlier step

    def check_fits(self, result: StepResult) -> None:
        """Raise WorkerLost for a malformed result: one that cannot be this step's."""
        counts, num_spans = result.counts, len(self.sampled)
        num_tokens = sum(counts) if counts else num_spans
        fits = (
            (not result.num_drafts or self._may_draft(result))
            and (not counts or self._may_count(result))
            and len(result.token_ids) == num_tokens
            and len(result.logprobs) in (0, num_tokens)
            and (not result.prompt_logprobs or all(map(self._was_requested, result.prompt_logprobs)))
            and (not result.failures or all(0 <= index < num_spans for index, _ in result.failures))
            and (not result.deferred or all(0 <= index < num_spans for index in result.deferred))
            and (result.transfers is None or self._may_fail(result.transfers.failed_loads))
        )
        if not fits:
            raise WorkerLost(f"the model worker's result does not fit its step of {num_spans} spans")

    def _may_fail(self, failed_loads: tuple[int, ...]) -> bool:
        return all(0 <= index < len(self.loads) for index in failed_loads)

    def _may_draft(self, result: StepResult) -> bool:
        """Whether each span can have so many drafts: at most as many as were planned."""
        return len(result.num_drafts) == len(self.sampled) and all(
            0 <= number <= self.num_drafts.get(index, 0) for index, number in enumerate(result.num_drafts)
        )

    def _may_count(self, result: StepResult) -> bool:
        """Whether each span can have so many tokens: at most one more than it had drafts."""
        counts = result.counts
        if len(counts) != len(self.sampled):
            return False
        num_drafts = result.num_drafts or (0,) * len(counts)
        alone = {*result.deferred, *(index for index, _ in result.failures)}
        return all(
            count == 1 or (1 < count <= 1 + num_drafts[index] and index not in alone)
            for index, count in enumerate(counts)
        )

    def is_running(self, index: int) -> bool:
        """Whether the sequence of a span still takes its tokens. It does not if a step before this one ended it."""
        sequence, incarnation = self.sampled[index]
        return sequence.incarnation == incarnation

    def num_verified(self, index: int) -> int:
        """How many drafts of a span the worker had."""
        assert self.result is not None
        num_drafts = self.result.num_drafts
        return num_drafts[index] if num_drafts else 0

    def num_accepted(self, index: int) -> int:
        """How many of them the result accepts."""
        assert self.result is not None
        counts = self.result.counts
        return counts[index] - 1 if counts else 0

    def _was_requested(self, part: PromptLogprobs) -> bool:
        """Whether these are exactly the prompt tokens that the logits of their chunk predict."""
        if part.chunk_index not in self.prompt_logprobs:
            return False
        chunk, (sequence, _) = self.chunks[part.chunk_index], self.prompt_logprobs[part.chunk_index]
        num_predicted = min(chunk.num_tokens, sequence.prompt_length - chunk.start - 1)
        return part.start == chunk.start + 1 and len(part.logprobs) == num_predicted


def by_token(sampled: Iterable[tuple[Sequence, int]], counts: tuple[int, ...]) -> Iterable[tuple[Sequence, int]]:
    """Which sequence each token of a result is for, in which incarnation; `sampled` says it for each span."""
    return chain.from_iterable(map(repeat, sampled, counts)) if counts else sampled
