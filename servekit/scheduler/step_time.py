"""Learn from steps how long they take: what a prefill token costs, and what a step takes without prefill."""

from __future__ import annotations

MIN_SLOPE_S = 1e-8  # no hardware prefills a token faster; a lower estimate is noise
MIN_SPREAD = 16.0  # of the chunks' sizes, squared: with less, a regression shows nothing


class StepTimes:
    """Two estimates, in seconds:

    - `slope_s` is what a prefill token costs: the slope of a linear regression over steps with prefill, with weights
      that decay. It is 0 until there was such a step.
    - `base_s` is what a step takes without prefill (decodes, attention, overhead): learned from every step, with a fast
      decay, because it drifts with the decodes. It is 0 until there was a step.
    """

    DECAY = 0.97  # the weight of a step with prefill, once another one has followed
    BASE_DECAY = 0.8  # the same for what a step takes without prefill

    def __init__(self) -> None:
        self.slope_s = 0.0
        self.base_s = 0.0
        # Sums of the regression, each one decayed.
        self._weight = self._tokens = self._seconds = self._tokens_squared = self._tokens_seconds = 0.0

    def observe(self, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        if num_prefill_tokens:
            self._learn_slope(float(num_prefill_tokens), seconds)
        without_s = max(0.0, seconds - self.slope_s * num_prefill_tokens)
        self.base_s += (1.0 - self.BASE_DECAY) * (without_s - self.base_s)

    def _learn_slope(self, tokens: float, seconds: float) -> None:
        decay = self.DECAY
        self._weight = decay * self._weight + 1.0
        self._tokens = decay * self._tokens + tokens
        self._seconds = decay * self._seconds + seconds
        self._tokens_squared = decay * self._tokens_squared + tokens * tokens
        self._tokens_seconds = decay * self._tokens_seconds + tokens * seconds
        mean = self._tokens / self._weight
        spread = self._tokens_squared - mean * self._tokens
        if spread > MIN_SPREAD:  # chunks differ enough to show what a token costs
            slope_s = (self._tokens_seconds - mean * self._seconds) / spread
            self.slope_s = max(slope_s, MIN_SLOPE_S)
        else:
            self.slope_s = max((seconds - self.base_s) / tokens, MIN_SLOPE_S)  # at first: all of its time
