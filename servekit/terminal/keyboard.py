"""The terminal's keys, one after another, from a program's first moment to its last.

In a terminal's usual mode Ctrl-C is a signal: it overtakes what was typed before it, and what it does depends on the
line of Python it meets. A program that waits in C for the next key may not even notice. So the terminal is raw for as
long as the program runs, between prompts too, and Ctrl-C is a key like others: it comes after the Enter that it was
typed after, always to whoever listens then, and cannot be lost. Whoever listens next gets what nobody wanted so far.

A SIGINT that another process sends becomes the same key.
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
    """Owns standard input, a terminal, and SIGINT; within a running event loop."""

    def __init__(self) -> None:
        self.input = Vt100Input(sys.stdin)
        self._stack = ExitStack()
        self._deliver: Callable[[list[KeyPress]], bool] = _to_nobody

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
    def listening(self, heard: Callable[[str], bool]) -> Iterator[None]:
        """Each key's name goes to `heard`, first those that are waiting. False: the key waits for the next listener.

        A terminal that is gone has Ctrl-C pressed, as far as anybody can tell.
        """

        def hear(keys: list[KeyPress]) -> bool:
            for key in keys:  # one by one: what is heard may `forget` those before it
                if not heard(key.key):
                    store_typeahead(self.input, [key])
            return True

        def read() -> None:
            keys = self.input.read_keys()
            hear([INTERRUPT] if self.input.closed else keys)

        with self.input.attach(read), self.delivering_to(hear):
            hear(get_typeahead(self.input))
            yield

    @contextmanager
    def delivering_to(self, deliver: Callable[[list[KeyPress]], bool]) -> Iterator[None]:
        """Keys that come as signals go to `deliver`, and wait if it answers False; typed ones it has to read itself."""
        self._deliver = deliver
        try:
            yield
        finally:
            self._deliver = _to_nobody

    def forget(self) -> None:
        """What was typed and waits is dropped."""
        clear_typeahead(self.input)

    def _interrupt(self) -> None:
        if not self._deliver([INTERRUPT]):
            store_typeahead(self.input, [INTERRUPT])


def _to_nobody(keys: list[KeyPress]) -> bool:
    return False
