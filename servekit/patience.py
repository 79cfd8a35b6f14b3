"""How long to wait for a worker: for one step, and before the next start.

What a step may take is learnt from steps of its size, for a second is an age on one machine and a blink on another.
Wrong on the long side costs a pause, on the short side a worker that was well; so the bound is a generous one.
"""

from __future__ import annotations

NUM_STEPS_TO_LEARN = 4
FACTOR = 20.0
LEAST_S = 10.0
MEMORY = 0.99  # what the slowest step still counts, after another one


class StepPatience:
    """What a step may take before its worker is taken for hung: many times the slowest of its size lately.

    Sizes are powers of two. One that is not known yet is judged by the next smaller one, as if each token took the
    same, or by the next larger one; both are on the generous side.
    """

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self._slowest_s: dict[int, float] = {}  # by size
        self._num_seen: dict[int, int] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        size = num_tokens.bit_length()
        self._num_seen[size] = self._num_seen.get(size, 0) + 1
        self._slowest_s[size] = max(seconds, MEMORY * self._slowest_s.get(size, 0.0))

    def limit_s(self, num_tokens: int) -> float:
        """For a step of so many tokens; `most_s` until there were steps to learn from."""
        size = num_tokens.bit_length()
        known = [each for each, num_seen in self._num_seen.items() if num_seen >= NUM_STEPS_TO_LEARN]
        if not known:
            return self.most_s
        nearest = max((each for each in known if each <= size), default=min(known))
        slowest_s = self._slowest_s[nearest] * (1 << max(0, size - nearest))
        return min(self.most_s, max(LEAST_S, FACTOR * slowest_s))


def backoff_s(num_losses: int) -> float:
    """Before another start, after so many losses in a row with no step in between: 0, 1, 2, 4, … 30 s."""
    return min(30.0, 2.0 ** (num_losses - 2)) if num_losses > 1 else 0.0
