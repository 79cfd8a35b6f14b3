"""Claims about which drafts are accepted, and what becomes of a step's rows."""

from __future__ import annotations

import pytest

from servekit.protocol.messages import ScheduledChunk, StepPlan, StepResult, TokenLogprobs
from workers.speculation.acceptance import accept_drafts


def plan(*drafts: tuple[int, ...]) -> StepPlan:
    """A resolved plan of one chunk that samples for each argument, with these drafts."""
    chunks = [
        ScheduledChunk(slot, 7, 1 + len(each), (40, *each) if each else (), (), True, len(each))
        for slot, each in enumerate(drafts)
    ]
    return StepPlan(2, 5, (), tuple(chunks))


def rows(*token_ids: int, **fields: object) -> StepResult:
    return StepResult(2, 5, token_ids, 0.0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drafts", "drawn", "span"),
    [
        ((1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4)),  # all right: one more token than drafts
        ((1, 2, 3), (1, 2, 9, 4), (1, 2, 9)),  # the model's own token in the place of the wrong draft
        ((1, 2, 3), (9, 2, 3, 4), (9,)),  # drafts behind a wrong one mean nothing, even if they are drawn
        ((1, 2, 3), (1, 9, 3, 4), (1, 9)),
        ((), (8,), (8,)),
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_the_model_did_not_draw(
    drafts: tuple[int, ...], drawn: tuple[int, ...], span: tuple[int, ...]
) -> None:
    result = accept_drafts(plan(drafts), rows(*drawn))
    assert result.token_ids == span
    assert (result.counts or (1,)) == (len(span),)


def test_counts_are_left_out_where_every_span_is_one_token() -> None:
    assert accept_drafts(plan((1,), ()), rows(9, 9, 5)) == rows(9, 5, num_drafts=(1, 0))


def test_result_without_drafts_is_the_same_object() -> None:
    result = rows(4, 5)
    assert accept_drafts(plan((), ()), result) is result


def test_chunks_that_sample_nothing_have_no_span() -> None:
    step = plan((1,), (2, 3))
    prompt = ScheduledChunk(8, 0, 4, (5, 6, 7, 8), (), False)
    step = StepPlan(2, 5, (), (step.chunks[0], prompt, step.chunks[1]))
    result = accept_drafts(step, rows(1, 6, 2, 3, 7))
    assert (result.token_ids, result.counts) == ((1, 6, 2, 3, 7), (2, 3))


def test_logprobs_follow_their_tokens() -> None:
    of_rows = tuple(TokenLogprobs(-float(row)) for row in range(5))
    result = accept_drafts(plan((1, 2), (3,)), rows(1, 9, 0, 7, 0, logprobs=of_rows))
    assert result.token_ids == (1, 9, 7)
    assert result.logprobs == (of_rows[0], of_rows[1], of_rows[3])


def test_deferred_row_behind_an_accepted_draft_ends_the_span_before_it() -> None:
    result = accept_drafts(plan((1, 2), ()), rows(1, 2, 3, 8, deferred=(1,)))
    assert (result.token_ids, result.counts, result.deferred) == ((1, 8), (), ())
    result = accept_drafts(plan((1, 2), ()), rows(1, 2, 3, 8, deferred=(2,)))
    assert (result.token_ids, result.counts, result.deferred) == ((1, 2, 8), (2, 1), ())


def test_deferred_or_failed_first_row_is_the_span_and_is_named_by_its_number() -> None:
    drawn = rows(1, 2, 1, 2, 4, 9, 9, deferred=(2,), failures=((5, "broken"),))
    result = accept_drafts(plan((1,), (1, 2), (3,)), drawn)
    assert (result.token_ids, result.counts) == ((1, 2, 1, 9), (2, 1, 1))
    assert (result.deferred, result.failures) == ((1,), ((2, "broken"),))


def test_failure_behind_a_rejected_draft_is_no_failure() -> None:
    result = accept_drafts(plan((1, 2)), rows(9, 2, 3, failures=((2, "broken"),), deferred=(1,)))
    assert (result.token_ids, result.failures, result.deferred) == ((9,), (), ())
