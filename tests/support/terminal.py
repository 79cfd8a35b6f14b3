"""Run `servekit` commands at a pseudo-terminal: type keys, and read everything that is printed."""

from __future__ import annotations

import atexit
import fcntl
import functools
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TIMEOUT_S = 60
CTRL_C = "\x03"
_SEQUENCE = re.compile(rb"\x08|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-Z]|[=>78])")
_UNFINISHED = re.compile(rb"(?:\r|\x1b[^\x1b]*)$")  # an incomplete end of the output, which the next bytes can change

HOSTILE = [
    "\x1b]52;c;cm0gLXJmIH4=\x07",
    "\x1b]0;another title\x1b\\",
    "\x1b[2J\x1b[H",
    "\x1b[6n",
    "\x9b31m",
    "\u009d0;x\u009c",
    "\x1bP$q\x1b\\",
    "\x1b",
    "[21t",
    "\u202egpj.exe",
    "\u2066\u200f\u061c",
    "\x07\x08\x7f",
    "\rover",
    "<script>alert(1)</script>",
    "x" * 10_000,
]
# What a terminal would obey or be deceived by, and what neither rich nor prompt_toolkit ever writes.
HARMFUL = [b"\x1b]", b"\x1bP", b"\x1b[2J\x1b[H", b"\x1b[6n", b"\x1b[21t", b"\x9b31m", b"\x07", b"\x7f", b"\rover"]
HARMFUL += [text.encode() for text in ("\u009b", "\u009d", "\u202e", "\u2066", "\u200f", "\u061c")]


class Terminal:
    """`servekit ARGUMENTS` at its own terminal. Ctrl-C is a signal until the program sets the raw mode."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, **environment: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self.attributes_before = termios.tcgetattr(self.slave)
        self.output = b""
        self._num_seen = 0
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = Command(self.slave, arguments, {**inherited, "TERM": "xterm-256color", **environment})

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def interrupt(self, how: str) -> None:
        """Press Ctrl-C as a "key", or send the "signal" that another process would send."""
        if how == "key":
            self.type(CTRL_C)
        else:
            self.process.send_signal(signal.SIGINT)

    def hang_up(self) -> None:
        """Close the terminal, as when its window is closed."""
        os.close(self.master)
        self.master = -1

    def expect(self, text: str) -> str:
        """Wait until the text is printed after the text expected before; return what stands between them.

        Escape sequences are ignored.
        """
        between = self._find(text, TIMEOUT_S)
        assert between is not None, f"no {text!r} in {self.plain()[self._num_seen :]!r}; exit {self.process.poll()}"
        return between

    def is_printed(self, text: str, within_s: float) -> bool:
        """Return whether the text is printed in this time."""
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
        """Wait until these bytes are printed after this call."""
        num_seen, deadline = len(self.output), time.monotonic() + TIMEOUT_S
        while output not in self.output[num_seen:]:
            assert time.monotonic() < deadline, f"no {output!r} in {self.output[num_seen:]!r}"
            self._read()

    def expect_end(self) -> int:
        """Wait for the end of the program and return its exit code; keep what it still prints."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"the program does not end: {self.plain()[-500:]!r}"
            self._read()
        while self._read(timeout_s=0):
            pass
        return self.process.wait(0)

    def is_restored(self) -> bool:
        """Return whether the terminal's attributes are what they were before the program started."""
        return termios.tcgetattr(self.slave) == self.attributes_before

    def plain(self) -> str:
        """Return what was printed, without escape sequences and without an incomplete end."""
        return _UNFINISHED.sub(b"", _SEQUENCE.sub(b"", self.output)).decode(errors="ignore").replace("\r\n", "\n")

    def _read(self, timeout_s: float = 0.02) -> bool:
        if not select.select([self.master], [], [], timeout_s)[0]:
            return False
        self.output += os.read(self.master, 65536)
        return True


class Command:
    """A command that the zygote forked; the methods are those of `subprocess.Popen`."""

    def __init__(self, terminal: int, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self._zygote = _zygote()
        socket.send_fds(self._zygote, [json.dumps([arguments, environment]).encode()], [terminal])
        self.pid = int(self._receive(TIMEOUT_S))
        self._exit_code: int | None = None

    def send_signal(self, number: int) -> None:
        if self._exit_code is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        if self._exit_code is None and select.select([self._zygote], [], [], 0)[0]:
            self._exit_code = int(self._receive(0))
        return self._exit_code

    def wait(self, timeout_s: float) -> int:
        if self._exit_code is None:
            self._exit_code = int(self._receive(timeout_s))
        return self._exit_code

    def _receive(self, timeout_s: float) -> bytes:
        """Return one line of the zygote, which sends one at a time."""
        assert select.select([self._zygote], [], [], timeout_s)[0], f"nothing happened for {timeout_s} s"
        line = self._zygote.recv(100)
        assert line.endswith(b"\n"), "the zygote ended"
        return line


@functools.cache
def _zygote() -> socket.socket:
    """Start the process that forks commands, one for each test process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.support.terminal_zygote", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    atexit.register(process.wait)
    atexit.register(ours.close)  # with which the zygote ends; atexit runs this first
    return ours


@contextmanager
def terminal(*arguments: str, **how: Any) -> Iterator[Terminal]:
    """Open a terminal and run the command in it; kill the command at the end."""
    opened = Terminal(*arguments, **how)
    try:
        yield opened
    finally:
        if opened.process.poll() is None:
            opened.process.send_signal(signal.SIGKILL)
            opened.process.wait(TIMEOUT_S)
        for end in (opened.master, opened.slave):
            if end >= 0:
                os.close(end)
