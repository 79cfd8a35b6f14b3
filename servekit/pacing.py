"""How much prefill a step may carry while others wait for their next token.

The longer the step, the longer every running stream waits between two tokens. With a target for that wait, the pacer
learns what a prefill token costs from the steps it sees, and gives out as many as fit.
"""

from __future__ import annotations

LEAST_PREFILL = 16  # tokens that a step may always prefill, so that prompts come through at any target
LEAST_SLOPE_S = 1e-8  # no hardware prefills a token faster; what says so is noise


class Pacer:
    """Chooses the prefill of a step for `target_s` between two tokens; without a target, there is no limit.

    Three things are learnt. What a prefill token costs: the slope of a line through the steps that had prefill, older
    ones counting less. What a step takes without prefill (decodes, attention, overhead), from every step, and quickly,
    because it drifts with them. And a margin: one step over the target takes 5 % off it, each other gives 0.025 % back,
    so it comes to rest where about one step in 200 is late. That makes the target a percentile without assuming how
    step times scatter.
    """

    MEMORY = 0.97  # the weight of a step with prefill, once another one has followed
    BASE_MEMORY = 0.8  # the same for what a step takes without
    PENALTY = 0.95
    RELIEF = 0.00025
    LEAST_MARGIN = 0.2

    def __init__(self, target_s: float | None, most: int) -> None:
        self.target_s = target_s
        self.most = most
        self._margin = 1.0
        self._slope = 0.0  # seconds per prefill token; 0 is unknown
        self._base_s = 0.0
        self._largest = 0.0  # chunk lately
        self._weight = self._tokens = self._seconds = self._tokens_squared = self._tokens_seconds = 0.0

    def prefill_limit(self) -> int:
        """Tokens of prefill that fit into the next step beside its decodes."""
        if self.target_s is None:
            return self.most
        if not self._slope:
            return LEAST_PREFILL  # nothing is known of prefill yet: learn by small steps
        room_s = self._margin * self.target_s - self._base_s
        # No farther than twice what was tried lately: the line is not to be trusted beyond, and doubling is quick.
        most = min(self.most, int(2 * self._largest))
        if room_s >= self._slope * most:
            return most
        return max(LEAST_PREFILL, int(room_s / self._slope))

    @property
    def is_out_of_reach(self) -> bool:
        """Whether steps take longer than the target without any prefill, so that cutting it cannot help."""
        return self.target_s is not None and self._slope > 0.0 and self._base_s > self.target_s

    def observe(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step took so long, as the streams that waited for it felt it."""
        if self.target_s is None:
            return
        if num_prefill_tokens:
            self._learn_slope(float(num_prefill_tokens), seconds)
        without_s = max(0.0, seconds - self._slope * num_prefill_tokens)
        self._base_s += (1.0 - self.BASE_MEMORY) * (without_s - self._base_s)
        if num_decodes and num_prefill_tokens > LEAST_PREFILL:
            if seconds > self.target_s:
                self._margin = max(self.LEAST_MARGIN, self._margin * self.PENALTY)
            else:
                self._margin = min(1.0, self._margin + self.RELIEF)

    def _learn_slope(self, tokens: float, seconds: float) -> None:
        keep = self.MEMORY
        self._largest = max(tokens, keep * self._largest, LEAST_PREFILL)
        self._weight = keep * self._weight + 1.0
        self._tokens = keep * self._tokens + tokens
        self._seconds = keep * self._seconds + seconds
        self._tokens_squared = keep * self._tokens_squared + tokens * tokens
        self._tokens_seconds = keep * self._tokens_seconds + tokens * seconds
        mean = self._tokens / self._weight
        spread = self._tokens_squared - mean * self._tokens
        if spread > LEAST_PREFILL:  # chunks that differ enough to show what a token costs
            slope = (self._tokens_seconds - mean * self._seconds) / spread
            self._slope = max(slope, LEAST_SLOPE_S)
        else:
            self._slope = max((seconds - self._base_s) / tokens, LEAST_SLOPE_S)  # at first: all of its time
