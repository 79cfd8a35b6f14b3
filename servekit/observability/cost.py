"""Compute what the devices of a model cost, in all and for a million tokens.

Pure: the caller passes times, and the numbers of devices and of tokens.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

SECONDS_PER_HOUR = 3600.0
WINDOW_S = SECONDS_PER_HOUR  # that the cost of tokens is the mean of
MARK_INTERVAL_S = 60.0


class Cost(Struct, frozen=True):
    """What it costs, in the currency of the price."""

    per_hour: float  # now
    total: float  # since the start
    per_million_tokens: float | None  # prompts and answers, of the last hour; None if there were no tokens


class CostMeter:
    """Adds up the price of devices over time. It is read at scrapes, and counts what a device costs between them."""

    def __init__(self, price_per_hour: float) -> None:
        """`price_per_hour` is that of one device, in any currency."""
        self._price_per_hour = price_per_hour
        self._read_s: float | None = None  # when it was last read
        self._total = 0.0
        self._marks: deque[tuple[float, float, int]] = deque()  # time, cost and tokens at that time, one a minute

    def read(self, now_s: float, num_devices: int, num_tokens: int) -> Cost:
        """Return the cost until now. `num_devices` are in use now, `num_tokens` were counted since the start."""
        per_hour = self._price_per_hour * num_devices
        if self._read_s is not None:
            self._total += per_hour * max(0.0, now_s - self._read_s) / SECONDS_PER_HOUR
        self._read_s = now_s
        if not self._marks or now_s - self._marks[-1][0] >= MARK_INTERVAL_S:
            self._marks.append((now_s, self._total, num_tokens))
        while len(self._marks) > 1 and now_s - self._marks[1][0] >= WINDOW_S:
            self._marks.popleft()
        _, cost_before, tokens_before = self._marks[0]
        tokens = num_tokens - tokens_before
        per_million = (self._total - cost_before) / tokens * 1e6 if tokens else None
        return Cost(per_hour, self._total, per_million)
