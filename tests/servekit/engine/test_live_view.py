"""Tests of live view frames: they agree with the scheduler, block for block, in any state."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.engine import live_view
from servekit.engine.client_queue import ClientQueue
from servekit.engine.detokenizer import Detokenizer
from servekit.engine.live_view import block_kinds, build_live_view
from servekit.engine.request_state import SequenceOutput
from servekit.observability.live_frames import (
    CACHED,
    FENCED,
    FREE,
    MAX_CELLS,
    MAX_SEQUENCES,
    SHARED,
    LiveState,
    LiveWorker,
)
from servekit.observability.step_history import StepHistory
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.sequence import FinishReason, Sequence, Status
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.service import Simulation
from tests.servekit.simulation.scenarios import make_scenario
from tests.support.scheduler import add_prompt, add_sequence, make_manager, make_worker

SERVER = LiveState(100.0, "ready", "serving", "demo", "1.2.3", [LiveWorker("serving")])


def output_of(sequence: Sequence, request_id: str = "", is_probe: bool = False) -> SequenceOutput:
    return SequenceOutput(sequence, 0, cast(Detokenizer, None), ClientQueue(), request_id, is_probe)


def look_at(manager: WorkloadManager, *sequences: Sequence, tenant: str = "") -> LiveState:
    outputs = [output_of(sequence, f"r{sequence.sequence_id}") for sequence in sequences]
    return build_live_view(SERVER, [manager], outputs, StepHistory()).for_tenant(tenant)


def unrolled(state: LiveState) -> list[int]:
    return [kind for kind, length in state.cells for _ in range(length)]


# -- blocks ------------------------------------------------------------------------------------------------------------


def naive_kinds(manager: WorkloadManager) -> list[int]:
    """The kinds from the block tables, block by block."""
    pool, kinds = manager.kv_cache.pool, []
    fenced = {block for _, blocks in pool._fenced for block in blocks}
    for block in range(pool.num_blocks):
        owners = [s.sequence_id for s in manager._sequences.values() if block in s.kv.table]
        if owners:
            kinds.append(owners[0] if len(owners) == 1 else SHARED)
        elif block in fenced:
            kinds.append(FENCED)
        else:
            kinds.append(CACHED if block in pool._cached else FREE)
            assert (block in pool._free) == (kinds[-1] == FREE)
    return kinds


def test_block_kinds_are_exact_after_every_plan_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With forks, aborts, preemptions and lost workers."""
    seen: Counter[int] = Counter()

    def compare(manager: WorkloadManager) -> None:
        running = [s for s in manager._sequences.values() if s.status is Status.RUNNING]
        kinds = block_kinds(manager.kv_cache, running)
        assert kinds == naive_kinds(manager)
        pool = manager.kv_cache.pool
        assert kinds.count(FREE) == pool.num_free and kinds.count(CACHED) == pool.num_cached
        seen.update(min(kind, 0) for kind in kinds)

    monkeypatch.setattr(WorkloadManager, "check", compare)
    for seed in range(40):
        Simulation(make_scenario(seed, num_arrivals=30)).run()
    assert min(seen[kind] for kind in (0, FREE, CACHED, SHARED, FENCED)) > 100, f"too few blocks of some kind: {seen}"


def naive_cell(kinds: list[int]) -> int:
    leased = Counter(kind for kind in kinds if kind >= 0 or kind == SHARED)
    if leased:
        most = max(leased.values())
        foremost = {kind for kind, num in leased.items() if num == most}
        return SHARED if SHARED in foremost else min(foremost)
    return FENCED if FENCED in kinds else CACHED if CACHED in kinds else FREE


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-4, 3), st.integers(1, 9)), min_size=1, max_size=40), st.integers(1, 9))
def test_cells_cover_all_blocks_and_show_the_main_holder_of_each(runs: list[tuple[int, int]], max_cells: int) -> None:
    kinds = [kind for kind, length in runs for _ in range(length)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_view, "block_kinds", lambda *_: kinds)
        patch.setattr(live_view, "MAX_CELLS", max_cells)
        size, cells = live_view._cells([make_manager()], [])
    shown = [kind for kind, length in cells for _ in range(length)]
    assert len(shown) <= max_cells and size == -(-len(kinds) // max_cells)
    assert shown == [naive_cell(kinds[first : first + size]) for first in range(0, len(kinds), size)]
    assert all(before != after for (before, _), (after, _) in pairwise(cells)), "runs are whole"


def test_a_large_pool_is_scaled_to_the_grid_and_a_lone_sequence_stays_visible() -> None:
    manager = make_manager(num_blocks=100_001)
    state = look_at(manager)
    assert state.blocks_per_cell == 25 and state.cells == [(FREE, 4001)] and sum(n for _, n in state.cells) <= MAX_CELLS
    sequence = add_sequence(manager, 7)
    manager.plan(0.0)
    assert look_at(manager, sequence).cells == [(7, 1), (FREE, 4000)], "a lone sequence is seen"


# -- sequences ---------------------------------------------------------------------------------------------------------


def test_a_sequence_is_listed_from_its_arrival_to_its_end() -> None:
    manager = make_manager(max_num_batched_tokens=4, max_steps_in_flight=1)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    worker, sequence = make_worker(manager), add_prompt(manager, 3, range(6), sampling, arrival_s=50.0)

    def frame() -> dict[str, Any]:
        (only,) = look_at(manager, sequence).sequences
        found: dict[str, Any] = msgspec.to_builtins(only)
        return found

    assert frame() == {
        "sequence_id": 3,
        "state": "waiting",
        "num_prompt_tokens": 6,
        "num_computed_tokens": 0,
        "num_output_tokens": 0,
        "max_tokens": 8,
        "arrival_s": 50.0,
        "request_id": "r3",
    }
    for state, num_computed, num_output, num_blocks in (
        ("prefill", 4, 0, 1),
        ("decode", 6, 0, 2),
        ("decode", 7, 1, 2),
    ):
        plan = manager.plan(60.0)
        assert plan is not None
        now = frame()
        assert (now["state"], now["num_computed_tokens"], now["num_output_tokens"]) == (state, num_computed, num_output)
        assert now["first_scheduled_s"] == 60.0 and now["num_blocks"] == num_blocks
        manager.commit(worker.execute(plan), 61.0)
    state = look_at(manager, sequence)
    assert (state.num_running, state.num_waiting, state.num_free_blocks) == (1, 0, 62)
    manager.finish(sequence.sequence_id, FinishReason.ABORT)
    at_rest = look_at(manager)
    assert not at_rest.sequences and at_rest.num_free_blocks + at_rest.num_cached_blocks == 64


def test_running_sequences_by_rank_precede_waiting_ones_up_to_the_limit_of_a_frame() -> None:
    manager = make_manager(max_num_seqs=8, scheduling_policy="shortest", max_num_batched_tokens=1024, num_blocks=1024)
    sequences = [add_sequence(manager, i, prompt_length=40 - i % 37) for i in range(MAX_SEQUENCES + 50)]
    manager.plan(0.0)
    shown = [each.sequence_id for each in look_at(manager, *sequences).sequences]
    assert shown[:8] == [sequence.sequence_id for sequence in manager._running]
    assert shown[8:] == [s.sequence_id for s in sequences if s.status is Status.WAITING][: MAX_SEQUENCES - 8]
    manager.finish(manager._running[0].sequence_id, FinishReason.ABORT)
    alive = [sequence for sequence in sequences if sequence.status is not Status.FINISHED]
    assert len(look_at(manager, *alive).sequences) == MAX_SEQUENCES


def test_only_its_own_tenant_sees_a_sequences_request_id() -> None:
    manager = make_manager()
    sampling = SamplingParams(max_tokens=8)
    ours, theirs, probe = (
        add_prompt(manager, number, range(5), sampling, tenant=tenant)
        for number, tenant in enumerate(("ours", "theirs", "ours"))
    )
    outputs = [output_of(ours, "mine"), output_of(theirs, "secret"), output_of(probe, "probe", True)]
    view = build_live_view(SERVER, [manager], outputs, StepHistory())
    shown = view.for_tenant("ours")
    assert [each.request_id for each in shown.sequences] == ["mine", "", ""]
    assert b"secret" not in msgspec.json.encode(shown)
    assert [each.request_id for each in view.for_tenant("theirs").sequences] == ["", "secret", ""]
    assert view.for_tenant("a third") is view.state and not any(each.request_id for each in view.state.sequences)
