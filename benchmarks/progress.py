"""Show the progress of a benchmark on standard error: a bar at a terminal, elsewhere a line every few seconds.

Standard output has the tables only. Output happens only when a benchmark begins a step: while it measures, there is no
thread, no timer and no output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator
from typing import Self, TextIO, TypeVar

from tqdm import tqdm

LINE_EVERY_S = 5.0
BAR_FORMAT = "{desc} |{bar:20}| {n_fmt} of {total_fmt} after {elapsed}, {remaining} left{postfix}"

Item = TypeVar("Item")


class Progress:
    """Progress over `total` steps; call `begin` before each of them."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._num_begun = 0
        self._started_s = time.monotonic()
        self._line_s = self._started_s  # earliest time of the next line
        self._bar: _Bar | None = None
        if sys.stderr.isatty():
            self._bar = _Bar(
                total=total,
                desc=what,
                file=sys.stderr,
                smoothing=0,
                leave=False,
                dynamic_ncols=True,
                bar_format=BAR_FORMAT,
            )

    def begin(self, step: str) -> None:
        """Begin a step, which ends with the next call."""
        if self._bar is not None:
            self._bar.n = self._num_begun
            self._bar.set_postfix_str(step)
        elif (now := time.monotonic()) >= self._line_s:
            self._line_s = now + LINE_EVERY_S
            position, elapsed_s = f"{self._num_begun + 1} of {self._total}", now - self._started_s
            print(f"{self._what}: {position}, {step}, after {elapsed_s:.0f} s", file=sys.stderr, flush=True)
        self._num_begun += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def progress(items: Collection[Item], what: str, describe: Callable[[Item], str] = str) -> Iterator[Item]:
    """Yield the items, each as one step, which `describe` names."""
    with Progress(what, len(items)) as steps:
        for item in items:
            steps.begin(describe(item))
            yield item


def tell(line: str, file: TextIO | None = None) -> None:
    """Print a line, by default on standard output; a bar at the terminal continues below it."""
    file = file or sys.stdout
    _Bar.write(line, file=file)
    file.flush()


def no_bars_in_files() -> None:
    """Switch off transformers' own bars if standard error is no terminal; for benchmarks that import transformers."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()


class _Bar(tqdm):
    """tqdm's bar without its monitor thread, which would run during measurements."""

    monitor_interval = 0
