"""Plant faults in workers that signals trigger. Python imports a module of this name from PYTHONPATH in every process.

So the server needs no hook: the workers of a server that is started with this folder in PYTHONPATH produce the faults,
and are otherwise as in production.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time
from types import FrameType

NAMES = (
    "exit",
    "raise",
    "random bytes",
    "over-long header",
    "half a frame",
    "unknown message",
    "stale result",
    "sleep 1 s",
    "sleep 4 s",
    "hold the GIL",
    "out of memory",
)
SIGNALS = {name: signal.SIGRTMIN + number for number, name in enumerate(NAMES, 1)}

HOLD_S = 20


def _write(frame: bytes) -> None:
    """Write to the result queue, as the worker's own code does."""
    os.write(int(sys.orig_argv[sys.orig_argv.index("--result-fd") + 1]), frame)


def _framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def _stale_result() -> bytes:
    """Return a result of a step that was sent to an earlier worker."""
    import msgspec

    result = {"type": "step_result", "epoch": 0, "step_id": 0, "token_ids": [1, 2, 3], "step_time_s": 0.1}
    return _framed(msgspec.msgpack.encode(result))


def _is_in(frame: FrameType | None, function: str) -> bool:
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def _is_early(name: str, frame: FrameType | None) -> bool:
    """Return whether the fault would be another one at this moment."""
    if name.startswith("sleep"):  # a worker that sleeps while it sends, for which its heartbeats wait, is silent
        return _is_in(frame, "send")
    return name == "out of memory" and not _is_in(frame, "_execute")  # only there an allocation may fail


def _inject(number: int, frame: FrameType | None) -> None:
    name = NAMES[number - signal.SIGRTMIN - 1]
    if _is_early(name, frame):
        threading.Timer(0.003, os.kill, (os.getpid(), number)).start()
        return
    match name:
        case "exit":
            os._exit(0)
        case "raise":
            raise RuntimeError("a planted fault")
        case "random bytes":
            _write(random.randbytes(random.randrange(1, 4096)))
        case "over-long header":
            _write((2**31 - 1).to_bytes(4, "big") + b"garbage")
        case "half a frame":
            _write((1000).to_bytes(4, "big") + bytes(500))
            os._exit(0)
        case "unknown message":
            _write(_framed(b"\x81\xa4type\xa5strange"))
        case "stale result":
            _write(_stale_result())
        case "sleep 1 s":
            time.sleep(1)
        case "sleep 4 s":
            time.sleep(4)
        case "out of memory":
            raise MemoryError("a planted fault")
        case "hold the GIL":
            ctypes.PyDLL(None).usleep(HOLD_S * 1_000_000)


if "servekit.worker" in sys.orig_argv:
    for _number in SIGNALS.values():
        signal.signal(_number, _inject)
