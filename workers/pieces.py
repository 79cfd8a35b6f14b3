"""A step in pieces, for when the device's memory does not hold the intermediate values of all of it at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import chain

import torch
from msgspec.structs import replace

from servekit.messages import Row, StepPlan, StepResult, TokenLogprobs

LEAST_TOKENS = 16  # what does not fit in pieces of this size will not fit in smaller ones


class OutOfMemory(Exception):
    """Not even the smallest pieces fit."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; on the CPU torch has no type for that."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


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
    told = [replace(told, row=sources[told.row]) for result, sources in pieces for told in result.prompt_logprobs]
    num_before, failures = 0, []
    for result in results:
        failures += [(num_before + index, why) for index, why in result.failures]
        num_before += len(result.token_ids)
    return replace(
        results[0],
        token_ids=tuple(chain.from_iterable(result.token_ids for result in results)),
        logprobs=_logprobs(results),
        prompt_logprobs=tuple(told),
        failures=tuple(failures),
    )


def _logprobs(results: list[StepResult]) -> tuple[TokenLogprobs | None, ...]:
    """Aligned with the tokens; empty where nobody asked in any of the pieces."""
    if not any(result.logprobs for result in results):
        return ()
    return tuple(chain.from_iterable(result.logprobs or (None,) * len(result.token_ids) for result in results))
