"""Limit the prefill of a step, so that running streams get their next token within a target time.

The longer the step, the longer every running stream waits between two tokens. With a target for that wait (inter-token
latency), the limiter learns from the steps what a prefill token costs, and admits as many prefill tokens as fit.
"""

from __future__ import annotations

from servekit.scheduler.step_time import StepTimes

MIN_PREFILL_TOKENS = 16  # a step may always prefill so many, so that prompts make progress at any target


class PrefillLimiter:
    """Chooses the prefill of a step for `target_s` between two tokens; without a target, the limit is `max_tokens`.

    It learns from the steps what a prefill token costs and what a step takes without prefill (`step_times`), and a
    margin: a step that misses the target reduces it by 5 %, every other step raises it by 0.025 %. So it settles where
    about one step in 200 misses. That makes the target a percentile, without an assumption on how step times are
    distributed.
    """

    DECAY = 0.97  # decay of `_largest_chunk` with each step
    PENALTY = 0.95
    RECOVERY = 0.00025
    MIN_MARGIN = 0.2

    def __init__(self, target_s: float | None, max_tokens: int) -> None:
        self.target_s = target_s
        self.max_tokens = max_tokens
        self.step_times = StepTimes()
        self._margin = 1.0
        self._largest_chunk = 0.0  # the largest recent chunk, in tokens

    def prefill_limit(self) -> int:
        """How many prefill tokens fit into the next step together with its decodes."""
        if self.target_s is None:
            return self.max_tokens
        prefill_s = self.step_times.prefill_s
        if not prefill_s:
            return MIN_PREFILL_TOKENS  # the cost is unknown yet: learn it from small steps
        room_s = self._margin * self.target_s - self.step_times.base_s
        # At most twice the largest recent chunk: beyond it the regression is an extrapolation, and doubling is quick.
        limit = min(self.max_tokens, int(2 * self._largest_chunk))
        if room_s >= prefill_s * limit:
            return limit
        return max(MIN_PREFILL_TOKENS, int(room_s / prefill_s))

    @property
    def is_out_of_reach(self) -> bool:
        """Whether steps take longer than the target without any prefill, so that less prefill cannot help."""
        return self.target_s is not None and self.step_times.prefill_s > 0.0 and self.step_times.base_s > self.target_s

    def observe(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """Learn from a step: how long the streams that were running waited for it."""
        self.step_times.observe(num_prefill_tokens, num_decodes, seconds)
        if num_prefill_tokens:
            self._largest_chunk = max(num_prefill_tokens, self.DECAY * self._largest_chunk, MIN_PREFILL_TOKENS)
        if self.target_s is not None and num_decodes and num_prefill_tokens > MIN_PREFILL_TOKENS:
            if seconds > self.target_s:
                self._margin = max(self.MIN_MARGIN, self._margin * self.PENALTY)
            else:
                self._margin = min(1.0, self._margin + self.RECOVERY)
