"""Build a frame of the live view from the scheduler's state.

Nothing is kept between frames, so the live view costs nothing while no viewer is connected. The cost of a frame grows
with the cells of the grid, with the blocks that sequences hold, and with the cached or the free blocks, whichever are
fewer.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import Literal, NamedTuple

from msgspec.structs import replace

from servekit.engine.replica import Replica
from servekit.engine.request_state import SequenceOutput
from servekit.observability.live_frames import (
    CACHED,
    FENCED,
    FREE,
    MAX_CELLS,
    MAX_SEQUENCES,
    SHARED,
    LiveLimits,
    LiveSequence,
    LiveState,
    LiveWorker,
)
from servekit.observability.step_history import StepHistory
from servekit.scheduler.kv_cache_manager import KVCacheManager
from servekit.scheduler.sequence import Sequence, Status
from servekit.scheduler.workload_manager import WorkloadManager


class LiveView(NamedTuple):
    """One frame, for viewers of any tenant."""

    state: LiveState  # without any request ids
    owners: tuple[tuple[str, str] | None, ...] = ()  # (tenant, request id) of each sequence; None for a probe

    def for_tenant(self, tenant: str) -> LiveState:
        """The frame with the ids of this tenant's own requests; the owners of other sequences stay hidden.

        Returns `state` itself if no sequence is the tenant's.
        """
        sequences = list(self.state.sequences)
        is_any_own = False
        for index, owner in enumerate(self.owners):
            if owner is not None and owner[0] == tenant:
                sequences[index] = replace(sequences[index], request_id=owner[1])
                is_any_own = True
        return replace(self.state, sequences=sequences) if is_any_own else self.state


def live_worker(replica: Replica) -> LiveWorker:
    """The worker of one replica, and the replica's sequences and blocks."""
    state = "serving" if replica.is_ready else replica.executor.stage
    ready = replica.worker
    if ready is None:
        return LiveWorker(state)
    manager = replica.core.manager
    pool = manager.kv_cache.pool
    return LiveWorker(
        state,
        ready.device,
        ready.dtype,
        ready.attention,
        manager.num_running,
        manager.num_waiting,
        pool.num_blocks,
        pool.num_available,
        replica.executor.host,
    )


def build_live_view(
    server: LiveState, managers: list[WorkloadManager], outputs: Collection[SequenceOutput], history: StepHistory
) -> LiveView:
    """Complete the frame `server` of a server whose model is loaded with the state of its schedulers.

    Counts are sums over all replicas, and the cells of their pools follow each other. `outputs` are those of all
    unfinished sequences, in order of arrival.
    """
    now_s, pools = server.now_s, [manager.kv_cache.pool for manager in managers]
    config = max((manager.config for manager in managers), key=lambda config: config.max_total_tokens)
    running, waiting = _running_and_waiting(managers, outputs)
    ttft_p50_s, ttft_p95_s = history.first_token_percentiles(50, 95, now_s=now_s)
    blocks_per_cell, cells = _cells(managers, [output.sequence for output in running])
    shown = [*running, *waiting][:MAX_SEQUENCES]
    state = replace(
        server,
        limits=LiveLimits(
            max_num_seqs=sum(manager.config.max_num_seqs for manager in managers),
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_total_tokens=config.max_total_tokens,
            num_blocks=sum(pool.num_blocks for pool in pools),
            block_size=config.block_size,
        ),
        num_running=sum(manager.num_running for manager in managers),
        num_waiting=sum(manager.num_waiting for manager in managers),
        num_free_blocks=sum(pool.num_free for pool in pools),
        num_cached_blocks=sum(pool.num_cached for pool in pools),
        num_generated_tokens=history.num_generated_tokens,
        num_prompt_tokens=sum(manager.num_prompt_tokens for manager in managers),
        num_cached_tokens=sum(manager.num_cached_tokens for manager in managers),
        num_preemptions=sum(manager.num_preemptions for manager in managers),
        num_draft_steps=sum(manager.draft_lengths.num_spans for manager in managers),
        num_drafted_tokens=sum(sum(manager.draft_lengths.num_drafted) for manager in managers),
        num_accepted_tokens=sum(sum(manager.draft_lengths.num_accepted) for manager in managers),
        num_steps=history.num_steps,
        tokens_per_s=history.tokens_per_s(now_s),
        prefill_limit=max(manager.prefill_limiter.prefill_limit() for manager in managers),
        ttft_p50_s=ttft_p50_s,
        ttft_p95_s=ttft_p95_s,
        sequences=[_live_sequence(output) for output in shown],
        ended=history.ends,
        steps=history.steps,
        blocks_per_cell=blocks_per_cell,
        cells=cells,
    )
    return LiveView(state, tuple(None if each.is_probe else (each.sequence.tenant, each.request_id) for each in shown))


# -- sequences ---------------------------------------------------------------------------------------------------------


def _running_and_waiting(
    managers: list[WorkloadManager], outputs: Collection[SequenceOutput]
) -> tuple[list[SequenceOutput], list[SequenceOutput]]:
    """(all running sequences by rank, waiting ones in order of arrival, as many as fit into a frame)."""
    running: list[SequenceOutput] = []
    waiting: list[SequenceOutput] = []
    num_running = sum(manager.num_running for manager in managers)
    for output in outputs:
        if output.sequence.status is Status.RUNNING:
            running.append(output)
        elif len(waiting) < MAX_SEQUENCES:
            waiting.append(output)
        elif len(running) == num_running:
            break  # all others are waiting, and there may be thousands of them
    running.sort(key=lambda output: managers[0].waiting_queue.rank(output.sequence))
    return running, waiting


def _live_sequence(output: SequenceOutput) -> LiveSequence:
    sequence = output.sequence
    state: Literal["waiting", "prefill", "decode"] = "prefill"
    if sequence.status is Status.WAITING:
        state = "waiting"
    elif sequence.first_sampled_step_id is not None:
        state = "decode"
    return LiveSequence(
        sequence_id=sequence.sequence_id,
        state=state,
        num_prompt_tokens=sequence.prompt_length,
        num_computed_tokens=sequence.num_computed,
        num_output_tokens=sequence.num_output_tokens,
        max_tokens=sequence.sampling.max_tokens,
        arrival_s=sequence.arrival_s,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        num_preemptions=sequence.num_preemptions,
        num_drafted_tokens=sequence.num_drafted_tokens,
        num_accepted_tokens=sequence.num_accepted_tokens,
        num_blocks=len(sequence.kv.table),
        first_scheduled_s=sequence.first_scheduled_s,
        first_token_s=output.first_token_s,
        last_token_s=output.last_token_s,
    )


# -- blocks ------------------------------------------------------------------------------------------------------------


def _cells(managers: list[WorkloadManager], running: list[Sequence]) -> tuple[int, list[tuple[int, int]]]:
    """(number of blocks per cell, runs of equal cells), of the pools one after the other.

    A cell of several blocks shows the sequence that holds most of them. Only if no sequence holds any, it shows fenced,
    cached or free, in this order. So the pool looks fuller than it is. Showing the majority would be wrong in the other
    direction: it would hide a lone sequence among free blocks.
    """
    kinds: list[int] = []
    for manager in managers:
        own = [sequence for sequence in running if manager.find(sequence.sequence_id) is sequence]
        kinds += block_kinds(manager.kv_cache, own)
    blocks_per_cell = -(-len(kinds) // MAX_CELLS)
    if blocks_per_cell > 1:
        kinds = [_cell_kind(kinds[first : first + blocks_per_cell]) for first in range(0, len(kinds), blocks_per_cell)]
    return blocks_per_cell, [(kind, len(list(run))) for kind, run in groupby(kinds)]


def block_kinds(memory: KVCacheManager, running: list[Sequence]) -> list[int]:
    """The kind of each block: the id of the one sequence that holds it, or FREE, CACHED, SHARED or FENCED."""
    pool = memory.pool
    # A pool that has been used for a while is nearly all cached; a new pool is nearly all free.
    common_kind, rare_kind, rare_blocks = FREE, CACHED, pool.cached()
    if pool.num_cached > pool.num_free:
        common_kind, rare_kind, rare_blocks = CACHED, FREE, pool.free()
    kinds = [common_kind] * pool.num_blocks
    for block in rare_blocks:
        kinds[block] = rare_kind
    for block in pool.fenced():
        kinds[block] = FENCED
    for sequence in running:
        sequence_id = sequence.sequence_id
        for block in sequence.kv.table:
            kinds[block] = sequence_id
    for block in memory.shared_blocks(running):
        kinds[block] = SHARED
    return kinds


def _cell_kind(kinds: list[int]) -> int:
    """The kind that a cell of blocks of these kinds shows."""
    first = kinds[0]
    if kinds.count(first) == len(kinds):  # nearly always
        return first
    leased = [kind for kind in kinds if kind >= 0 or kind == SHARED]
    if leased:  # ties go to SHARED, then to the sequence that arrived first
        return max(set(leased), key=lambda kind: (leased.count(kind), kind == SHARED, -kind))
    return next(kind for kind in (FENCED, CACHED, FREE) if kind in kinds)
