"""Decide which drafts are accepted: those that equal the token that the model chose for their position."""

from __future__ import annotations

from msgspec.structs import replace

from servekit.protocol.messages import StepPlan, StepResult


def drafts_of(plan: StepPlan) -> list[tuple[int, ...]]:
    """Return the drafts of each chunk that samples; empty for those without any."""
    return [chunk.token_ids[1:] if chunk.num_drafts else () for chunk in plan.chunks if chunk.samples]


def accept_drafts(plan: StepPlan, rows: StepResult) -> StepResult:
    """Return the step's result, with a span of tokens for each chunk that samples.

    `plan` is the one that was executed, with token ids for all drafts. `rows` has one token for each sampled row: the
    model's choice after the chunk's newest token, and after each draft. A choice is valid if all drafts before it are
    what the model chose itself. So a span is the first row, and one more for each accepted draft. A deferred or failed
    row after an accepted draft ends the span before it, and the next step meets it at its first position.
    """
    drafts_of_chunks = drafts_of(plan)
    if not any(drafts_of_chunks):
        return rows
    failures, deferred = dict(rows.failures), set(rows.deferred)
    kept: list[int] = []  # rows
    counts: list[int] = []
    first = 0
    for drafts in drafts_of_chunks:
        count = 1
        if first not in failures and first not in deferred:
            for row, draft in enumerate(drafts, start=first):
                if rows.token_ids[row] != draft or row + 1 in failures or row + 1 in deferred:
                    break
                count += 1
        kept += range(first, first + count)
        counts.append(count)
        first += 1 + len(drafts)
    assert first == len(rows.token_ids), f"{first} rows are sampled, and {len(rows.token_ids)} tokens came"
    first_rows = _first_rows(drafts_of_chunks)
    return replace(
        rows,
        token_ids=tuple(rows.token_ids[row] for row in kept),
        logprobs=tuple(rows.logprobs[row] for row in kept) if rows.logprobs else (),
        failures=tuple((span, failures[row]) for span, row in enumerate(first_rows) if row in failures),
        deferred=tuple(span for span, row in enumerate(first_rows) if row in deferred),
        counts=tuple(counts) if max(counts) > 1 else (),
        num_drafts=tuple(map(len, drafts_of_chunks)),
    )


def _first_rows(drafts_of_chunks: list[tuple[int, ...]]) -> list[int]:
    """Return the first row of each chunk that samples."""
    rows, row = [], 0
    for drafts in drafts_of_chunks:
        rows.append(row)
        row += 1 + len(drafts)
    return rows
