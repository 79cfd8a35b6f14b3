"""Whether a sequence may be seated: does everybody's memory fit, not now but at its peak?

Sequences grow as they run and give everything back when they end, so the most memory is needed just before one of them
ends. Where output lengths are bounded that peak can be computed; where they are not, they are guessed from the lengths
seen, and the guess is raised when it cost a preemption. A wrong guess costs a recompute, never a token.

The peak: Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025, section 3 (lightllm).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from operator import itemgetter

from servekit.sequence import Sequence


def future_peak(demands: Iterable[tuple[int, int]], block_size: int) -> int:
    """The most blocks that sequences hold at the same time, if all of them grow by a token in every step.

    `demands` are (tokens held now, tokens yet to come). With blocks of one token the answer is exact; with larger ones
    it is above the truth by less than a block for each sequence.
    """
    peak = num_tokens = 0
    # By the time one ends, those with more to come are all still there: they come before it in this order.
    for num_alive, (num_held, num_to_come) in enumerate(sorted(demands, key=itemgetter(1), reverse=True), start=1):
        num_tokens += num_held + block_size - 1
        peak = max(peak, num_tokens + num_alive * num_to_come)
    return peak // block_size


class OutputForecast:
    """How many tokens a sequence will still ask for.

    Exact bounds are taken as they are. For open ends, those that ended lately are asked: of the ones that became longer
    than this one is now, the mean of what they had yet to come; times a caution that doubles with each preemption and
    melts away with each sequence that ends.
    """

    NUM_REMEMBERED = 128
    MOST_CAUTION = 16.0
    RELIEF = 0.98

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._lately: deque[int] = deque(maxlen=self.NUM_REMEMBERED)
        self._lengths: list[int] = []  # the same, sorted
        self._sums: list[int] = []  # of `_lengths` from each index to the end
        self.caution = 1.0

    def tokens_to_come(self, sequence: Sequence) -> int:
        # The last output token is never fed back, so it needs no KV position.
        num_known = len(sequence.token_ids) + sequence.num_pending
        most = max(0, sequence.max_length - 1 - num_known)
        if sequence.has_length_bound:
            return most
        expected = self.caution * self._mean_beyond(num_known - sequence.prompt_length)
        return min(most, max(self._block_size, int(expected)))

    def _mean_beyond(self, num_outputs: int) -> float:
        """What was yet to come for those that became longer than this; nothing if there was nobody."""
        first = bisect_right(self._lengths, num_outputs)
        if first == len(self._lengths):
            return self._block_size
        return self._sums[first] / (len(self._lengths) - first) - num_outputs

    def ended(self, sequence: Sequence) -> None:
        """It came to its own end."""
        self.caution = max(1.0, self.caution * self.RELIEF)
        if not sequence.has_length_bound:
            self._lately.append(sequence.num_output_tokens)
            self._lengths = sorted(self._lately)
            self._sums = list(accumulate(reversed(self._lengths)))[::-1]

    def preempted(self) -> None:
        """Somebody lost a seat: we were too bold."""
        self.caution = min(self.MOST_CAUTION, self.caution * 2)
