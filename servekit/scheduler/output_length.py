"""Predict how long answers become. From the lengths follows how many KV blocks sequences need at their peak.

Where output lengths are bounded, the bound is the prediction. Where they are not, they are predicted from the lengths
of recent answers, and the prediction is raised after each preemption. A wrong prediction costs a recompute, never a
token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate

from servekit.scheduler.sequence import Sequence


class OutputLengthPredictor:
    """Predicts how many tokens a sequence will still ask for.

    Where the client bounds the length, that bound is the prediction. Elsewhere it is the mean of what recent answers
    had yet to come at this length, over those that became longer; times a safety factor, which doubles with each
    preemption and shrinks with each sequence that ends.
    """

    NUM_REMEMBERED = 128
    MAX_SAFETY_FACTOR = 16.0
    RECOVERY = 0.98  # the safety factor is multiplied by it when a sequence ends
    MEAN_DECAY = 0.98  # the weight of an answer in `mean_length`, once another one has ended

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._recent: deque[int] = deque(maxlen=self.NUM_REMEMBERED)
        self._lengths: list[int] = []  # the same, sorted
        self._sums: list[int] = []  # sums of `_lengths` from each index to the end
        self.safety_factor = 1.0
        self.mean_length = 0.0  # mean of recent answers, bounded or not, in tokens; 0 until one has ended

    def tokens_to_come(self, sequence: Sequence) -> int:
        # The last output token is never fed back, so it needs no KV position.
        num_known = len(sequence.token_ids) + sequence.num_pending
        limit = max(0, sequence.max_length - 1 - num_known)
        if sequence.has_length_bound:
            return limit
        expected = self.safety_factor * self._mean_beyond(num_known - sequence.prompt_length)
        return min(limit, max(self._block_size, int(expected)))

    def _mean_beyond(self, num_outputs: int) -> float:
        """The mean of what was yet to come in answers that became longer than this; a block if there was none."""
        first = bisect_right(self._lengths, num_outputs)
        if first == len(self._lengths):
            return self._block_size
        return self._sums[first] / (len(self._lengths) - first) - num_outputs

    def record_end(self, sequence: Sequence, num_output_tokens: int | None = None) -> None:
        """Learn from a sequence that came to its own end, with all its tokens or the first `num_output_tokens`."""
        length = sequence.num_output_tokens if num_output_tokens is None else num_output_tokens
        self.safety_factor = max(1.0, self.safety_factor * self.RECOVERY)
        weight = 1.0 - self.MEAN_DECAY if self.mean_length else 1.0
        self.mean_length += weight * (length - self.mean_length)
        if not sequence.has_length_bound:
            self._recent.append(length)
            self._update()

    def _update(self) -> None:
        self._lengths = sorted(self._recent)
        self._sums = list(accumulate(reversed(self._lengths)))[::-1]

    def record_preemption(self) -> None:
        """Learn that too much was admitted."""
        self.safety_factor = min(self.MAX_SAFETY_FACTOR, self.safety_factor * 2)
