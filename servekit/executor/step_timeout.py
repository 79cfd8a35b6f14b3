"""Compute timeouts for workers: how long a step may take, and how long to wait before the next start.

The time limit of a step is learnt from earlier steps of its size, because the same step may take a millisecond on one
machine and a second on another. Too long a limit delays recovery; too short a limit kills a healthy worker, which is
worse. So the limit is generous.
"""

from __future__ import annotations

NUM_STEPS_TO_LEARN = 4
FACTOR = 20.0
MIN_S = 10.0
DECAY = 0.99  # applied to the slowest observed time with each further step


class StepTimeout:
    """Limits the time of a step to many times the slowest recent step of its size.

    Sizes are powers of two. For a size that has not been observed often enough, the limit is scaled up from the next
    smaller size, as if each token took the same time, or else taken from the next larger size. Both limits are
    generous.
    """

    def __init__(self, max_s: float) -> None:
        self.max_s = max_s
        self._slowest_s: dict[int, float] = {}  # by size
        self._num_seen: dict[int, int] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record that a step of `num_tokens` tokens took `seconds`."""
        size = num_tokens.bit_length()
        self._num_seen[size] = self._num_seen.get(size, 0) + 1
        self._slowest_s[size] = max(seconds, DECAY * self._slowest_s.get(size, 0.0))

    def limit_s(self, num_tokens: int) -> float:
        """The time limit for a step of `num_tokens` tokens; `max_s` until enough steps have been observed."""
        size = num_tokens.bit_length()
        known = [each for each, num_seen in self._num_seen.items() if num_seen >= NUM_STEPS_TO_LEARN]
        if not known:
            return self.max_s
        nearest = max((each for each in known if each <= size), default=min(known))
        slowest_s = self._slowest_s[nearest] * (1 << max(0, size - nearest))
        return min(self.max_s, max(MIN_S, FACTOR * slowest_s))


def backoff_s(num_losses: int) -> float:
    """The delay before the next start after `num_losses` losses in a row without a step: 0, 1, 2, 4, … 30 s."""
    return min(30.0, 2.0 ** min(num_losses - 2, 5)) if num_losses > 1 else 0.0


def vacated_backoff_s(first_s: float, num_failures: int) -> float:
    """The delay before the next start in a vacated replica, after `num_failures` of them: 1, 2, 4, 8, 10, 10, … times.

    Other replicas serve meanwhile, so nothing waits for it. Each start takes time of the machine: it reads the weights.
    """
    return first_s * min(10.0, 2.0 ** min(num_failures, 4))
