"""Learn how long answers become, and draw the length of an answer that has not ended.

An answer that was cut at `max_tokens` would have become longer. So it only shows that it did not end earlier. The share
of answers that become longer than a length is estimated with both kinds: Kaplan and Meier, "Nonparametric Estimation
from Incomplete Observations", 1958.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from math import ceil, log

UNKNOWN_LENGTH = 128.0  # the mean until an answer has ended


class AnswerLengths:
    """The lengths of recent answers, in tokens."""

    NUM_REMEMBERED = 512

    def __init__(self) -> None:
        self._recent: deque[tuple[int, bool]] = deque()
        self._num_tokens = 0  # of recent answers: each request that is admitted asks for their mean
        # Lengths at which answers came to their own end, ascending; and the share of answers that become longer.
        self._lengths: list[int] = []
        self._longer: list[float] = []
        self._is_current = True

    def record(self, length: int, is_cut: bool) -> None:
        """Learn from an answer that has ended by itself or at max_tokens."""
        self._recent.append((length, is_cut))
        self._num_tokens += length
        if len(self._recent) > self.NUM_REMEMBERED:
            self._num_tokens -= self._recent.popleft()[0]
        self._is_current = False

    @property
    def is_known(self) -> bool:
        """Whether an answer has ended."""
        return bool(self._recent)

    @property
    def mean(self) -> float:
        """The mean length of recent answers, including those that were cut."""
        return self._num_tokens / len(self._recent) if self._recent else UNKNOWN_LENGTH

    def draw(self, num_made: int, max_tokens: int, share: float) -> int:
        """Draw the length of an answer that has `num_made` tokens and continues: a quantile of recent longer answers.

        The length is at least one token more, and at most `max_tokens`. `share` is the quantile, from 0 to 1. With
        random shares, lengths are distributed like those of recent answers.
        """
        if not self._is_current:
            self._update()
        lengths, longer = self._lengths, self._longer
        index = bisect_right(lengths, num_made)
        alive = longer[index - 1] if index else 1.0
        if not self._recent or (alive <= 0.0 and index == len(lengths)):
            # There are no answers of such lengths, so assume a constant chance to end with each token.
            return min(max_tokens, num_made + max(1, ceil(-log(max(1e-9, 1.0 - share)) * self.mean)))
        wanted = alive * (1.0 - share)
        while index < len(lengths) and longer[index] > wanted:
            index += 1
        return max(num_made + 1, min(max_tokens, lengths[index])) if index < len(lengths) else max_tokens

    def _update(self) -> None:
        ordered = sorted(self._recent)  # an answer that ended comes before one that was cut at the same length
        self._lengths, self._longer = [], []
        longer = 1.0
        for index, (length, is_cut) in enumerate(ordered):
            if is_cut:
                continue
            longer *= 1.0 - 1.0 / (len(ordered) - index)
            if self._lengths and self._lengths[-1] == length:
                self._longer[-1] = longer
            else:
                self._lengths.append(length)
                self._longer.append(longer)
        self._is_current = True
