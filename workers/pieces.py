"""A step in pieces, for when the device's memory does not hold the intermediate values of all of it at once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TypeVar

import torch
from msgspec.structs import replace

from servekit.messages import PromptLogprobs, Row, StepPlan, StepResult, TokenLogprobs

Result = TypeVar("Result")

LEAST_TOKENS = 16  # what does not fit in pieces of this size will not fit in smaller ones


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed. On the CPU torch has no type for that; CUDA's libraries have their own words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    told = str(error)
    return "can't allocate memory" in told or "STATUS_ALLOC_FAILED" in told or "out of memory" in told


def attempt(compute: Callable[[], Result]) -> Result | str:
    """What it gives, or why memory did not hold it. By then nothing keeps the tensors of what failed."""
    try:
        return compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return str(error).partition("\n")[0]


def release_memory() -> None:
    """Give back what nobody uses any more, as far as torch kept it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def in_pieces(plan: StepPlan, most_tokens: int) -> Iterator[tuple[StepPlan, list[int]]]:
    """The plan as several, of at most so many tokens each, and which of its rows each one's rows come from.

    Seats, blocks and known tokens are left out: the slot table has them since the whole was tried. So a piece can be
    executed twice without harm, as it writes the same values to the same cells.
    """
    rows: list[Row] = []
    sources: list[int] = []
    room = most_tokens
    for source, row in enumerate(plan.rows):
        start, stop = row.start, row.start + row.num_tokens
        while start < stop:
            num_tokens = min(room, stop - start)
            samples = row.samples and start + num_tokens == stop
            rows.append(Row(row.slot, start, num_tokens, (), (), samples))
            sources.append(source)
            start, room = start + num_tokens, room - num_tokens
            if not room:
                yield StepPlan(plan.epoch, plan.step_id, (), tuple(rows)), sources
                rows, sources, room = [], [], most_tokens
    if rows:
        yield StepPlan(plan.epoch, plan.step_id, (), tuple(rows)), sources


def joined(pieces: list[tuple[StepResult, list[int]]]) -> StepResult:
    """The results of a plan's pieces, in order, as the whole plan's."""
    results = [result for result, _ in pieces]
    told: dict[int, PromptLogprobs] = {}  # by row, of which there may be several pieces
    for result, sources in pieces:
        for part in result.prompt_logprobs:
            source = sources[part.row]
            before = told.get(source, replace(part, row=source, logprobs=()))
            told[source] = replace(before, logprobs=before.logprobs + part.logprobs)
    num_before, failures = 0, []
    for result in results:
        failures += [(num_before + index, why) for index, why in result.failures]
        num_before += len(result.token_ids)
    return replace(
        results[0],
        token_ids=tuple(chain.from_iterable(result.token_ids for result in results)),
        logprobs=_logprobs(results),
        prompt_logprobs=tuple(told.values()),
        failures=tuple(failures),
    )


def _logprobs(results: list[StepResult]) -> tuple[TokenLogprobs | None, ...]:
    """Aligned with the tokens; empty where nobody asked in any of the pieces."""
    if not any(result.logprobs for result in results):
        return ()
    return tuple(chain.from_iterable(result.logprobs or (None,) * len(result.token_ids) for result in results))
