"""Show the progress of a run: one line that is rewritten on a terminal, or a line every few seconds in a file."""

from __future__ import annotations

from collections import deque
from typing import TextIO

import numpy as np

from loadtest.reporting.formatting import as_number, as_time
from loadtest.running.runner import Progress

RECENT = 400  # first bytes that percentiles are computed of
WINDOW_S = 5.0  # seconds that rates are averaged over
LOG_EVERY_S = 5.0
BAR = 20  # characters


class Display:
    """Pass every report to `show`; `close` leaves the last line on the screen."""

    def __init__(self, output: TextIO, label: str) -> None:
        self._output = output
        self._label = label
        self._is_live = output.isatty()
        self._recent_s: deque[float] = deque(maxlen=RECENT)
        self._window: deque[tuple[float, int]] = deque()  # (time, tokens until then)
        self._logged_s = 0.0
        self._last = ""

    def show(self, progress: Progress) -> None:
        self._recent_s.extend(progress.first_s)
        self._window.append((progress.elapsed_s, progress.num_tokens))
        while self._window[0][0] < progress.elapsed_s - WINDOW_S:
            self._window.popleft()
        self._last = self._line(progress)
        if self._is_live:
            self._output.write(f"\r{self._last}\x1b[K")
        elif progress.elapsed_s >= self._logged_s + LOG_EVERY_S:
            self._logged_s = progress.elapsed_s
            self._output.write(self._last + "\n")
        self._output.flush()

    def close(self) -> None:
        if self._last:
            self._output.write(f"\r{self._last}\x1b[K\n" if self._is_live else self._last + "\n")
            self._output.flush()

    def _line(self, progress: Progress) -> str:
        done = progress.num_ok + progress.num_failed + progress.num_skipped
        share = done / progress.num_planned if progress.num_planned else 1.0
        bar = "█" * round(BAR * share) + "░" * (BAR - round(BAR * share))
        parts = [
            f"{self._label}  {progress.elapsed_s:5.1f} s  {bar}",
            f"{as_number(progress.num_in_flight)} in flight, {as_number(progress.num_ok)} ok",
        ]
        if progress.num_failed:
            parts.append(f"{as_number(progress.num_failed)} failed")
        if self._recent_s:
            low, high = (as_time(float(each)) for each in np.percentile(list(self._recent_s), (50, 99)))
            parts.append(f"first byte {low} / {high} (p50 / p99)")
        (from_s, before), (to_s, after) = self._window[0], self._window[-1]
        if to_s > from_s:
            parts.append(f"{as_number((after - before) / (to_s - from_s))} tokens/s")
        return ", ".join(parts)
