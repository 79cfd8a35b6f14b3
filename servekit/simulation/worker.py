"""Simulate a model and a worker: execute plans over KV pages, and compute the same answers without any.

The model's tokens are bytes. The state of a position is a function of the token there and of all before it, and the
next token is a function of all states. So one wrong page changes all tokens that follow. The arithmetic is so simple
that a client can repeat it to check an answer (docs/simulated_model.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import accumulate, chain

from msgspec.structs import replace

from servekit.protocol.messages import PromptLogprobs, SlotAssignment, StepPlan, StepResult, TokenLogprobs
from servekit.protocol.sampling_params import SamplingParams

VOCAB_SIZE = 256
# Answers are printable ASCII, so that each token is one character of the text.
FIRST_ANSWER, NUM_ANSWERS = 32, 95
# A linear congruential generator (Knuth, TAOCP 2, section 3.3.4: MMIX), cut to so few bits that sums of states fit.
MULTIPLIER, INCREMENT, STATE_MASK = 6364136223846793005, 1442695040888963407, 2**40 - 1
GARBAGE = 1  # no answer has this token, and no position this state
SKIPPED_BITS = 17  # the lowest of a sum of such states have short periods


class Violation(Exception):
    """An invariant or a promise does not hold."""


def next_token(states: Iterable[int]) -> int:
    """The simulated model's output layer: a function of every position's KV before it."""
    return FIRST_ANSWER + (sum(states) >> SKIPPED_BITS) % NUM_ANSWERS


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
            token_id = next_token(states)
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


class SimulatedWorker:
    """Executes step plans over pages that hold states of the simulated model.

    It does what a real worker does, and checks everything by what it samples: before each token it reads the sequence
    back through its block table. So a block given to two sequences, a skipped chunk, a prefix shared by mistake, a
    stale slot or a missing copy all lead to a wrong token, and one wrong token changes all that follow.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_batched_tokens: int) -> None:
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pages = [[0] * block_size for _ in range(num_blocks)]
        self.tokens: dict[int, dict[int, int]] = {}  # slot -> position -> token, as in the worker's token table
        self.block_tables: dict[int, list[int]] = {}
        self.slot_assignments: dict[int, SlotAssignment] = {}
        self.slots_with_logprobs: set[int] = set()  # whose sequences requested logprobs
        self.num_steps = 0

    def execute(self, plan: StepPlan, deferring: Collection[int] = ()) -> StepResult:
        """Execute one step; no token is sampled for the slots in `deferring`, or behind a token that was not sampled.

        Raises Violation for a plan that no manager may make.
        """
        self.num_steps += 1
        if not 0 < plan.num_tokens <= self.max_num_batched_tokens:
            raise Violation(f"a step of {plan.num_tokens} tokens, the budget is {self.max_num_batched_tokens}")
        if len({chunk.slot for chunk in plan.chunks}) != len(plan.chunks):
            raise Violation(f"a slot is scheduled twice in {plan}")
        for source, target in plan.copies:
            self.pages[target] = self.pages[source].copy()
        for assignment in plan.slot_assignments:
            slot, sampling = assignment.slot, assignment.sampling
            self.tokens[slot], self.block_tables[slot], self.slot_assignments[slot] = {}, [], assignment
            if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
                self.slots_with_logprobs.add(slot)
            else:
                self.slots_with_logprobs.discard(slot)
        pages, block_size = self.pages, self.block_size
        sampled: list[int] = []
        deferred: list[int] = []  # indices into `sampled`
        for chunk in plan.chunks:
            known, table = self.tokens[chunk.slot], self.block_tables[chunk.slot]
            table.extend(chunk.new_block_ids)
            start, stop = chunk.start, chunk.start + chunk.num_tokens
            if chunk.token_ids:
                known.update(enumerate(chunk.token_ids, start=start))
            is_behind = start not in known  # behind a deferred token; the manager planned this before it knew that
            if is_behind:
                # Like a real worker, it writes KV that must never be read, and reports a token that must never be used.
                pages[table[start // block_size]][start % block_size] = GARBAGE
                if plan.step_id % 2:
                    deferred.append(len(sampled))
                sampled.append(GARBAGE)
                continue
            state = pages[table[(start - 1) // block_size]][(start - 1) % block_size] if start else 0
            for position in range(start, stop):
                state = next_state(state, known[position])
                pages[table[position // block_size]][position % block_size] = state
            if chunk.samples and chunk.slot in deferring:
                deferred.append(len(sampled))
                sampled.append(GARBAGE)
            elif chunk.samples:
                states = list(chain.from_iterable(map(pages.__getitem__, table)))
                known[stop] = next_token(states[:stop])
                sampled.append(known[stop])
        result = StepResult(plan.epoch, plan.step_id, tuple(sampled), 0.0, deferred=tuple(deferred))
        return self._with_logprobs(plan, result) if self.slots_with_logprobs else result

    def _with_logprobs(self, plan: StepPlan, result: StepResult) -> StepResult:
        of_sampled: list[TokenLogprobs | None] = []
        of_prompts = []
        for index, chunk in enumerate(plan.chunks):
            assignment, stop = self.slot_assignments[chunk.slot], chunk.start + chunk.num_tokens
            num_top, num_top_of_prompt = assignment.sampling.logprobs, assignment.sampling.prompt_logprobs
            if chunk.samples:
                if num_top is None or stop not in self.tokens[chunk.slot]:  # not requested, or not sampled
                    of_sampled.append(None)
                else:
                    of_sampled.append(self._logprobs_after(chunk.slot, stop - 1, num_top))
            predicting = range(chunk.start, min(stop, assignment.prompt_length - 1))
            if num_top_of_prompt is not None and predicting:
                predicted = [self._logprobs_after(chunk.slot, position, num_top_of_prompt) for position in predicting]
                of_prompts.append(PromptLogprobs(index, chunk.start + 1, tuple(predicted)))
        return replace(result, logprobs=tuple(of_sampled), prompt_logprobs=tuple(of_prompts))

    def _logprobs_after(self, slot: int, position: int, num_top: int) -> TokenLogprobs:
        """The logprobs of the token after `position`, from the states in the pages."""
        block = self.block_tables[slot][position // self.block_size]
        return token_logprobs(self.pages[block][position % self.block_size], self.tokens[slot][position + 1], num_top)
