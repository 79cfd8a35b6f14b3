"""Split a step's plan into smaller ones, if memory does not hold all intermediate values at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from typing import ParamSpec, TypeVar

from msgspec.structs import replace

from servekit.protocol.messages import PromptLogprobs, ScheduledChunk, StepPlan, StepResult, TokenLogprobs
from workers.device.memory import is_out_of_memory
from workers.runner.interface import OutOfMemory

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

MIN_TOKENS = 16  # if parts of this size do not fit, smaller ones do not fit either


def raises_out_of_memory(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Make a function raise OutOfMemory, with the first line of the message, where an allocation fails in it.

    The error is raised outside of the `except` block, so it has no context: the failed function's frames are gone by
    then, and with them the tensors that they held.
    """

    @wraps(function)
    def call(*arguments: Parameters.args, **options: Parameters.kwargs) -> Returned:
        try:
            return function(*arguments, **options)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0] or type(error).__name__
        raise OutOfMemory(reason)

    return call


@dataclass(frozen=True, slots=True)
class PlanPart:
    """A part of a plan."""

    plan: StepPlan
    chunk_indices: list[int]  # for each of its chunks, the index of the whole plan's chunk that it comes from


def split_plan(plan: StepPlan, max_tokens: int) -> Iterator[PlanPart]:
    """Yield the plan as parts of `max_tokens` tokens or fewer, in order.

    Slot assignments, new blocks and known tokens are left out: the slot table has them from the attempt at the whole
    plan. So a part can be executed twice without harm: it writes the same values to the same cells.

    The rows of a chunk with drafts may be in several parts. What the first of them samples replaces the draft in the
    token table. If it differs, the draft is rejected, and so is everything that later parts compute after it.
    """
    chunks: list[ScheduledChunk] = []
    indices: list[int] = []
    num_left = max_tokens
    for index, chunk in enumerate(plan.chunks):
        start, stop = chunk.start, chunk.start + chunk.num_tokens
        first_sampled = stop - 1 - chunk.num_drafts if chunk.samples else stop
        while start < stop:
            num_tokens = min(num_left, stop - start)
            num_rows = max(0, start + num_tokens - max(start, first_sampled))
            part = ScheduledChunk(chunk.slot, start, num_tokens, (), (), num_rows > 0, max(0, num_rows - 1))
            chunks.append(part)
            indices.append(index)
            start, num_left = start + num_tokens, num_left - num_tokens
            if not num_left:
                yield PlanPart(StepPlan(plan.epoch, plan.step_id, (), tuple(chunks)), indices)
                chunks, indices, num_left = [], [], max_tokens
    if chunks:
        yield PlanPart(StepPlan(plan.epoch, plan.step_id, (), tuple(chunks)), indices)


def merge_results(parts: list[tuple[StepResult, list[int]]]) -> StepResult:
    """Return the whole plan's result, given each part's in order and the `chunk_indices` of the part.

    All results have a token for each sampled row: spans come later.
    """
    results = [result for result, _ in parts]
    prompt_logprobs: dict[int, PromptLogprobs] = {}  # by the whole plan's chunk, of which there may be several parts
    for result, chunk_indices in parts:
        for found in result.prompt_logprobs:
            index = chunk_indices[found.chunk_index]
            before = prompt_logprobs.get(index, replace(found, chunk_index=index, logprobs=()))
            prompt_logprobs[index] = replace(before, logprobs=before.logprobs + found.logprobs)
    num_before, failures, deferred = 0, [], []
    for result in results:
        failures += [(num_before + index, why) for index, why in result.failures]
        deferred += [num_before + index for index in result.deferred]
        num_before += len(result.token_ids)
    return replace(
        results[0],
        token_ids=tuple(chain.from_iterable(result.token_ids for result in results)),
        logprobs=_merge_logprobs(results),
        prompt_logprobs=tuple(prompt_logprobs.values()),
        failures=tuple(failures),
        deferred=tuple(deferred),
    )


def _merge_logprobs(results: list[StepResult]) -> tuple[TokenLogprobs | None, ...]:
    """Return logprobs aligned with the tokens; empty where no part has any."""
    if not any(result.logprobs for result in results):
        return ()
    return tuple(chain.from_iterable(result.logprobs or (None,) * len(result.token_ids) for result in results))
