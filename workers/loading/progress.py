"""Report how far the loading of a model is: a bar by tqdm at a terminal, elsewhere a log line every few seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]
from tqdm.contrib.logging import logging_redirect_tqdm  # type: ignore[import-untyped]

from servekit.protocol.logging import logs_json

log = logging.getLogger("servekit.worker")

Item = TypeVar("Item")

BAR_AFTER_S = 0.5  # a stage that takes less shows no bar
BAR_EVERY_S = 0.1
# The bar is short, so that most lines of the server's log overwrite all of it.
BAR_FORMAT = "{desc} |{bar:20}| {percentage:3.0f} %, {remaining} left"
REPORT_EVERY_S = 1.0
LOG_EVERY_S = 5.0


class Progress:
    """Reports the stage of loading to `report`, for the server's /ready, and to the terminal or the log."""

    def __init__(
        self,
        report: Callable[[str], None] = lambda _: None,
        terminal: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use `terminal`; by default standard error, if it is a terminal and its log is not JSON, which programs read.

        `clock` times reports and log lines; tqdm has its own.
        """
        self.report = report
        self._clock = clock
        self._terminal = terminal
        if terminal is None and sys.stderr.isatty() and not logs_json():
            self._terminal = sys.stderr

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yield a function that is to be called with how much more of `total` is done."""
        self.report(name)
        total = max(total, 1)
        report_progress = _every_few_seconds(name, total, self.report, self._clock, logs=self._terminal is None)
        if self._terminal is None:
            yield report_progress
            return
        # Log lines of this process clear the bar first; the end of it would stay behind a short line.
        with _Bar.at(self._terminal, name, total) as bar, logging_redirect_tqdm(tqdm_class=_Bar):

            def advance(amount: int) -> None:
                bar.update(amount)
                report_progress(amount)

            yield advance

    @contextmanager
    def over(self, name: str, items: list[Item], after_each: Callable[[], None] = lambda: None) -> Iterator[list[Item]]:
        """Yield a list like `items`; iterating over it once is the stage. `after_each` is called after each item."""
        with self.stage(name, len(items)) as advance:

            def end_item() -> None:
                advance(1)
                after_each()

            yield _Counted(items, end_item)


class _Counted(list[Item]):
    """A list that calls `end_item` after each item of an iteration."""

    def __init__(self, items: list[Item], end_item: Callable[[], None]) -> None:
        super().__init__(items)
        self._end_item = end_item

    def __iter__(self) -> Iterator[Item]:
        for item in super().__iter__():
            yield item
            self._end_item()


def _every_few_seconds(
    name: str, total: int, report: Callable[[str], None], clock: Callable[[], float], logs: bool
) -> Callable[[int], None]:
    """Return a function to call with how much more is done.

    It reports the percentage every REPORT_EVERY_S, and logs it every LOG_EVERY_S.
    """
    done = 0
    report_s, log_s = clock() + REPORT_EVERY_S, clock() + LOG_EVERY_S

    def advance(amount: int) -> None:
        nonlocal done, report_s, log_s
        done += amount
        now, percent = clock(), 100 * done // total
        if now >= report_s:
            report_s = now + REPORT_EVERY_S
            report(f"{name}: {percent} %")
        if logs and now >= log_s:
            log_s = now + LOG_EVERY_S
            log.info("%s: %d %%", name, percent)

    return advance


class _Bar(tqdm):  # type: ignore[misc]
    """A bar of tqdm, for a process that shares its terminal and starts no further threads or processes."""

    monitor_interval = 0  # or a thread would wake up for the worker's whole life to see whether a bar stands still

    @classmethod
    def at(cls, terminal: TextIO, name: str, total: int) -> _Bar:
        """Return a bar that disappears when it is closed."""
        return cls(
            total=total,
            desc=name,
            file=_CursorAtLineStart(terminal),
            delay=BAR_AFTER_S,
            mininterval=BAR_EVERY_S,
            miniters=1,  # or after many small updates it would wait for as many before it reads the clock again
            smoothing=0,
            leave=False,
            dynamic_ncols=True,
            bar_format=BAR_FORMAT,
        )


# tqdm's own lock contains a semaphore of multiprocessing, which may start a process to track it.
_Bar.set_lock(threading.RLock())


class _CursorAtLineStart:
    """A terminal whose cursor returns to the line's start after everything that is written.

    Server and worker write to one standard error, and neither knows when the other writes. So the bar leaves the cursor
    at its start, and the next output overwrites it. tqdm alone leaves the cursor behind the bar's end, and a log line
    would be appended there.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self.encoding = terminal.encoding  # tqdm's blocks, or # where there are none

    def __eq__(self, other: object) -> bool:
        """Compare equal to the terminal, so that tqdm sees that the log goes there."""
        return other is self or other is self._terminal

    __hash__ = object.__hash__

    def write(self, text: str) -> None:
        if text:
            self._terminal.write(f"{text}\r")  # in one call, so that no other output comes between

    def flush(self) -> None:
        self._terminal.flush()

    def fileno(self) -> int:
        return self._terminal.fileno()  # for its width
