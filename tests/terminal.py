"""A terminal for programs under test: a pseudo-terminal, keys typed into it, and all that came out of it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TIMEOUT_S = 30
CTRL_C = "\x03"
_SEQUENCE = re.compile(rb"\x08|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-Z]|[=>78])")
_UNFINISHED = re.compile(rb"(?:\r|\x1b[^\x1b]*)$")  # behind all that is whole: nothing that was seen may change

HOSTILE = [
    *(
        "\x1b]52;c;cm0gLXJmIH4=\x07",
        "\x1b]0;another title\x1b\\",
        "\x1b[2J\x1b[H",
        "\x1b[6n",
        "\x9b31m",
        "\u009d0;x\u009c",
    ),
    *("\x1bP$q\x1b\\", "\x1b", "[21t", "\u202egpj.exe", "\u2066\u200f\u061c", "\x07\x08\x7f", "\rover"),
    "<script>alert(1)</script>",
    "x" * 10_000,
]
# What a terminal would obey or be deceived by, and neither rich nor prompt_toolkit has any business to write.
HARMFUL = [b"\x1b]", b"\x1bP", b"\x1b[2J\x1b[H", b"\x1b[6n", b"\x1b[21t", b"\x9b31m", b"\x07", b"\x7f", b"\rover"]
HARMFUL += [text.encode() for text in ("\u009b", "\u009d", "\u202e", "\u2066", "\u200f", "\u061c")]


class Terminal:
    """`servekit ARGUMENTS` at a terminal that is its own: Ctrl-C is a signal until the program says that it is not."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, **environment: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self.attributes_before = termios.tcgetattr(self.slave)
        self.output = b""
        self._num_seen = 0
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "servekit", *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            preexec_fn=_take_control,
            env={**inherited, "TERM": "xterm-256color", **environment},
        )

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def interrupt(self, how: str) -> None:
        """Ctrl-C as a "key", or as the "signal" that another process sends."""
        if how == "key":
            self.type(CTRL_C)
        else:
            self.process.send_signal(signal.SIGINT)

    def hang_up(self) -> None:
        """The terminal is gone, as when its window is closed."""
        os.close(self.master)
        self.master = -1

    def expect(self, text: str) -> str:
        """Wait until this was printed, behind what was expected before; returns what stands between.

        Escape sequences do not matter.
        """
        between = self._find(text, TIMEOUT_S)
        assert between is not None, f"no {text!r} in {self.plain()[self._num_seen :]!r}; exit {self.process.poll()}"
        return between

    def comes(self, text: str, within_s: float) -> bool:
        """For what is asked for more than once."""
        return self._find(text, within_s) is not None

    def _find(self, text: str, timeout_s: float) -> str | None:
        deadline = time.monotonic() + timeout_s
        while True:
            has_ended = self.process.poll() is not None
            reads = self._read()
            plain = self.plain()
            if (found := plain.find(text, self._num_seen)) >= 0:
                between = plain[self._num_seen : found]
                self._num_seen = found + len(text)
                return between
            if time.monotonic() >= deadline or (has_ended and not reads):
                return None

    def expect_output(self, output: bytes) -> None:
        """Wait until these bytes come, now or later."""
        num_seen, deadline = len(self.output), time.monotonic() + TIMEOUT_S
        while output not in self.output[num_seen:]:
            assert time.monotonic() < deadline, f"no {output!r} in {self.output[num_seen:]!r}"
            self._read()

    def expect_end(self) -> int:
        """The exit code; what is still printed is kept."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it goes on: {self.plain()[-500:]!r}"
            self._read()
        while self._read(timeout_s=0):
            pass
        return self.process.returncode

    def is_as_before(self) -> bool:
        """The line discipline is what it was before the program began."""
        return termios.tcgetattr(self.slave) == self.attributes_before

    def plain(self) -> str:
        """What was printed, without its escape sequences, as far as it is whole."""
        return _UNFINISHED.sub(b"", _SEQUENCE.sub(b"", self.output)).decode(errors="ignore").replace("\r\n", "\n")

    def _read(self, timeout_s: float = 0.02) -> bool:
        if not select.select([self.master], [], [], timeout_s)[0]:
            return False
        self.output += os.read(self.master, 65536)
        return True


def _take_control() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test run's own is
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(*arguments: str, **how: Any) -> Iterator[Terminal]:
    """Ended afterwards whatever happens."""
    opened = Terminal(*arguments, **how)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        for end in (opened.master, opened.slave):
            if end >= 0:
                os.close(end)
