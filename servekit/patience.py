"""How long to wait for a worker: for one step, and before the next start.

What a step may take is learnt from the steps seen, for a second is an age on one machine and a blink on another. Wrong
on the long side costs a pause, on the short side a worker that was well; so the bound is a generous one.
"""

from __future__ import annotations

NUM_STEPS_TO_LEARN = 16
FACTOR = 20.0
LEAST_S = 10.0


class StepPatience:
    """What a step may take before its worker is taken for hung: many times the slowest token seen, for each token.

    Small steps have the slowest tokens, so for large ones this is more generous still.
    """

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self._slowest_token_s = 0.0
        self._num_seen = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._slowest_token_s = max(self._slowest_token_s, seconds / num_tokens)
        self._num_seen += 1

    def limit_s(self, num_tokens: int) -> float:
        """For a step of so many tokens; `most_s` until there were steps to learn from."""
        if self._num_seen < NUM_STEPS_TO_LEARN:
            return self.most_s
        return min(self.most_s, max(LEAST_S, FACTOR * self._slowest_token_s * num_tokens))


def backoff_s(num_losses: int) -> float:
    """Before another start, after so many losses in a row with no step in between: 0, 1, 2, 4, … 30 s."""
    return min(30.0, 2.0 ** (num_losses - 2)) if num_losses > 1 else 0.0
