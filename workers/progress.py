"""How far the loading of a model has come: tqdm's bar at a terminal, elsewhere a line of the log now and then."""

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

from servekit.logs import is_for_programs

log = logging.getLogger("servekit.worker")

Item = TypeVar("Item")

BAR_AFTER_S = 0.5  # what takes less needs none
BAR_EVERY_S = 0.1
# So short that most lines of the server's log cover all of it.
BAR_FORMAT = "{desc} |{bar:20}| {percentage:3.0f} %, {remaining} left"
TELL_EVERY_S = 1.0
LINE_EVERY_S = 5.0


class Progress:
    """Says what the loading is at: to `tell`, which makes it the server's word at /ready, and to people."""

    def __init__(
        self,
        tell: Callable[[str], None] = lambda _: None,
        terminal: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The terminal is that of standard error if there is one; JSON there is for programs, and no place for bars.

        The clock is for `tell` and for lines; tqdm has its own.
        """
        self.tell = tell
        self._clock = clock
        self._terminal = terminal
        if terminal is None and sys.stderr.isatty() and not is_for_programs():
            self._terminal = sys.stderr

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Something that takes its time: what it gives is to be called with how much more of `total` is done."""
        self.tell(name)
        total = max(total, 1)
        say_how_far = _every_few_seconds(name, total, self.tell, self._clock, logs=self._terminal is None)
        if self._terminal is None:
            yield say_how_far
            return
        # What is logged here meanwhile wipes the bar away first, or the end of it would stand behind a short line.
        with _Bar.at(self._terminal, name, total) as bar, logging_redirect_tqdm(tqdm_class=_Bar):

            def advance(amount: int) -> None:
                bar.update(amount)
                say_how_far(amount)

            yield advance

    @contextmanager
    def over(self, name: str, items: list[Item]) -> Iterator[list[Item]]:
        """The same, where what is to be done is to go through a list once."""
        with self.stage(name, len(items)) as advance:
            yield _Counted(items, advance)


class _Counted(list[Item]):
    """A list that says how far whoever goes through it has come."""

    def __init__(self, items: list[Item], advance: Callable[[int], None]) -> None:
        super().__init__(items)
        self._advance = advance

    def __iter__(self) -> Iterator[Item]:
        for item in super().__iter__():
            yield item
            self._advance(1)


def _every_few_seconds(
    name: str, total: int, tell: Callable[[str], None], clock: Callable[[], float], logs: bool
) -> Callable[[int], None]:
    """To be called with how much more is done: says each second how far that is, and logs it every five."""
    done = 0
    tell_s, line_s = clock() + TELL_EVERY_S, clock() + LINE_EVERY_S

    def advance(amount: int) -> None:
        nonlocal done, tell_s, line_s
        done += amount
        now, percent = clock(), 100 * done // total
        if now >= tell_s:
            tell_s = now + TELL_EVERY_S
            tell(f"{name}: {percent} %")
        if logs and now >= line_s:
            line_s = now + LINE_EVERY_S
            log.info("%s: %d %%", name, percent)

    return advance


class _Bar(tqdm):  # type: ignore[misc]
    """tqdm's, in a process that is not alone at its terminal, and whose threads and semaphores are counted."""

    monitor_interval = 0  # no thread that wakes up for the worker's whole life to see whether a bar stands still

    @classmethod
    def at(cls, terminal: TextIO, name: str, total: int) -> _Bar:
        """One that is gone when it is closed."""
        return cls(
            total=total,
            desc=name,
            file=_LeftAtTheStart(terminal),
            delay=BAR_AFTER_S,
            mininterval=BAR_EVERY_S,
            miniters=1,  # or after many small pieces it would wait for as many before it looks at the clock again
            smoothing=0,
            leave=False,
            dynamic_ncols=True,
            bar_format=BAR_FORMAT,
        )


# tqdm's own has a semaphore of multiprocessing in it, which may start a process to look after it.
_Bar.set_lock(threading.RLock())


class _LeftAtTheStart:
    """A terminal whose cursor goes back to the line's start after everything that is written.

    Server and worker write to one standard error, and neither knows when the other has something to say. So the bar
    leaves the cursor where it begins, and whatever comes next is written over it; tqdm alone leaves it behind the bar's
    end, where a line of the log would go on.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self.encoding = terminal.encoding  # tqdm's blocks, or # where there are none

    def __eq__(self, other: object) -> bool:
        """So that tqdm finds it to be where the log goes."""
        return other is self or other is self._terminal

    __hash__ = object.__hash__

    def write(self, text: str) -> None:
        if text:
            self._terminal.write(f"{text}\r")  # in one piece: nobody comes between

    def flush(self) -> None:
        self._terminal.flush()

    def fileno(self) -> int:
        return self._terminal.fileno()  # for its width
