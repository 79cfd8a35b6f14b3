"""Look at the scheduler: one frame for whoever watches, and what the metrics want of it.

Nothing is kept from look to look, so that nobody pays for it while nobody does. A look costs something for each cell of
the grid, for each block that anybody has, and for those that are cached or those that are free, whichever are fewer.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import NamedTuple

from msgspec.structs import replace

from servekit.history import History
from servekit.kv_memory import KVMemory
from servekit.live_view import (
    CACHED,
    FENCED,
    FREE,
    MOST_CELLS,
    MOST_SEQUENCES,
    SHARED,
    LiveLimits,
    LiveSequence,
    LiveState,
)
from servekit.metrics import Snapshot
from servekit.sequence import Sequence, Status
from servekit.submission import Generation
from servekit.workload_manager import WorkloadManager


def snapshot(manager: WorkloadManager, now: float) -> Snapshot:
    """For the metrics."""
    return Snapshot(
        now_s=now,
        num_running=manager.num_running,
        num_waiting=manager.num_waiting,
        num_deferred=manager.num_deferred,
        num_waiting_tokens=manager.num_queued_tokens,
        num_preemptions=manager.num_preemptions,
        num_stale_results=manager.num_stale_results,
        num_blocks=manager.memory.pool.num_blocks,
        num_free_blocks=manager.memory.pool.num_available,
        num_prompt_tokens=manager.num_prompt_tokens,
        num_cached_tokens=manager.num_cached_tokens,
        prefill_limit=manager.pacer.prefill_limit(),
    )


class View(NamedTuple):
    """One look, for viewers of any tenant."""

    state: LiveState  # as whoever has nothing in it is told
    owners: tuple[tuple[str, str] | None, ...] = ()  # (tenant, request's id) of each sequence; None of a probe

    def of(self, tenant: str) -> LiveState:
        """As this tenant is told, with the ids of its own requests: whose the others are is nobody's business.

        It is `state` itself where nothing is the tenant's.
        """
        told = list(self.state.sequences)
        is_any_own = False
        for index, owner in enumerate(self.owners):
            if owner is not None and owner[0] == tenant:
                told[index] = replace(told[index], request_id=owner[1])
                is_any_own = True
        return replace(self.state, sequences=told) if is_any_own else self.state


def look(server: LiveState, manager: WorkloadManager, generations: Collection[Generation], history: History) -> View:
    """The whole frame: what is known of a `server` whose model is loaded, and what it schedules.

    `generations` are all that are alive, in order of arrival.
    """
    config, pool, now = manager.config, manager.memory.pool, server.now_s
    running, waiting = _by_turn(manager, generations)
    ttft_p50_s, ttft_p95_s = history.first_token_percentiles(50, 95, now=now)
    blocks_per_cell, cells = _cells(manager.memory, [generation.sequence for generation in running])
    told = [*running, *waiting][:MOST_SEQUENCES]
    state = replace(
        server,
        limits=LiveLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_total_tokens=config.max_total_tokens,
            num_blocks=pool.num_blocks,
            block_size=config.block_size,
        ),
        num_running=manager.num_running,
        num_waiting=manager.num_waiting,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_generated_tokens=history.num_generated_tokens,
        num_prompt_tokens=manager.num_prompt_tokens,
        num_cached_tokens=manager.num_cached_tokens,
        num_preemptions=manager.num_preemptions,
        num_steps=history.num_steps,
        tokens_per_s=history.tokens_per_s(now),
        prefill_limit=manager.pacer.prefill_limit(),
        ttft_p50_s=ttft_p50_s,
        ttft_p95_s=ttft_p95_s,
        sequences=[_tell(generation) for generation in told],
        ended=history.ends,
        steps=history.steps,
        blocks_per_cell=blocks_per_cell,
        cells=cells,
    )
    return View(state, tuple(None if each.is_probe else (each.sequence.tenant, each.request_id) for each in told))


# -- sequences ---------------------------------------------------------------------------------------------------------


def _by_turn(
    manager: WorkloadManager, generations: Collection[Generation]
) -> tuple[list[Generation], list[Generation]]:
    """(all that run, by rank, and of those in line the first to arrive, as many as a frame may tell of)."""
    running: list[Generation] = []
    waiting: list[Generation] = []
    for generation in generations:
        if generation.sequence.status is Status.RUNNING:
            running.append(generation)
        elif len(waiting) < MOST_SEQUENCES:
            waiting.append(generation)
        elif len(running) == manager.num_running:
            break  # a line of thousands is behind them
    running.sort(key=lambda generation: manager.line.rank(generation.sequence))
    return running, waiting


def _tell(generation: Generation) -> LiveSequence:
    sequence = generation.sequence
    state = "decode" if sequence.first_sampled_step_id is not None else "prefill"
    return LiveSequence(
        sequence_id=sequence.sequence_id,
        state="waiting" if sequence.status is Status.WAITING else state,  # type: ignore[arg-type]
        num_prompt_tokens=sequence.prompt_length,
        num_computed_tokens=sequence.num_computed,
        num_output_tokens=sequence.num_output_tokens,
        max_tokens=sequence.sampling.max_tokens,
        arrival_s=sequence.arrival_s,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        num_preemptions=sequence.num_preemptions,
        num_blocks=len(sequence.block_table),
        first_scheduled_s=sequence.first_scheduled_s,
        first_token_s=generation.first_token_s,
        last_token_s=generation.last_token_s,
    )


# -- blocks ------------------------------------------------------------------------------------------------------------


def _cells(memory: KVMemory, running: list[Sequence]) -> tuple[int, list[tuple[int, int]]]:
    """(how many blocks a cell stands for, runs of equal cells).

    A cell that stands for several shows who has most of those that anybody has; fenced, cached and free come to be seen
    where nobody has any, in this order. So it looks fuller than it is. To go by the majority would be as wrong the
    other way, and hide a lone sequence among what is free.
    """
    kinds = block_kinds(memory, running)
    blocks_per_cell = -(-len(kinds) // MOST_CELLS)
    if blocks_per_cell > 1:
        kinds = [_foremost(kinds[first : first + blocks_per_cell]) for first in range(0, len(kinds), blocks_per_cell)]
    return blocks_per_cell, [(kind, len(list(run))) for kind, run in groupby(kinds)]


def block_kinds(memory: KVMemory, running: list[Sequence]) -> list[int]:
    """What each block is: the id of the one sequence that has it, or FREE, CACHED, SHARED or FENCED."""
    pool = memory.pool
    # A pool that has been used for a while is nearly all cached, as a new one is nearly all free.
    most, least, rarer = FREE, CACHED, pool.cached()
    if pool.num_cached > pool.num_free:
        most, least, rarer = CACHED, FREE, pool.free()
    kinds = [most] * pool.num_blocks
    for block in rarer:
        kinds[block] = least
    for block in pool.fenced():
        kinds[block] = FENCED
    for sequence in running:
        sequence_id = sequence.sequence_id
        for block in sequence.block_table:
            kinds[block] = sequence_id
    for block in memory.shared_blocks(running):
        kinds[block] = SHARED
    return kinds


def _foremost(kinds: list[int]) -> int:
    """What a cell of blocks of these kinds shows."""
    first = kinds[0]
    if kinds.count(first) == len(kinds):  # nearly always
        return first
    leased = [kind for kind in kinds if kind >= 0 or kind == SHARED]
    if leased:  # of equally many, what is shared; or else who came first
        return max(set(leased), key=lambda kind: (leased.count(kind), kind == SHARED, -kind))
    return next(kind for kind in (FENCED, CACHED, FREE) if kind in kinds)
