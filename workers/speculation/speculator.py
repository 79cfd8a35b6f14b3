"""Put drafts into the steps of a worker, and read from their results how many tokens each sequence has.

The manager's plan says how many drafts a chunk may have, and where it begins at the most. Only the worker knows the
drafts, and which of them were accepted. So the plan is *resolved* before it is executed: each chunk begins at its
sequence's newest token, and has the token ids of its drafts. From there on, drafts are known tokens like others.

On a CPU a step is complete before the next one begins, so everything is known. On a GPU, steps are launched ahead. A
plan then waits for the steps before it if it has drafts, because they continue tokens that the host must know, or a
sequence whose drafts are being verified. Other plans wait for nothing. After a wait, the device idles until the next
step is drafted and launched.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from servekit.protocol.messages import ScheduledChunk, SlotAssignment, StepPlan, StepResult
from workers.batch import SlotTable
from workers.parallel.rank_group import RankGroup
from workers.sampling.structured_output import GrammarMasks
from workers.speculation.acceptance import accept_drafts, drafts_of
from workers.speculation.drafter import Drafter, DraftRequest

NO_TOKEN = -1


@dataclass(slots=True, eq=False)
class _Progress:
    """What the host knows of the tokens of the sequence in a slot."""

    assignment: SlotAssignment
    stop_set: frozenset[int]  # the tokens that end the answer
    num_tokens: int = 0  # the newest token, which is not computed yet, is at position num_tokens - 1
    newest: int = NO_TOKEN  # the id of the newest token that has come to the host
    is_verifying: bool = False  # a step in flight has drafts of it, so that num_tokens is not known
    # The row that its newest token comes from was deferred, or failed. Until the manager sends known tokens, there is
    # no token for the chunks after it, and their samples are ignored.
    is_stalled: bool = False
    num_told: int = 0  # the drafter knows the tokens before this position
    untold: list[int] = field(default_factory=list)  # tokens after these, which the drafter gets when it is next asked

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar constrains the sequence. Only one of several ranks has the grammar's text."""
        return self.assignment.sampling.grammar is not None or self.assignment.grammar is not None

    @property
    def num_outputs(self) -> int:
        """Tokens of the answer."""
        return self.num_tokens - self.assignment.prompt_length


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step that was launched, and whose result may not have been read."""

    plan: StepPlan  # resolved
    read: Callable[[], StepResult]  # waits for the step; one token for each sampled row
    # Of each chunk that samples; None if its tokens are to be ignored.
    progress: list[_Progress | None] = field(default_factory=list)
    plain: list[_Progress] | None = None  # in place of `progress`, if each chunk samples one valid token
    result: StepResult | None = None  # with spans


class Speculator:
    """Owns the drafts of a runner's steps, and what the host knows of the sequences in its slots."""

    def __init__(
        self,
        drafter: Drafter,
        grammars: GrammarMasks,
        table: SlotTable,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        group: RankGroup | None = None,
    ) -> None:
        """`eos_token_ids` end an answer, unless it ignores them.

        `group` has the ranks that compute the same steps. All of them must verify the same drafts."""
        self.drafter = drafter
        self._grammars = grammars
        self._table = table
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._group = group
        self._progress: dict[int, _Progress] = {}  # by slot
        self._in_flight: deque[LaunchedStep] = deque()  # those that are not settled, the oldest first
        self._plain: list[_Progress] | None = None  # what `_find_plain` has found in the newest plan
        # What the drafter took for the newest plan: to make drafts, and for what it computes of prompts and answers
        # because there will be drafts after it.
        self.draft_time_s = self.draft_prompt_time_s = 0.0

    # -- before a step ------------------------------------------------------------------------------------------------

    def resolve(self, plan: StepPlan) -> StepPlan:
        """Read the plan's news, and return the plan with the true beginning and the drafts of each chunk.

        Afterwards the token table and the block tables have all that is new, drafts included. A plan without known
        tokens and drafts is its own resolved plan. Most plans are of this kind while drafts do not pay.
        """
        self._table.update(plan)
        for assignment in plan.slot_assignments:
            stop_set = assignment.sampling.stop_set(self._eos_token_ids)
            self._progress[assignment.slot] = _Progress(assignment, stop_set)
        self.drafter.begin(plan)
        self.draft_time_s = self.draft_prompt_time_s = 0.0
        self._plain = self._find_plain(plan)
        if self._plain is not None:
            return plan
        if self._must_wait(plan):
            self._settle_all()
        self._learn(plan)
        drafts = self._propose(plan) if plan.has_drafts else {}
        chunks = [self._resolved(chunk, drafts.get(chunk.slot, ())) for chunk in plan.chunks]
        self._table.write([(chunk.slot, chunk.start, chunk.token_ids) for chunk in chunks])
        return StepPlan(plan.epoch, plan.step_id, (), tuple(chunks))

    def _find_plain(self, plan: StepPlan) -> list[_Progress] | None:
        """Return the progress of each chunk's sequence, if all chunks only compute the newest token, without drafts.

        Each of them must begin where the manager expects it. Returns None for any other plan.
        """
        found = []
        for chunk in plan.chunks:
            progress = self._progress[chunk.slot]
            if chunk.token_ids or chunk.num_drafts or not chunk.samples or chunk.start != progress.num_tokens - 1:
                return None
            if progress.is_verifying or progress.is_stalled:
                return None
            found.append(progress)
        return found

    def _must_wait(self, plan: StepPlan) -> bool:
        """Return whether the plan needs something that steps in flight have not brought to the host yet."""
        if not self._in_flight:
            return False
        return any(
            (chunk.num_drafts and self._may_have_drafts(self._progress[chunk.slot]))
            or (not chunk.token_ids and self._progress[chunk.slot].is_verifying)
            for chunk in plan.chunks
        )

    def _learn(self, plan: StepPlan) -> None:
        """Take over the tokens that the manager knows. It sends them only if none of the sequence is in flight."""
        for assignment in plan.slot_assignments:
            if assignment.token_ids:
                self._tell(assignment.slot, 0, assignment.token_ids)
        for chunk in plan.chunks:
            if chunk.token_ids:
                progress, num_known = self._progress[chunk.slot], chunk.num_tokens - chunk.num_drafts
                progress.num_tokens = chunk.start + num_known
                progress.newest = chunk.token_ids[num_known - 1]
                progress.is_verifying = progress.is_stalled = False
                self._tell(chunk.slot, chunk.start, chunk.token_ids)

    def _tell(self, slot: int, start: int, token_ids: tuple[int, ...]) -> None:
        """Tell the drafter these tokens of a sequence, and before them those that it has not been told yet."""
        self._tell_untold(slot)
        self.drafter.commit(slot, start, token_ids)
        self._progress[slot].num_told = start + len(token_ids)

    def _tell_untold(self, slot: int) -> None:
        """Tell the drafter the tokens of a sequence that it has not been told yet."""
        progress = self._progress[slot]
        if progress.untold:
            self.drafter.commit(slot, progress.num_told, tuple(progress.untold))
            progress.num_told += len(progress.untold)
            progress.untold.clear()

    def _may_have_drafts(self, progress: _Progress) -> bool:
        """Whether drafts can be verified. Only one of several ranks knows which masks of a grammar are late."""
        return not (progress.is_stalled or (progress.is_constrained and self._group is not None))

    def _propose(self, plan: StepPlan) -> dict[int, tuple[int, ...]]:
        """Return the drafts for each slot that has any. The tokens that a grammar forces go before all others.

        A plan that was made before the manager knew that a sequence has ended may have drafts of it. They are left out,
        so that the next request waits less.
        """
        forced: dict[int, tuple[int, ...]] = {}
        requests = []
        for chunk in plan.chunks:
            progress = self._progress[chunk.slot]
            if not (chunk.num_drafts and self._may_have_drafts(progress)) or progress.newest in progress.stop_set:
                continue
            # The token after the last draft needs a cell, too.
            num_wanted = min(chunk.num_drafts, self._table.row_length - 1 - progress.num_tokens)
            if num_wanted <= 0:
                continue
            if progress.is_constrained:
                assignment, num_outputs = progress.assignment, progress.num_outputs
                if token_ids := self._grammars.forced_tokens(assignment, num_outputs, num_wanted):
                    forced[chunk.slot] = self._usable(token_ids, progress)
                    continue
            self._tell_untold(chunk.slot)
            requests.append(DraftRequest(chunk.slot, progress.num_tokens, num_wanted))
        return forced | self._drafted(requests)

    def _drafted(self, requests: list[DraftRequest]) -> dict[int, tuple[int, ...]]:
        """Return what the drafter proposes for each slot, and note how long it took."""
        if not requests:
            return {}
        prepared_s = time.monotonic()
        self.drafter.prepare(requests)
        began_s = time.monotonic()
        self.draft_prompt_time_s = began_s - prepared_s
        proposed = self.drafter.propose(requests)
        drafts = [
            self._usable(each[: request.max_drafts], self._progress[request.slot])
            for request, each in zip(requests, proposed, strict=True)
        ]
        if self._group is not None and not self.drafter.is_same_on_all_ranks:
            drafts = _broadcast(self._group, drafts, max(request.max_drafts for request in requests))
        self.draft_time_s = time.monotonic() - began_s
        return {request.slot: each for request, each in zip(requests, drafts, strict=True)}

    def _usable(self, drafts: tuple[int, ...], progress: _Progress) -> tuple[int, ...]:
        """Return the drafts before the first one that the model has no embedding for, or that ends the answer.

        If the answer ends there, the model's own token after the drafts before it says so. A position for the draft
        that ends it would only give a token after the end.
        """
        for number, token_id in enumerate(drafts):
            if not 0 <= token_id < self._vocab_size or token_id in progress.stop_set:
                return drafts[:number]
        return drafts

    def _resolved(self, chunk: ScheduledChunk, drafts: tuple[int, ...]) -> ScheduledChunk:
        progress, num_known = self._progress[chunk.slot], chunk.num_tokens - chunk.num_drafts
        # The step that measures memory names its drafts, so that it has as many as a step can have.
        drafts = chunk.token_ids[num_known : chunk.num_tokens] or drafts
        # Without a first token, any position will do, such as the manager's bound: the results are not used.
        is_exact = chunk.token_ids or progress.is_stalled
        start = chunk.start if is_exact else progress.num_tokens - 1
        assert is_exact or (num_known == 1 and start <= chunk.start), f"{chunk} does not begin at {start}"
        token_ids = (progress.newest, *drafts) if drafts else ()
        return ScheduledChunk(
            chunk.slot, start, num_known + len(drafts), token_ids, (), chunk.samples, num_drafts=len(drafts)
        )

    # -- after its launch ---------------------------------------------------------------------------------------------

    def compute_prompts(self) -> None:
        """Let the drafter compute what it needs of the step's prompts, and note how long it took."""
        began_s = time.monotonic()
        self.drafter.compute_prompts()
        self.draft_prompt_time_s += time.monotonic() - began_s

    def launched(self, plan: StepPlan, read: Callable[[], StepResult], invalid_rows: Collection[int]) -> LaunchedStep:
        """Note that a resolved plan was launched. In `invalid_rows` no valid token is sampled.

        `read` waits for the step, and returns one token for each sampled row.
        """
        plain, self._plain = self._plain, None
        if plain is not None and not invalid_rows:
            for progress in plain:
                progress.num_tokens += 1
            step = LaunchedStep(plan, read, plain=plain)
        else:
            step = LaunchedStep(plan, read, self._advance(plan, invalid_rows))
        self._in_flight.append(step)
        return step

    def _advance(self, plan: StepPlan, invalid_rows: Collection[int]) -> list[_Progress | None]:
        """Note how far each sequence is after a step. Returns the progress for each chunk that samples.

        It is None for a chunk whose tokens are to be ignored.
        """
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        found: list[_Progress | None] = []
        row = 0
        for chunk, drafts in zip(sampling, drafts_of(plan), strict=True):
            progress = self._progress[chunk.slot]
            found.append(None if progress.is_stalled else progress)
            if drafts:
                progress.is_verifying = True
            elif row in invalid_rows:
                progress.is_stalled = True
            elif not progress.is_stalled:
                progress.num_tokens = chunk.start + chunk.num_tokens + 1
            row += 1 + len(drafts)
        return found

    def settle(self, step: LaunchedStep) -> StepResult:
        """Wait for a step, and return its result with spans. Takes over its tokens, and those of all steps before it.

        May be called several times.
        """
        while step.result is None:
            self._settle_oldest()
        return step.result

    def _settle_all(self) -> None:
        while self._in_flight:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        step = self._in_flight.popleft()
        rows = step.read()
        if step.plain is not None:
            step.result = rows
            for each, token_id in zip(step.plain, rows.token_ids, strict=True):
                each.newest = token_id
                each.untold.append(token_id)
            return
        step.result = result = accept_drafts(step.plan, rows)
        invalid = {*result.deferred, *(span for span, _ in result.failures)}
        sampling = [chunk for chunk in step.plan.chunks if chunk.samples]
        counts = result.counts or (1,) * len(sampling)
        first = 0
        for span, (chunk, progress, count) in enumerate(zip(sampling, step.progress, counts, strict=True)):
            token_ids = result.token_ids[first : first + count]
            first += count
            # The slot may have been assigned anew meanwhile.
            if progress is not None and self._progress[chunk.slot] is progress:
                self._take(progress, chunk, token_ids, is_valid=span not in invalid)

    def _take(self, progress: _Progress, chunk: ScheduledChunk, token_ids: tuple[int, ...], *, is_valid: bool) -> None:
        """Take over the tokens that a chunk has sampled."""
        start = chunk.start + chunk.num_tokens - chunk.num_drafts  # of the first of them
        if chunk.num_drafts:
            progress.is_verifying = False
        if not is_valid:
            progress.is_stalled = True
            return
        progress.newest = token_ids[-1]
        if chunk.num_drafts:
            progress.num_tokens = start + len(token_ids)
            self._tell(chunk.slot, start, token_ids)
        else:
            progress.untold += token_ids


def _broadcast(group: RankGroup, drafts: list[tuple[int, ...]], max_drafts: int) -> list[tuple[int, ...]]:
    """Return rank 0's drafts on every rank. All ranks have the same requests, but may have made different drafts."""
    table = torch.full((len(drafts), max_drafts), NO_TOKEN, dtype=torch.int64)
    for row, of_request in enumerate(drafts):
        table[row, : len(of_request)] = torch.tensor(of_request, dtype=torch.int64)
    group.broadcast(table)
    return [tuple(token_id for token_id in row if token_id != NO_TOKEN) for row in table.tolist()]
