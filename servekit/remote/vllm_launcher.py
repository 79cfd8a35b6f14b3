"""Run vLLM in a process group of its own, and end the whole group with the server that started this process.

vLLM has several processes. If one of them is killed, the others may continue and hold a GPU. So the server starts this
module as a process between itself and vLLM: it ends the group when the server closes its end of stdin, which the kernel
does if the server is killed, and when the command's own process ends. SIGTERM lets vLLM end by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading


def run(command: list[str]) -> int:
    """Run the command to its end, and return its exit code; 128 and the signal's number, if one killed it."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    threading.Thread(target=_end_with_the_server, args=(child.pid,), daemon=True).start()
    code = child.wait()
    _kill_group(child.pid)
    return code if code >= 0 else 128 - code


def _end_with_the_server(group: int) -> None:
    while os.read(0, 4096):
        pass
    _kill_group(group)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
