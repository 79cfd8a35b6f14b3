"""Drafters for tests: always right, right at random, and hostile. None of them may change a token."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from itertools import count

from servekit.protocol.messages import StepPlan
from servekit.scheduler.draft_length import DraftLengths
from servekit.scheduler.sequence import Sequence
from workers.speculation.drafter import Drafter, DraftRequest


class FixedDraftLengths(DraftLengths):
    """Gives the sequences of a step as many drafts as `number_of` says for its id, whether they pay or not."""

    def __init__(self, max_drafts: int, number_of: Callable[[int], int]) -> None:
        super().__init__(max_drafts)
        self._number_of = number_of

    def choose(self, sequences: Collection[Sequence], step_id: int, *_: float, **__: float) -> list[int]:
        return [self._number_of(step_id)] * len(sequences)


def varying_draft_lengths(max_drafts: int) -> FixedDraftLengths:
    """Mostly as many drafts as there may be, sometimes fewer, sometimes none."""
    return FixedDraftLengths(max_drafts, lambda step_id: step_id % (max_drafts + 1) if step_id % 3 == 0 else max_drafts)


class WatchingDrafter(Drafter):
    """Knows the tokens of each slot's sequence as the runner has committed them, and checks what it is asked."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}  # by slot
        self.num_requests = 0
        self.num_drafts = 0

    def begin(self, plan: StepPlan) -> None:
        for assignment in plan.slot_assignments:
            self.tokens[assignment.slot] = []

    def commit(self, slot: int, start: int, token_ids: tuple[int, ...]) -> None:
        known = self.tokens[slot]
        assert start <= len(known), f"tokens are missing before position {start}: only {len(known)} are known"
        known[start:] = token_ids

    def propose(self, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        proposed = []
        for request in requests:
            assert request.max_drafts > 0
            assert len(self.tokens[request.slot]) == request.num_tokens, "all tokens up to the newest one are known"
            drafts = self.drafts_behind(self.tokens[request.slot], request.max_drafts)
            self.num_requests += 1
            self.num_drafts += len(drafts)
            proposed.append(drafts)
        return proposed

    def drafts_behind(self, tokens: list[int], max_drafts: int) -> tuple[int, ...]:
        """Return drafts for a sequence with these tokens."""
        return ()


class OracleDrafter(WatchingDrafter):
    """Knows the answers: `texts` are prompts with their answers. With `num_right`, later drafts are wrong."""

    def __init__(self, texts: list[list[int]], num_right: int | None = None) -> None:
        super().__init__()
        self._texts = texts
        self._num_right = num_right

    def drafts_behind(self, tokens: list[int], max_drafts: int) -> tuple[int, ...]:
        length = len(tokens)
        for text in self._texts:
            if text[:length] == tokens:
                right = text[length : length + max_drafts]
                if self._num_right is None:
                    return tuple(right)
                return (*right[: self._num_right], *(token ^ 1 for token in right[self._num_right :]))
        return ()


class RandomDrafter(WatchingDrafter):
    """Guesses among the first `vocab_size` tokens; seldom right where there are many."""

    def __init__(self, vocab_size: int, seed: int = 3) -> None:
        super().__init__()
        self._vocab_size, self._random = vocab_size, random.Random(seed)

    def drafts_behind(self, tokens: list[int], max_drafts: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._vocab_size) for _ in range(self._random.randint(0, max_drafts)))


class HostileDrafter(WatchingDrafter):
    """Gives too many drafts, tokens that do not exist, the newest token over and over, stop tokens, and none at all."""

    def __init__(self, vocab_size: int, eos_token_id: int = 2) -> None:
        super().__init__()
        self._vocab_size, self._eos, self._calls = vocab_size, eos_token_id, count()

    def drafts_behind(self, tokens: list[int], max_drafts: int) -> tuple[int, ...]:
        newest, vocab_size = tokens[-1], self._vocab_size
        answers: list[tuple[int, ...]] = [
            (newest,) * max_drafts,
            (newest, *range(50)),
            (-1, 2**31 - 1, 2**80),
            (newest, vocab_size, newest),
            (self._eos,) * max_drafts,
            (),
            (vocab_size - 1,),
            tuple(tokens[:max_drafts]),
        ]
        return answers[next(self._calls) % len(answers)]
