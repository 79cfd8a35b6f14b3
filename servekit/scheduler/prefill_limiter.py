"""Limit the prefill of a step, so that running streams get their next token within a target time.

The longer the step, the longer every running stream waits between two tokens. With a target for that wait (inter-token
latency), the limiter learns from the steps what a prefill token costs, and admits as many prefill tokens as fit.
"""

from __future__ import annotations

MIN_PREFILL_TOKENS = 16  # a step may always prefill so many, so that prompts make progress at any target
MIN_SLOPE_S = 1e-8  # no hardware prefills a token faster; a lower estimate is noise


class PrefillLimiter:
    """Chooses the prefill of a step for `target_s` between two tokens; without a target, the limit is `max_tokens`.

    It learns three things:

    - What a prefill token costs: the slope of a linear regression over steps with prefill, with weights that decay.
    - What a step takes without prefill (decodes, attention, overhead): from every step, with a fast decay, because it
      drifts with the decodes.
    - A margin: a step that misses the target reduces it by 5 %, every other step raises it by 0.025 %. So it settles
      where about one step in 200 misses. That makes the target a percentile, without an assumption on how step times
      are distributed.
    """

    DECAY = 0.97  # the weight of a step with prefill, once another one has followed
    BASE_DECAY = 0.8  # the same for what a step takes without prefill
    PENALTY = 0.95
    RECOVERY = 0.00025
    MIN_MARGIN = 0.2

    def __init__(self, target_s: float | None, max_tokens: int) -> None:
        self.target_s = target_s
        self.max_tokens = max_tokens
        self._margin = 1.0
        self._slope_s = 0.0  # per prefill token; 0 is unknown
        self._base_s = 0.0
        self._largest_chunk = 0.0  # of late, in tokens
        # Sums of the regression, each one decayed.
        self._weight = self._tokens = self._seconds = self._tokens_squared = self._tokens_seconds = 0.0

    def prefill_limit(self) -> int:
        """How many prefill tokens fit into the next step beside its decodes."""
        if self.target_s is None:
            return self.max_tokens
        if not self._slope_s:
            return MIN_PREFILL_TOKENS  # the cost is unknown yet: learn it from small steps
        room_s = self._margin * self.target_s - self._base_s
        # At most twice the largest recent chunk: beyond it the regression is an extrapolation, and doubling is quick.
        limit = min(self.max_tokens, int(2 * self._largest_chunk))
        if room_s >= self._slope_s * limit:
            return limit
        return max(MIN_PREFILL_TOKENS, int(room_s / self._slope_s))

    @property
    def is_out_of_reach(self) -> bool:
        """Whether steps take longer than the target without any prefill, so that less prefill cannot help."""
        return self.target_s is not None and self._slope_s > 0.0 and self._base_s > self.target_s

    def observe(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """Learn from a step: how long the streams that were running waited for it."""
        if self.target_s is None:
            return
        if num_prefill_tokens:
            self._learn_slope(float(num_prefill_tokens), seconds)
        without_s = max(0.0, seconds - self._slope_s * num_prefill_tokens)
        self._base_s += (1.0 - self.BASE_DECAY) * (without_s - self._base_s)
        if num_decodes and num_prefill_tokens > MIN_PREFILL_TOKENS:
            if seconds > self.target_s:
                self._margin = max(self.MIN_MARGIN, self._margin * self.PENALTY)
            else:
                self._margin = min(1.0, self._margin + self.RECOVERY)

    def _learn_slope(self, tokens: float, seconds: float) -> None:
        decay = self.DECAY
        self._largest_chunk = max(tokens, decay * self._largest_chunk, MIN_PREFILL_TOKENS)
        self._weight = decay * self._weight + 1.0
        self._tokens = decay * self._tokens + tokens
        self._seconds = decay * self._seconds + seconds
        self._tokens_squared = decay * self._tokens_squared + tokens * tokens
        self._tokens_seconds = decay * self._tokens_seconds + tokens * seconds
        mean = self._tokens / self._weight
        spread = self._tokens_squared - mean * self._tokens
        if spread > MIN_PREFILL_TOKENS:  # chunks differ enough to show what a token costs
            slope_s = (self._tokens_seconds - mean * self._seconds) / spread
            self._slope_s = max(slope_s, MIN_SLOPE_S)
        else:
            self._slope_s = max((seconds - self._base_s) / tokens, MIN_SLOPE_S)  # at first: all of its time
