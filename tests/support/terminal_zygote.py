"""Fork `servekit` commands for tests at a terminal, so that the imports of the terminal clients are paid once.

`python -m tests.support.terminal_zygote FD` serves one command after another over the socket FD: it receives the
terminal's file descriptor with the arguments and the environment, and sends the process id and then the exit code.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import termios
from typing import NoReturn

from servekit.cli import main
from servekit.terminal import chat, top  # noqa: F401  to have them imported before the fork
from tests.support.default_signals import heed_hangups

MAX_REQUEST_BYTES = 1 << 16


def serve(control: socket.socket) -> None:
    while True:
        request, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
        if not request:
            return
        (terminal,) = fds
        arguments, environment = json.loads(request)
        pid = os.fork()
        if pid == 0:
            control.close()
            _run(terminal, arguments, environment)
        os.close(terminal)
        control.send(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        control.send(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _run(terminal: int, arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Become what `python -m servekit ARGUMENTS` is in a new session with this controlling terminal."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for fd in (0, 1, 2):
        os.dup2(terminal, fd)
    os.close(terminal)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    heed_hangups()
    os.environ.clear()
    os.environ.update(environment)
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdin = open(0, encoding=encoding, closefd=False)  # noqa: SIM115  open until the process ends
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.exit(main(arguments))  # and through the interpreter's own end, as every command


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        serve(inherited)
