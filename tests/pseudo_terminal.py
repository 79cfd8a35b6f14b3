"""A terminal for tests: what is written to it can be read afterwards."""

from __future__ import annotations

import os
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

NUM_LINES = 24
LAST = b"\0"  # nothing that is tested writes it


class Seen:
    """What came, when the terminal is closed."""

    def __init__(self) -> None:
        self.content = b""

    @property
    def text(self) -> str:
        return self.content.removesuffix(LAST).decode()


@contextmanager
def pseudo_terminal(num_columns: int = 100) -> Iterator[tuple[TextIO, Seen]]:
    """One end of a terminal to write to, and what is seen at the other end."""
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (NUM_LINES, num_columns))
    seen = Seen()

    def read() -> None:
        while not seen.content.endswith(LAST):
            seen.content += os.read(master, 4096)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        with open(slave, "w", encoding="utf-8") as terminal:
            try:
                yield terminal, seen
            finally:
                terminal.write(LAST.decode())
                terminal.flush()
                reader.join(30)
    finally:
        os.close(master)
