"""How far the loading of a model has come: a bar at a terminal, elsewhere a line of the log now and then.

Server and worker write to one standard error, and neither knows when the other has something to say. So the bar leaves
the cursor where it begins, and whatever comes next is written over it; libraries' bars leave it behind their end, where
a line of the log would go on.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeVar

from servekit.logs import is_for_programs

log = logging.getLogger("servekit.worker")

Item = TypeVar("Item")

BAR_AFTER_S = 0.5  # what takes less needs none
BAR_EVERY_S = 0.1
BAR_WIDTH = 20
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
        """The terminal is that of standard error if there is one; JSON there is for programs, and no place for bars."""
        self.tell = tell
        self._clock = clock
        self._terminal = terminal
        if terminal is None and sys.stderr.isatty() and not is_for_programs():
            self._terminal = sys.stderr

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Something that takes its time: what it gives is to be called with how much more of `total` is done."""
        self.tell(name)
        stage = _Stage(name, total, self.tell, self._terminal, self._clock)
        try:
            yield stage.advance
        finally:
            stage.erase()

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


class _Stage:
    def __init__(
        self,
        name: str,
        total: int,
        tell: Callable[[str], None],
        terminal: TextIO | None,
        clock: Callable[[], float],
    ) -> None:
        self._name, self._total, self._done = name, max(total, 1), 0
        self._tell, self._terminal, self._clock = tell, terminal, clock
        now = clock()
        self._tell_s, self._line_s, self._bar_s = now + TELL_EVERY_S, now + LINE_EVERY_S, now + BAR_AFTER_S
        self._bar = ""  # what stands at the terminal

    def advance(self, amount: int) -> None:
        self._done += amount
        now, percent = self._clock(), 100 * self._done // self._total
        if now >= self._tell_s:
            self._tell_s = now + TELL_EVERY_S
            self._tell(f"{self._name}: {percent} %")
        if self._terminal is not None:
            if now >= self._bar_s:
                self._bar_s = now + BAR_EVERY_S
                self._draw(percent)
        elif now >= self._line_s:
            self._line_s = now + LINE_EVERY_S
            log.info("%s: %d %%", self._name, percent)

    def _draw(self, percent: int) -> None:
        assert self._terminal is not None
        filled = "#" * (BAR_WIDTH * percent // 100)
        self._bar = f"{self._name} [{filled:.<{BAR_WIDTH}}] {percent:3} %"
        self._terminal.write(f"\r{self._bar}\r")
        self._terminal.flush()

    def erase(self) -> None:
        if self._terminal is not None and self._bar:
            self._terminal.write(f"\r{' ' * len(self._bar)}\r")
            self._terminal.flush()
