"""Claims about a frame: it agrees with the scheduler, block for block, whatever has happened to it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit import viewing
from servekit.client_queue import ClientQueue
from servekit.detokenizer import Detokenizer
from servekit.history import History
from servekit.live_view import CACHED, FENCED, FREE, MOST_CELLS, MOST_SEQUENCES, SHARED, LiveState, LiveWorker
from servekit.sequence import FinishReason, Sequence, Status
from servekit.simulation import Simulation
from servekit.submission import Generation
from servekit.viewing import block_kinds, look, snapshot
from servekit.workload_manager import WorkloadManager
from tests.sim.scenarios import make_scenario
from tests.unit.test_workload_manager import make_manager, make_sequence, make_worker

SERVER = LiveState(100.0, "ready", "serving", "demo", "1.2.3", [LiveWorker("serving")])


def generation_of(sequence: Sequence, request_id: str = "", is_probe: bool = False) -> Generation:
    return Generation(sequence, 0, cast(Detokenizer, None), ClientQueue(), request_id, is_probe)


def look_at(manager: WorkloadManager, *sequences: Sequence, tenant: str = "") -> LiveState:
    generations = [generation_of(sequence, f"r{sequence.sequence_id}") for sequence in sequences]
    return look(SERVER, manager, generations, History()).of(tenant)


def unrolled(state: LiveState) -> list[int]:
    return [kind for kind, length in state.cells for _ in range(length)]


# -- blocks ------------------------------------------------------------------------------------------------------------


def naive_kinds(manager: WorkloadManager) -> list[int]:
    """From the tables, one block after the other."""
    pool, kinds = manager.memory.pool, []
    fenced = {block for _, blocks in pool._fenced for block in blocks}
    for block in range(pool.num_blocks):
        owners = [s.sequence_id for s in manager._sequences.values() if block in s.block_table]
        if owners:
            kinds.append(owners[0] if len(owners) == 1 else SHARED)
        elif block in fenced:
            kinds.append(FENCED)
        else:
            kinds.append(CACHED if block in pool._cached else FREE)
            assert (block in pool._free) == (kinds[-1] == FREE)
    return kinds


def test_every_block_is_shown_as_what_it_is_after_whatever_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks, aborts, preemptions and lost workers, after every plan and every commit."""
    seen: Counter[int] = Counter()

    def compare(manager: WorkloadManager) -> None:
        running = [s for s in manager._sequences.values() if s.status is Status.RUNNING]
        kinds = block_kinds(manager.memory, running)
        assert kinds == naive_kinds(manager)
        pool = manager.memory.pool
        assert kinds.count(FREE) == pool.num_free and kinds.count(CACHED) == pool.num_cached
        seen.update(min(kind, 0) for kind in kinds)

    monkeypatch.setattr(WorkloadManager, "check", compare)
    for seed in range(40):
        Simulation(make_scenario(seed, num_arrivals=30)).run()
    assert min(seen[kind] for kind in (0, FREE, CACHED, SHARED, FENCED)) > 100, f"too little was seen: {seen}"


def naive_cell(kinds: list[int]) -> int:
    leased = Counter(kind for kind in kinds if kind >= 0 or kind == SHARED)
    if leased:
        most = max(leased.values())
        foremost = {kind for kind, num in leased.items() if num == most}
        return SHARED if SHARED in foremost else min(foremost)
    return FENCED if FENCED in kinds else CACHED if CACHED in kinds else FREE


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-4, 3), st.integers(1, 9)), min_size=1, max_size=40), st.integers(1, 9))
def test_cells_are_of_all_blocks_and_show_who_has_most_of_each(runs: list[tuple[int, int]], most_cells: int) -> None:
    kinds = [kind for kind, length in runs for _ in range(length)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(viewing, "block_kinds", lambda *_: kinds)
        patch.setattr(viewing, "MOST_CELLS", most_cells)
        size, cells = viewing._cells(cast(Any, None), [])
    told = [kind for kind, length in cells for _ in range(length)]
    assert len(told) <= most_cells and size == -(-len(kinds) // most_cells)
    assert told == [naive_cell(kinds[first : first + size]) for first in range(0, len(kinds), size)]
    assert all(before != after for (before, _), (after, _) in pairwise(cells)), "runs are whole"


def test_a_large_pool_fits_into_the_grid() -> None:
    manager = make_manager(num_blocks=100_001)
    state = look_at(manager)
    assert (
        state.blocks_per_cell == 25 and state.cells == [(FREE, 4001)] and sum(n for _, n in state.cells) <= MOST_CELLS
    )
    sequence = make_sequence(7)
    manager.add(sequence)
    manager.plan(0.0)
    assert look_at(manager, sequence).cells == [(7, 1), (FREE, 4000)], "a lone sequence is seen"


# -- sequences ---------------------------------------------------------------------------------------------------------


def test_a_sequence_is_told_from_its_arrival_to_its_end() -> None:
    manager = make_manager(max_num_batched_tokens=4, max_steps_in_flight=1)
    worker, sequence = make_worker(manager), make_sequence(3, prompt_length=6, max_tokens=8, ignore_eos=True)
    sequence.arrival_s = 50.0
    manager.add(sequence)

    def told() -> dict[str, Any]:
        (only,) = look_at(manager, sequence).sequences
        found: dict[str, Any] = msgspec.to_builtins(only)
        return found

    assert told() == {
        "sequence_id": 3,
        "state": "waiting",
        "num_prompt_tokens": 6,
        "num_computed_tokens": 0,
        "num_output_tokens": 0,
        "max_tokens": 8,
        "arrival_s": 50.0,
        "request_id": "r3",
    }
    for state, num_computed, num_output in (("prefill", 4, 0), ("decode", 6, 0), ("decode", 7, 1)):
        plan = manager.plan(60.0)
        assert plan is not None
        now = told()
        assert (now["state"], now["num_computed_tokens"], now["num_output_tokens"]) == (state, num_computed, num_output)
        assert now["first_scheduled_s"] == 60.0 and now["num_blocks"] == 2
        manager.commit(worker.execute(plan), 61.0)
    state = look_at(manager, sequence)
    assert (state.num_running, state.num_waiting, state.num_free_blocks) == (1, 0, 62)
    manager.finish(sequence, FinishReason.ABORT)
    at_rest = look_at(manager)
    assert not at_rest.sequences and at_rest.num_free_blocks + at_rest.num_cached_blocks == 64


def test_those_who_run_come_by_rank_and_then_those_in_line_and_no_more_than_fit() -> None:
    manager = make_manager(max_num_seqs=8, scheduling_policy="shortest", max_num_batched_tokens=1024, num_blocks=1024)
    sequences = [make_sequence(i, prompt_length=40 - i % 37) for i in range(MOST_SEQUENCES + 50)]
    for sequence in sequences:
        manager.add(sequence)
    manager.plan(0.0)
    told = [each.sequence_id for each in look_at(manager, *sequences).sequences]
    assert told[:8] == [sequence.sequence_id for sequence in manager._running]
    assert told[8:] == [s.sequence_id for s in sequences if s.status is Status.WAITING][: MOST_SEQUENCES - 8]
    manager.finish(manager._running[0], FinishReason.ABORT)
    alive = [sequence for sequence in sequences if sequence.status is not Status.FINISHED]
    assert len(look_at(manager, *alive).sequences) == MOST_SEQUENCES


def test_whose_a_sequence_is_only_its_own_tenant_is_told() -> None:
    manager = make_manager()
    ours, theirs, probe = make_sequence(0), make_sequence(1), make_sequence(2)
    ours.tenant, theirs.tenant, probe.tenant = "ours", "theirs", "ours"
    generations = [generation_of(ours, "mine"), generation_of(theirs, "secret"), generation_of(probe, "probe", True)]
    for sequence in (ours, theirs, probe):
        manager.add(sequence)
    view = look(SERVER, manager, generations, History())
    told = view.of("ours")
    assert [each.request_id for each in told.sequences] == ["mine", "", ""]
    assert b"secret" not in msgspec.json.encode(told)
    assert [each.request_id for each in view.of("theirs").sequences] == ["", "secret", ""]
    assert view.of("a third") is view.state and not any(each.request_id for each in view.state.sequences)


def test_the_metrics_see_what_a_viewer_sees() -> None:
    manager, worker = make_manager(), make_worker(make_manager())
    sequences = [make_sequence(i, prompt_length=9) for i in range(20)]
    for sequence in sequences:
        manager.add(sequence)
    plan = manager.plan(0.0)
    assert plan is not None
    manager.commit(worker.execute(plan), 1.0)
    state, told = look_at(manager, *sequences), snapshot(manager, 100.0)
    assert (state.num_running, state.num_waiting) == (told.num_running, told.num_waiting)
    assert state.num_free_blocks + state.num_cached_blocks == told.num_free_blocks
    assert (state.num_prompt_tokens, state.num_cached_tokens) == (told.num_prompt_tokens, told.num_cached_tokens)
    assert state.now_s == told.now_s == 100.0 and state.prefill_limit == told.prefill_limit
    assert state.limits is not None and state.limits.num_blocks == told.num_blocks == len(unrolled(state))
