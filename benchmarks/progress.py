"""What a benchmark is at, and how long it will still take: a bar at a terminal, elsewhere a line now and then.

On standard error, so that the tables on standard output can be kept. Nothing is drawn but where a benchmark says that
it begins another step: while it measures there is no thread, no timer and no output.
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
    """For so many steps, in as many loops as it likes; call `begin` before each."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._num_begun = 0
        self._started_s = time.monotonic()
        self._line_s = self._started_s  # when the next one may come
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
        """What is measured from here to the next call."""
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


def progress(items: Collection[Item], what: str, words: Callable[[Item], str] = str) -> Iterator[Item]:
    """One step for each item, which `words` names."""
    with Progress(what, len(items)) as steps:
        for item in items:
            steps.begin(words(item))
            yield item


def tell(line: str, file: TextIO | None = None) -> None:
    """Print it, on standard output as a rule; a bar that stands there goes on below it."""
    file = file or sys.stdout
    _Bar.write(line, file=file)
    file.flush()


def no_bars_in_files() -> None:
    """Transformers draws bars of its own, wherever standard error goes; for those who have imported it anyway."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()


class _Bar(tqdm):
    """tqdm's, without the thread that it has for bars that stand still: that would run while something is measured."""

    monitor_interval = 0
