"""Provide a pseudo-terminal whose output a test can read."""

from __future__ import annotations

import os
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

NUM_LINES = 24
LAST = b"\0"  # marks the end of the output; the tested code never writes it


class Output:
    """Everything that was written, once the terminal is closed."""

    def __init__(self) -> None:
        self.content = b""

    @property
    def text(self) -> str:
        return self.content.removesuffix(LAST).decode()


@contextmanager
def pseudo_terminal(num_columns: int = 100) -> Iterator[tuple[TextIO, Output]]:
    """Yield one end of a terminal to write to, and the output at the other end."""
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (NUM_LINES, num_columns))
    output = Output()

    def read() -> None:
        while not output.content.endswith(LAST):
            output.content += os.read(master, 4096)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        with open(slave, "w", encoding="utf-8") as terminal:
            try:
                yield terminal, output
            finally:
                terminal.write(LAST.decode())
                terminal.flush()
                reader.join(30)
    finally:
        os.close(master)
