"""Simulate a model and a worker: execute plans over KV pages, and compute the same answers without any.

The model's tokens are bytes. The state of a position is a function of the token there and of all before it, and the
next token is a function of all states. So one wrong page changes all tokens that follow. The arithmetic is so simple
that a client can repeat it to check an answer (docs/simulated_model.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate, chain
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from servekit.protocol.messages import (
    PromptLogprobs,
    ScheduledChunk,
    SlotAssignment,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TransferReport,
)
from servekit.protocol.sampling_params import SamplingParams
from servekit.simulation.page import GARBAGE, Page

VOCAB_SIZE = 256
# Answers are printable ASCII, so that each token is one character of the text.
FIRST_ANSWER, NUM_ANSWERS = 32, 95
# A linear congruential generator (Knuth, TAOCP 2, section 3.3.4: MMIX), cut to so few bits that sums of states fit.
MULTIPLIER, INCREMENT, STATE_MASK = 6364136223846793005, 1442695040888963407, 2**40 - 1
SKIPPED_BITS = 17  # the lowest of a sum of such states have short periods
NO_DRAFTS: Mapping[int, tuple[int, int]] = {}
MAX_STEPS_BEHIND = 8  # more steps than any manager has in flight


class Violation(Exception):
    """An invariant or a promise does not hold."""


def next_token(sum_of_states: int) -> int:
    """The simulated model's output layer: a function of the states of all positions before it."""
    return FIRST_ANSWER + (sum_of_states >> SKIPPED_BITS) % NUM_ANSWERS


def next_state(previous: int, token_id: int) -> int:
    """What the simulated model stores for a position: a function of its token and of all before."""
    return (previous * MULTIPLIER + token_id + INCREMENT) & STATE_MASK


def token_logprobs(state: int, token_id: int, num_top: int) -> TokenLogprobs:
    """The simulated model's logprobs of a token that follows a state."""
    logprob = -float(hash((state, token_id)) % 997)
    return TokenLogprobs.of(logprob, range(num_top), [logprob + i for i in range(num_top)])


class NaiveReference:
    """Serves one prompt at a time, one token at a time: nothing is shared, nothing batched. 30 lines to trust."""

    def __init__(self, eos_token_ids: Iterable[int] = ()) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)

    def output(self, prompt: Iterable[int], sampling: SamplingParams) -> list[int]:
        """The whole answer to one prompt."""
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.eos_token_ids)
        states: list[int] = []
        for token_id in prompt:
            states.append(self._state(states, token_id))
        output: list[int] = []
        while True:
            token_id = next_token(sum(states))
            output.append(token_id)
            if token_id in stops or len(output) == sampling.max_tokens:
                return output
            states.append(self._state(states, token_id))

    @staticmethod
    def logprobs(prompt: Iterable[int], num_top: int) -> list[TokenLogprobs]:
        """The logprobs of every token but the first."""
        token_ids = list(prompt)
        states = list(accumulate(token_ids, next_state, initial=0))[1:-1]
        return [token_logprobs(state, token_id, num_top) for state, token_id in zip(states, token_ids[1:], strict=True)]

    @staticmethod
    def _state(states: list[int], token_id: int) -> int:
        return next_state(states[-1] if states else 0, token_id)


class Connector(Protocol):
    """The KV connector of a simulated worker."""

    def execute(self, plan: StepPlan, pages: list[Page]) -> TransferReport:
        """Do what a plan says before anything is computed."""

    def send(self, plan: StepPlan, pages: list[Page], report: TransferReport) -> TransferReport:
        """Do what a plan says behind all that is computed. `report` is what `execute` returned."""

    def damage(self, number: int) -> None:
        """Let the loads of some blocks fail, as if by chance."""


class SimulatedConnector:
    """Keeps the pages of blocks by their keys, as many as it has room for; the least recently used go first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pages: OrderedDict[bytes, Page] = OrderedDict()
        self.damaged: set[bytes] = set()  # keys whose loads fail

    def execute(self, plan: StepPlan, pages: list[Page]) -> TransferReport:
        """Do what a plan says, and return what came of it. Raises Violation if a key has two contents."""
        for key, _ in plan.loads:
            if key in self.pages:
                self.pages.move_to_end(key)
        num_stored = 0
        for block, key in plan.stores:
            if self.pages.setdefault(key, pages[block].copy()) != pages[block]:
                raise Violation(f"block {block} is stored with other contents than those that its key had before")
            num_stored += 1
            self.pages.move_to_end(key)
        dropped = [self._drop() for _ in range(len(self.pages) - self.num_blocks)]
        failed = []
        for index, (key, block) in enumerate(plan.loads):
            if key in self.pages and key not in self.damaged:
                pages[block] = self.pages[key].copy()
            else:
                self.pages.pop(key, None)
                self.damaged.discard(key)
                pages[block] = Page.of_garbage(len(pages[block].states))
                failed.append(index)
        return TransferReport(
            tuple(failed),
            tuple(dropped),
            num_stored,
            num_loaded_from_memory=len(plan.loads) - len(failed),
            num_in_memory=len(self.pages),
        )

    def send(self, plan: StepPlan, pages: list[Page], report: TransferReport) -> TransferReport:
        """Raise Violation if a plan sends blocks, which only a prefill worker does."""
        if plan.sends:
            raise Violation(f"{plan} is for a prefill worker")
        return report

    def damage(self, number: int) -> None:
        """Let the loads of some of the kept blocks fail, as if by chance."""
        self.damaged.update(key for index, key in enumerate(self.pages) if (index + number) % 3 == 0)

    def _drop(self) -> bytes:
        key, _ = self.pages.popitem(last=False)
        self.damaged.discard(key)
        return key


class _Slot(Struct):
    """What the worker knows of the sequence in a slot."""

    assignment: SlotAssignment
    tokens: dict[int, int] = field(default_factory=dict)  # by position, as in a worker's token table
    block_table: list[int] = field(default_factory=list)
    newest: int = -1  # the position of the newest known token
    rejected: tuple[int, ...] = ()  # how many drafts each of the newest steps rejected, since the first one that did
    is_behind: bool = False  # its newest token was deferred

    def learn(self, start: int, token_ids: tuple[int, ...]) -> None:
        """Take over the tokens that the manager knows. It knows all of them, so no rejection is in flight."""
        self.tokens.update(enumerate(token_ids, start=start))
        self.newest = start + len(token_ids) - 1
        self.is_behind = False
        self.rejected = ()


class _Span(Struct, frozen=True, gc=False):
    """The tokens that one chunk samples."""

    slot: _Slot
    start: int | None  # the position of the first one; None if they mean nothing
    token_ids: list[int]
    num_drafts: int = 0


class SimulatedWorker:
    """Executes step plans over pages that hold states of the simulated model.

    It does what a real worker does, and checks everything by what it samples: before each token it adds up the states
    in the blocks of the sequence's block table. So a block given to two sequences, a skipped chunk, a prefix shared by
    mistake, a stale slot or a missing copy all lead to a wrong token, and one wrong token changes all that follow.

    Its drafts are right or wrong as it is told. It keeps a token table, and writes garbage for wrong drafts, as a real
    worker does. So a position that is not computed again after a rejected draft leads to a wrong token, too.

    Its KV connector stores blocks by their keys. A load that fails leaves garbage in its block.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        drafting_s: float = 0.0,
        connector: Connector | None = None,
    ) -> None:
        """`drafting_s` is what it reports for each round of its drafter, which makes one draft for each sequence."""
        self.connector = connector
        self.block_size = block_size
        self.drafting_s = drafting_s
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pages = [Page.of([0] * block_size) for _ in range(num_blocks)]
        self.slots: dict[int, _Slot] = {}
        self.slots_with_logprobs: set[int] = set()  # whose sequences requested logprobs
        self.num_steps = 0

    def execute(
        self, plan: StepPlan, deferring: Collection[int] = (), drafts: Mapping[int, tuple[int, int]] = NO_DRAFTS
    ) -> StepResult:
        """Execute one step; no token is sampled for the slots in `deferring`, or after a token that was not sampled.

        `drafts` has, by slot, how many drafts the worker makes, and how many of these are right. It makes none for
        other slots, and never more than were planned.

        Raises Violation for a plan that no manager may make.
        """
        transfers = self._prepare(plan)
        spans: list[_Span] = []
        deferred: list[int] = []
        for chunk in plan.chunks:
            slot = self.slots[chunk.slot]
            slot.block_table.extend(chunk.new_block_ids)
            if chunk.token_ids:
                slot.learn(chunk.start, chunk.token_ids)
            if slot.is_behind:
                if plan.step_id % 2:
                    deferred.append(len(spans))
                spans.append(self._execute_behind(slot, chunk, plan.step_id))
                continue
            # The manager may not know of drafts that were rejected meanwhile: then the chunk begins earlier.
            start = chunk.start if chunk.token_ids else slot.newest
            if chunk.num_drafts or start != chunk.start:
                self._check_drafts(slot, chunk, start)
            stop = start + chunk.num_tokens - chunk.num_drafts
            self._compute(slot, start, stop)
            if not chunk.samples:
                continue
            if chunk.slot in deferring:
                slot.is_behind = True
                deferred.append(len(spans))
                spans.append(_Span(slot, None, [GARBAGE]))
                continue
            token_ids, num_drafts = [self._sample(slot, stop)], 0
            if chunk.num_drafts:
                num_made, num_right = drafts.get(chunk.slot, (0, 0))
                num_drafts = min(chunk.num_drafts, num_made)
                token_ids += self._execute_drafts(slot, num_drafts, num_right)
            if chunk.num_drafts or slot.rejected:
                slot.rejected = (*slot.rejected, chunk.num_drafts + 1 - len(token_ids))[-MAX_STEPS_BEHIND:]
            spans.append(_Span(slot, stop, token_ids, num_drafts))
        if self.connector is not None and transfers is not None:
            transfers = self.connector.send(plan, self.pages, transfers)
        token_ids = list(chain.from_iterable([span.token_ids for span in spans]))
        counts = [len(span.token_ids) for span in spans] if len(token_ids) > len(spans) else []
        num_drafts_of_spans = [span.num_drafts for span in spans] if drafts else []
        result = StepResult(
            plan.epoch,
            plan.step_id,
            tuple(token_ids),
            0.0,
            deferred=tuple(deferred),
            counts=tuple(counts),
            num_drafts=tuple(num_drafts_of_spans),
            draft_time_s=self.drafting_s * max(num_drafts_of_spans, default=0),
            transfers=transfers,
        )
        return self._with_logprobs(plan, result, spans) if self.slots_with_logprobs else result

    def _prepare(self, plan: StepPlan) -> TransferReport | None:
        """Check a plan, transfer and copy its blocks, and assign its slots. Raises Violation."""
        self.num_steps += 1
        if not 0 < plan.num_tokens <= self.max_num_batched_tokens:
            raise Violation(f"a step of {plan.num_tokens} tokens, the budget is {self.max_num_batched_tokens}")
        if len({chunk.slot for chunk in plan.chunks}) != len(plan.chunks):
            raise Violation(f"a slot is scheduled twice in {plan}")
        if self.connector is None and (plan.stores or plan.loads or plan.sends):
            raise Violation(f"{plan} is for a worker with a KV connector")
        transfers = None if self.connector is None else self.connector.execute(plan, self.pages)
        for source, target in plan.copies:
            self.pages[target] = self.pages[source].copy()
        for assignment in plan.slot_assignments:
            self._assign(assignment)
        return transfers

    def _assign(self, assignment: SlotAssignment) -> None:
        slot, sampling = assignment.slot, assignment.sampling
        self.slots[slot] = _Slot(assignment)
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            self.slots_with_logprobs.add(slot)
        else:
            self.slots_with_logprobs.discard(slot)

    def _execute_behind(self, slot: _Slot, chunk: ScheduledChunk, step_id: int) -> _Span:
        """Execute a chunk after a deferred token, which the manager planned before it knew that.

        Like a real worker, it writes KV that must never be read, and reports tokens that must never be used.
        """
        self._write_garbage(slot, chunk.start, chunk.start + chunk.num_tokens)
        count = 1 if step_id % 2 else 1 + step_id // 2 % (1 + chunk.num_drafts)
        return _Span(slot, None, [GARBAGE] * count, count - 1)

    def _check_drafts(self, slot: _Slot, chunk: ScheduledChunk, start: int) -> None:
        """Check a chunk with drafts, or after drafts, which begins at `start`.

        Raises Violation if the plan is based on other rejections than those of the newest steps, or goes too far.
        """
        if chunk.start != start and chunk.start - start not in accumulate(reversed(slot.rejected)):
            raise Violation(f"{chunk} is based on rejections that did not happen: its newest token is at {start}")
        max_length = slot.assignment.prompt_length + slot.assignment.sampling.max_tokens
        bound, num_positions = chunk.start + chunk.num_tokens, len(slot.block_table) * self.block_size
        if chunk.num_drafts and bound >= max_length:
            raise Violation(f"{chunk} computes drafts that its sequence of at most {max_length} tokens cannot have")
        if bound > num_positions or (chunk.num_drafts and num_positions >= max_length - 1 + self.block_size):
            raise Violation(f"{chunk} has {num_positions} positions in its blocks, for at most {max_length} tokens")

    def _compute(self, slot: _Slot, start: int, stop: int) -> None:
        """Compute the states of positions whose tokens are known."""
        pages, block_size, known, table = self.pages, self.block_size, slot.tokens, slot.block_table
        state = pages[table[(start - 1) // block_size]].states[(start - 1) % block_size] if start else 0
        for position in range(start, stop):
            state = next_state(state, known[position])
            pages[table[position // block_size]].write(position % block_size, state)

    def _sample(self, slot: _Slot, position: int) -> int:
        """Return the token at a position after all that are computed, and put it into the token table."""
        pages, table = self.pages, slot.block_table
        num_full, num_rest = divmod(position, self.block_size)
        total = sum([pages[block].total for block in table[:num_full]])
        if num_rest:
            total += sum(pages[table[num_full]].states[:num_rest])
        token_id = next_token(total)
        slot.tokens[position], slot.newest = token_id, position
        return token_id

    def _execute_drafts(self, slot: _Slot, num_drafts: int, num_right: int) -> list[int]:
        """Compute drafts after the newest token, and return the token after each one that is right."""
        start = slot.newest
        stop = start + num_drafts
        token_ids = []
        for position in range(start, min(start + num_right, stop)):
            self._compute(slot, position, position + 1)
            token_ids.append(self._sample(slot, position + 1))
        self._write_garbage(slot, slot.newest, stop)
        return token_ids

    def _write_garbage(self, slot: _Slot, start: int, stop: int) -> None:
        """Write states that must never be read."""
        for position in range(start, stop):
            self.pages[slot.block_table[position // self.block_size]].write(position % self.block_size, GARBAGE)

    def _with_logprobs(self, plan: StepPlan, result: StepResult, spans: list[_Span]) -> StepResult:
        of_sampled: list[TokenLogprobs | None] = []
        of_prompts = []
        for span in spans:
            num_top = span.slot.assignment.sampling.logprobs
            for number in range(len(span.token_ids)):
                if num_top is None or span.start is None:  # not requested, or not sampled
                    of_sampled.append(None)
                else:
                    of_sampled.append(self._logprobs_after(span.slot, span.start + number - 1, num_top))
        for index, chunk in enumerate(plan.chunks):
            slot, stop = self.slots[chunk.slot], chunk.start + chunk.num_tokens
            num_top_of_prompt = slot.assignment.sampling.prompt_logprobs
            predicting = range(chunk.start, min(stop, slot.assignment.prompt_length - 1))
            if num_top_of_prompt is not None and predicting:
                predicted = [self._logprobs_after(slot, position, num_top_of_prompt) for position in predicting]
                of_prompts.append(PromptLogprobs(index, chunk.start + 1, tuple(predicted)))
        return replace(result, logprobs=tuple(of_sampled), prompt_logprobs=tuple(of_prompts))

    def _logprobs_after(self, slot: _Slot, position: int, num_top: int) -> TokenLogprobs:
        """The logprobs of the token after `position`, from the states in the pages."""
        block = slot.block_table[position // self.block_size]
        return token_logprobs(self.pages[block].states[position % self.block_size], slot.tokens[position + 1], num_top)
