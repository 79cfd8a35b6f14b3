"""Read the terminal's keys in the order in which they were typed, Ctrl-C included.

In a terminal's usual mode Ctrl-C is a signal. It overtakes keys that were typed before it, its effect depends on the
line of Python that it interrupts, and a program that waits in C for the next key may not notice it. So the terminal is
in raw mode for as long as the program runs, between prompts too, and Ctrl-C is a key like any other: it arrives after
the Enter that was typed before it, and it cannot be lost. Keys that the current listener does not take wait for the
next one.

A SIGINT from another process becomes the same key.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

from prompt_toolkit.input.typeahead import clear_typeahead, get_typeahead, store_typeahead
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

INTERRUPT = KeyPress(Keys.ControlC, "\x03")


class Keyboard:
    """Owner of standard input, which is a terminal, and of SIGINT. Needs a running event loop."""

    def __init__(self) -> None:
        self.input = Vt100Input(sys.stdin)
        self._stack = ExitStack()
        self._deliver: Callable[[list[KeyPress]], bool] = _take_none

    def __enter__(self) -> Keyboard:
        loop = asyncio.get_running_loop()
        self._stack.enter_context(self.input.raw_mode())
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        self._stack.callback(loop.remove_signal_handler, signal.SIGINT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @contextmanager
    def listening(self, on_key: Callable[[str], bool]) -> Iterator[None]:
        """Pass each key's name to `on_key`, waiting keys first.

        If `on_key` returns False, the key waits for the next listener. A closed terminal is reported as Ctrl-C.
        """

        def receive(keys: list[KeyPress]) -> bool:
            for key in keys:  # one at a time, because `on_key` may call `discard_waiting`
                if not on_key(key.key):
                    store_typeahead(self.input, [key])
            return True

        def read() -> None:
            keys = self.input.read_keys()
            receive([INTERRUPT] if self.input.closed else keys)

        with self.input.attach(read), self.delivering_to(receive):
            receive(get_typeahead(self.input))
            yield

    @contextmanager
    def delivering_to(self, deliver: Callable[[list[KeyPress]], bool]) -> Iterator[None]:
        """Pass keys that arrive as signals to `deliver`; they wait if it returns False. It reads typed keys itself."""
        self._deliver = deliver
        try:
            yield
        finally:
            self._deliver = _take_none

    def discard_waiting(self) -> None:
        """Drop the keys that wait for a listener."""
        clear_typeahead(self.input)

    def _interrupt(self) -> None:
        if not self._deliver([INTERRUPT]):
            store_typeahead(self.input, [INTERRUPT])


def _take_none(keys: list[KeyPress]) -> bool:
    return False
