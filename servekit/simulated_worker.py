"""A model and a worker that are simulated: what a plan makes of pages, and what one prompt at a time would have given.

The model's tokens are bytes. Its state of a position is a function of the token there and of all before, and its next
token one of all states, so whatever goes wrong with a page is seen in all that follows. The arithmetic is simple enough
to be done again by a client that doubts its answer (docs/simulated_model.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain

from msgspec.structs import replace

from servekit.messages import PromptLogprobs, Seat, StepPlan, StepResult, TokenLogprobs
from servekit.sampling_params import SamplingParams

VOCAB_SIZE = 256
# It answers in printable ASCII, so that a token is a character of the text.
FIRST_ANSWER, NUM_ANSWERS = 32, 95
# A congruential generator (Knuth, TAOCP 2, section 3.3.4: MMIX), cut to as many bits as leave room for a sum of them.
MULTIPLIER, INCREMENT, STATE_MASK = 6364136223846793005, 1442695040888963407, 2**40 - 1
SKIPPED_BITS = 17  # the lowest of a sum of such states have short periods


class Violation(Exception):
    """Something is not as it must be."""


def next_token(states: Iterable[int]) -> int:
    """The simulated model's output layer: a function of every position's KV before it."""
    return FIRST_ANSWER + (sum(states) >> SKIPPED_BITS) % NUM_ANSWERS


def next_state(previous: int, token_id: int) -> int:
    """What the simulated model stores for a position: a function of its token and of all before."""
    return (previous * MULTIPLIER + token_id + INCREMENT) & STATE_MASK


def thought(state: int, token_id: int, num_top: int) -> TokenLogprobs:
    """What the simulated model thinks of a token that follows a state."""
    logprob = -float(hash((state, token_id)) % 997)
    return TokenLogprobs(logprob, tuple((i, logprob + i) for i in range(num_top)))


class NaiveReference:
    """Serves one prompt at a time, one token at a time, with nothing shared and nothing batched: 30 lines to trust."""

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
        """Of every token but the first."""
        token_ids = list(prompt)
        states = list(accumulate(token_ids, next_state, initial=0))[1:-1]
        return [thought(state, token_id, num_top) for state, token_id in zip(states, token_ids[1:], strict=True)]

    @staticmethod
    def _state(states: list[int], token_id: int) -> int:
        return next_state(states[-1] if states else 0, token_id)


class SimulatedWorker:
    """Executes step plans over pages that hold states of the simulated model.

    It does what a real worker does and trusts nothing: before it samples, it reads the sequence back through its block
    table, so a block handed to two sequences, a chunk skipped, a prefix shared that is none, a stale slot or a copy
    that was not made all lead to a wrong token, and one wrong token changes all that follow.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_batched_tokens: int) -> None:
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pages = [[0] * block_size for _ in range(num_blocks)]
        self.tokens: dict[int, dict[int, int]] = {}  # slot -> position -> token, as in the worker's token table
        self.block_tables: dict[int, list[int]] = {}
        self.seats: dict[int, Seat] = {}
        self.asking: set[int] = set()  # slots of those who ask what the model thinks of tokens
        self.num_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        if not 0 < plan.num_tokens <= self.max_num_batched_tokens:
            raise Violation(f"a step of {plan.num_tokens} tokens, the budget is {self.max_num_batched_tokens}")
        if len({row.slot for row in plan.rows}) != len(plan.rows):
            raise Violation(f"a slot is scheduled twice in {plan}")
        for source, target in plan.copies:
            self.pages[target] = self.pages[source].copy()
        for seat in plan.seats:
            self.tokens[seat.slot], self.block_tables[seat.slot], self.seats[seat.slot] = {}, [], seat
            asks = seat.sampling.logprobs is not None or seat.sampling.prompt_logprobs is not None
            (self.asking.add if asks else self.asking.discard)(seat.slot)
        pages, block_size, sampled = self.pages, self.block_size, []
        for row in plan.rows:
            known, table = self.tokens[row.slot], self.block_tables[row.slot]
            table.extend(row.new_block_ids)
            if row.token_ids:
                known.update(enumerate(row.token_ids, start=row.start))
            stop = row.start + row.num_tokens
            state = pages[table[(row.start - 1) // block_size]][(row.start - 1) % block_size] if row.start else 0
            for position in range(row.start, stop):
                state = next_state(state, known[position])
                pages[table[position // block_size]][position % block_size] = state
            if row.samples:
                states = list(chain.from_iterable(map(pages.__getitem__, table)))
                known[stop] = next_token(states[:stop])
                sampled.append(known[stop])
        result = StepResult(plan.epoch, plan.step_id, tuple(sampled), 0.0)
        return self._with_thoughts(plan, result) if self.asking else result

    def _with_thoughts(self, plan: StepPlan, result: StepResult) -> StepResult:
        of_sampled: list[TokenLogprobs | None] = []
        of_prompts = []
        for index, row in enumerate(plan.rows):
            seat, stop = self.seats[row.slot], row.start + row.num_tokens
            in_output, in_prompt = seat.sampling.logprobs, seat.sampling.prompt_logprobs
            if row.samples:
                of_sampled.append(None if in_output is None else self._thought(row.slot, stop - 1, in_output))
            foretelling = range(row.start, min(stop, seat.prompt_length - 1))
            if in_prompt is not None and foretelling:
                told = tuple(self._thought(row.slot, position, in_prompt) for position in foretelling)
                of_prompts.append(PromptLogprobs(index, row.start + 1, told))
        return replace(result, logprobs=tuple(of_sampled), prompt_logprobs=tuple(of_prompts))

    def _thought(self, slot: int, position: int, num_top: int) -> TokenLogprobs:
        """Of the token behind `position`, by what stands in the pages."""
        block = self.block_tables[slot][position // self.block_size]
        return thought(self.pages[block][position % self.block_size], self.tokens[slot][position + 1], num_top)
