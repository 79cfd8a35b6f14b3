"""Claims about plans that are resolved, and about what the host learns from their results, without any model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from servekit.protocol.messages import ScheduledChunk, SlotAssignment, StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from workers.batch import SlotTable, make_batch
from workers.parallel.rank_group import RankGroup
from workers.speculation.drafter import Drafter, DraftRequest
from workers.speculation.speculator import LaunchedStep, Speculator

VOCAB_SIZE = 100
EOS = (98, 99)
PROMPT = (5, 6, 7)
SAMPLING = SamplingParams(max_tokens=50)


class FixedDrafter(Drafter):
    """Proposes what it is told, and records what it is called with."""

    def __init__(self, *drafts: int) -> None:
        self.drafts: tuple[int, ...] = drafts
        self.requests: list[DraftRequest] = []
        self.committed: list[tuple[int, int, tuple[int, ...]]] = []

    def commit(self, slot: int, start: int, token_ids: tuple[int, ...]) -> None:
        self.committed.append((slot, start, token_ids))

    def propose(self, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        self.requests += requests
        return [self.drafts] * len(requests)


class ForcingGrammars:
    """Grammars that force given tokens behind a number of tokens of the answer."""

    def __init__(self) -> None:
        self.forced: dict[int, tuple[int, ...]] = {}

    def forced_tokens(self, assignment: SlotAssignment, num_outputs: int, max_drafts: int) -> tuple[int, ...]:
        return self.forced.get(num_outputs, ())[:max_drafts]


class Harness:
    """A speculator, and steps that sample what the test says."""

    def __init__(self, *drafts: int, max_length: int = 60, group: Any = None) -> None:
        self.drafter = FixedDrafter(*drafts)
        self.table = SlotTable(4, max_length, 64, 4, torch.device("cpu"))
        self.grammars: Any = ForcingGrammars()
        self.speculator = Speculator(self.drafter, self.grammars, self.table, VOCAB_SIZE, EOS, group)
        self.num_steps = 0

    def launch(
        self,
        *chunks: ScheduledChunk,
        drawn: tuple[int, ...],
        assign: tuple[SlotAssignment, ...] = (),
        deferred: tuple[int, ...] = (),
    ) -> LaunchedStep:
        """Launch a step whose rows draw these tokens."""
        plan = self.speculator.resolve(StepPlan(0, self.num_steps, assign, chunks))
        self.num_steps += 1
        result = StepResult(0, plan.step_id, drawn, 0.0, deferred=deferred)
        return self.speculator.launched(plan, lambda: result, set(deferred))

    def step(self, *chunks: ScheduledChunk, **fields: Any) -> tuple[StepPlan, StepResult]:
        """Launch a step and wait for it. Returns the resolved plan, and the result."""
        step = self.launch(*chunks, **fields)
        return step.plan, self.speculator.settle(step)

    def begin(self, slot: int = 1, sampling: SamplingParams = SAMPLING, drawn: int = 20) -> None:
        """Give the slot to a sequence, and compute its prompt."""
        assignment = SlotAssignment(slot, sampling, len(PROMPT))
        prompt = ScheduledChunk(slot, 0, len(PROMPT), PROMPT, (0, 1), True)
        self.step(prompt, assign=(assignment,), drawn=(drawn,))


def decode(start: int, num_drafts: int = 0, slot: int = 1, known: tuple[int, ...] = ()) -> ScheduledChunk:
    return ScheduledChunk(slot, start, 1 + num_drafts, known, (), True, num_drafts)


def test_chunk_without_known_tokens_begins_at_the_newest_one_whatever_its_bound() -> None:
    harness = Harness(30, 31)
    harness.begin()
    plan, result = harness.step(decode(3, 2), drawn=(30, 9, 8))
    assert plan.chunks == (ScheduledChunk(1, 3, 3, (20, 30, 31), (), True, 2),)
    assert (result.token_ids, result.counts) == ((30, 9), (2,))
    # The manager counts both drafts as accepted, so its bound is 6. One was, so the newest token is at 5.
    plan, _ = harness.step(decode(6), drawn=(40,))
    assert plan.chunks == (ScheduledChunk(1, 5, 1, (), (), True),)
    assert harness.drafter.committed == [(1, 0, PROMPT), (1, 3, (20,)), (1, 4, (30, 9))]
    harness.step(decode(6, 1), drawn=(50, 51))
    assert harness.drafter.committed[3:] == [(1, 6, (40,)), (1, 7, (50,))]


def test_drafts_are_written_to_the_token_table_and_each_row_has_its_position() -> None:
    harness = Harness(30, 31)
    harness.begin()
    harness.table.token_ids[1 * harness.table.row_length + 3] = 20  # as the runner does with what it has sampled
    plan = harness.speculator.resolve(StepPlan(0, 1, (), (decode(3, 2),)))
    batch = make_batch(plan, harness.table)
    assert batch.input_ids.tolist() == [20, 30, 31]
    assert batch.position_ids.tolist() == [3, 4, 5]
    assert batch.logits_indices.tolist() == [0, 1, 2]
    assert [(row.position, row.num_outputs) for row in batch.sampling] == [(4, 1), (5, 2), (6, 3)]
    assert batch.sampled_cells.tolist() == [harness.table.row_length + position for position in (4, 5, 6)]


def test_rows_of_several_chunks_are_in_the_order_of_the_plan() -> None:
    harness = Harness(30, 31)
    harness.begin(slot=1)
    harness.begin(slot=2)
    prompt = ScheduledChunk(0, 0, 4, (1, 2, 3, 4), (20, 21), False)
    chunks = (decode(3, 2, slot=1), prompt, decode(3, 0, slot=2))
    plan = harness.speculator.resolve(StepPlan(0, 2, (SlotAssignment(0, SAMPLING, 9),), chunks))
    batch = make_batch(plan, harness.table)
    assert batch.logits_indices.tolist() == [0, 1, 2, 7]
    assert [(row.slot, row.position) for row in batch.sampling] == [(1, 4), (1, 5), (1, 6), (2, 4)]


@pytest.mark.parametrize(
    ("drafts", "usable"),
    [((1, 2, 3, 4, 5), (1, 2, 3)), ((1, VOCAB_SIZE, 2), (1,)), ((-1, 2), ()), ((2**70,), ()), ((), ())],
)
def test_drafts_that_no_one_asked_for_or_that_do_not_exist_are_dropped(
    drafts: tuple[int, ...], usable: tuple[int, ...]
) -> None:
    harness = Harness(*drafts)
    harness.begin()
    plan, _ = harness.step(decode(3, 3), drawn=(50,) * (1 + len(usable)))
    (chunk,) = plan.chunks
    assert (chunk.num_drafts, chunk.num_tokens) == (len(usable), 1 + len(usable))
    assert chunk.token_ids == ((20, *usable) if usable else ())


@pytest.mark.parametrize(
    ("sampling", "drafts", "usable"),
    [
        (SAMPLING, (1, 99, 2), (1,)),
        (SAMPLING, (98, 1, 2), ()),
        (SAMPLING, (1, 97, 2), (1, 97, 2)),
        (SamplingParams(max_tokens=50, stop_token_ids=(97,)), (1, 97, 2), (1,)),
        (SamplingParams(max_tokens=50, stop_token_ids=(97,)), (1, 2, 99), (1, 2)),
        (SamplingParams(max_tokens=50, stop_token_ids=(97,), ignore_eos=True), (99, 97, 2), (99,)),
    ],
)
def test_no_draft_is_verified_from_the_end_of_an_answer_on(
    sampling: SamplingParams, drafts: tuple[int, ...], usable: tuple[int, ...]
) -> None:
    """The token that ends it is the one after the drafts before it, which the model chooses anyway."""
    harness = Harness(*drafts)
    harness.begin(sampling=sampling)
    drawn = (*drafts, 50)[: 1 + len(usable)]
    plan, result = harness.step(decode(3, 3), drawn=drawn)
    (chunk,) = plan.chunks
    assert chunk.token_ids[1:] == usable and result.token_ids == drawn


@pytest.mark.parametrize(("ignores", "num_drafts"), [(False, 0), (True, 2)])
def test_a_sequence_that_has_ended_gets_no_drafts(ignores: bool, num_drafts: int) -> None:
    """The manager may have planned them before it knew the end."""
    harness = Harness(30, 31)
    harness.begin(slot=1, sampling=SamplingParams(max_tokens=50, ignore_eos=ignores), drawn=99)
    harness.begin(slot=2)
    plan, _ = harness.step(decode(3, 2, slot=1), decode(3, 2, slot=2), drawn=(50,) * (4 + num_drafts))
    assert [chunk.num_drafts for chunk in plan.chunks] == [num_drafts, 2]
    assert [request.slot for request in harness.drafter.requests] == ([1, 2] if ignores else [2])


def test_a_token_that_a_grammar_forces_may_end_the_answer_too() -> None:
    harness = Harness(40)
    harness.grammars.forced[1] = (30, 99)
    harness.begin(sampling=SamplingParams(max_tokens=50, grammar="start: /a+/"))
    plan, _ = harness.step(decode(3, 2), drawn=(30, 99))
    assert plan.chunks[0].token_ids == (20, 30)


def test_tokens_behind_the_last_draft_stay_within_the_row_of_the_table() -> None:
    harness = Harness(1, 2, 3, 4, 5, max_length=6)  # positions 0 to 6
    harness.begin()
    harness.step(decode(3, 5), drawn=(9, 9, 9))
    assert harness.drafter.requests == [DraftRequest(1, 4, 2)]


def test_drafts_may_come_with_a_known_token() -> None:
    harness = Harness(30)
    harness.begin()
    plan, _ = harness.step(decode(3, 1, known=(20,)), drawn=(9, 9))
    assert plan.chunks == (ScheduledChunk(1, 3, 2, (20, 30), (), True, 1),)


def test_drafts_that_a_plan_names_are_verified_as_they_are() -> None:
    """So memory is measured with as many rows as a step can have, whatever the drafter makes."""
    harness = Harness(30)
    harness.begin()
    plan, _ = harness.step(decode(3, 3, known=(20, 1, 2, 3)), drawn=(9, 9, 9, 9))
    assert plan.chunks == (ScheduledChunk(1, 3, 4, (20, 1, 2, 3), (), True, 3),)


def test_behind_a_deferred_token_nothing_is_drafted_or_learned_until_the_manager_sends_known_tokens() -> None:
    harness = Harness(30)
    harness.begin()
    assert harness.step(decode(3), drawn=(77,), deferred=(0,))[1].deferred == (0,)
    plan, _ = harness.step(decode(4, 1), drawn=(78,))  # planned before the manager knew
    assert plan.chunks == (decode(4),)
    assert harness.drafter.requests == []
    plan, result = harness.step(decode(3, 1, known=(20,)), drawn=(30, 9))
    assert (plan.chunks[0].token_ids, result.token_ids) == ((20, 30), (30, 9))
    assert harness.drafter.committed == [(1, 0, PROMPT), (1, 3, (20,)), (1, 3, (20,)), (1, 4, (30, 9))]


def test_token_that_is_deferred_behind_accepted_drafts_is_met_again_at_the_first_position() -> None:
    harness = Harness(30, 31)
    harness.begin()
    _, result = harness.step(decode(3, 2), drawn=(30, 31, 77), deferred=(2,))
    assert (result.token_ids, result.counts, result.deferred) == ((30, 31), (2,), ())
    plan, _ = harness.step(decode(6), drawn=(9,))
    assert plan.chunks[0].start == 5


CONSTRAINED = SamplingParams(max_tokens=9, grammar="{}")


def test_tokens_that_a_grammar_forces_go_before_those_of_the_drafter() -> None:
    harness = Harness(30, 31, 32)
    harness.grammars.forced = {1: (50, VOCAB_SIZE), 2: (60, 61, 62, 63)}
    harness.begin(sampling=CONSTRAINED)
    harness.begin(slot=2)
    plan, _ = harness.step(decode(3, 3), decode(3, 3, slot=2), drawn=(9, 9, 9, 9, 9, 9))
    assert [chunk.token_ids for chunk in plan.chunks] == [(20, 50), (20, 30, 31, 32)]
    plan, _ = harness.step(decode(4, 3), drawn=(60, 9, 9, 9))
    assert plan.chunks[0].token_ids == (9, 60, 61, 62)
    plan, _ = harness.step(decode(6, 1), drawn=(9, 9))
    assert plan.chunks[0].token_ids == (9, 30), "nothing is forced there"
    assert [request.slot for request in harness.drafter.requests] == [2, 1]


def test_sequence_with_a_grammar_has_no_drafts_where_there_are_several_ranks() -> None:
    harness = Harness(30, group=RankZero(30))
    harness.grammars.forced = {1: (50,)}
    harness.begin(sampling=CONSTRAINED)
    plan, _ = harness.step(decode(3, 1), drawn=(9,))
    assert plan.chunks == (decode(3),)


def test_tokens_in_flight_of_a_former_sequence_are_not_taken_for_those_of_the_next() -> None:
    harness = Harness(30)
    harness.begin()
    step = harness.launch(decode(3), drawn=(9,))
    again = SlotAssignment(1, SAMPLING, len(PROMPT))
    harness.launch(ScheduledChunk(1, 0, 3, PROMPT, (3,), True), assign=(again,), drawn=(21,))
    harness.speculator.settle(step)
    plan, _ = harness.step(decode(3, 1), drawn=(8, 8))
    assert plan.chunks[0].token_ids == (21, 30)
    assert harness.drafter.committed[1:] == [(1, 0, PROMPT), (1, 3, (21,)), (1, 4, (8,))]


def test_steps_ahead_without_drafts_are_resolved_before_their_tokens_are_read() -> None:
    harness = Harness(30)
    harness.begin()
    steps = [harness.launch(decode(3 + number), drawn=(40 + number,)) for number in range(3)]
    assert [step.plan.chunks[0].start for step in steps] == [3, 4, 5]
    assert all(step.result is None for step in steps)
    assert harness.speculator.settle(steps[2]).token_ids == (42,)  # reads those before it, too
    assert harness.speculator.settle(steps[0]).token_ids == (40,)
    harness.step(decode(6, 1), drawn=(50, 51))  # only this step asks the drafter
    assert harness.drafter.committed == [(1, 0, PROMPT), (1, 3, (20, 40, 41, 42)), (1, 7, (50,))]


def test_plan_with_drafts_waits_for_the_steps_before_it() -> None:
    harness = Harness(30)
    harness.begin()
    before = harness.launch(decode(3), drawn=(40,))
    drafting = harness.launch(decode(4, 1), drawn=(30, 9))
    assert before.result is not None and drafting.result is None
    behind = harness.launch(decode(6), drawn=(8,))  # its beginning depends on what was accepted
    assert drafting.result is not None and behind.plan.chunks[0].start == 6


class RankZero(RankGroup):
    """Stands for a group of ranks, in which rank 0 has made these drafts."""

    def __init__(self, *drafts: int) -> None:
        self._drafts = drafts

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        x.fill_(-1)
        x[0, : len(self._drafts)] = torch.tensor(self._drafts)
        return x


def test_all_ranks_verify_the_drafts_of_the_first() -> None:
    harness = Harness(50, 51, group=RankZero(30))
    harness.begin()
    plan, _ = harness.step(decode(3, 3), drawn=(9, 9))
    assert plan.chunks[0].token_ids == (20, 30)


def test_drafts_that_are_the_same_on_all_ranks_are_not_sent() -> None:
    harness = Harness(50, 51, group=RankZero(30))
    harness.drafter.is_same_on_all_ranks = True
    harness.begin()
    plan, _ = harness.step(decode(3, 3), drawn=(9, 9, 9))
    assert plan.chunks[0].token_ids == (20, 50, 51)


def test_plan_that_only_tells_new_blocks_is_executed_as_it_is_and_its_blocks_are_appended_once() -> None:
    harness = Harness(30)
    harness.begin()
    chunk = ScheduledChunk(1, 3, 1, (), (7,), True)
    plan, result = harness.step(chunk, drawn=(40,))
    assert plan.chunks == (chunk,) and result.token_ids == (40,)
    assert harness.table.num_blocks[1] == 3 and harness.table.block_tables[1, :3].tolist() == [0, 1, 7]
