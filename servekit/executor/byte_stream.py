"""Define the interface that carries bytes to and from a worker: pipes of a child process, or a socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from servekit.protocol.frames import Bytes

OnBytes = Callable[[bytes], None]
OnEnd = Callable[[str], None]


class ByteStream(Protocol):
    """Bytes to and from one worker. All methods are called on the event loop's thread.

    So a message of one worker can never be mistaken for one of its successor.
    """

    @property
    def pid(self) -> int | None:
        """The worker's process id, if it is a process of this machine that this process started."""

    @property
    def name(self) -> str:
        """The worker's name in log lines: its process id, or its address."""

    def start(self, on_bytes: OnBytes, on_end: OnEnd) -> None:
        """Begin to deliver what arrives, in pieces of any size.

        When the worker has ended, `on_end` is called once, after the last bytes, with what happened: "was killed by
        SIGKILL". `on_bytes` may call `stop`.
        """

    def write(self, *data: Bytes) -> None:
        """Send bytes. What cannot be sent at once is kept, and sent later: it must not change.

        Ignored when the worker has ended.
        """

    def stop(self) -> None:
        """Deliver nothing more, and send nothing more. Idempotent."""

    async def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the worker has ended, for at most `timeout_s` seconds. Returns whether it has ended."""

    async def end(self, is_hung: bool) -> None:
        """End the worker, or at least the connection to it, and free what it holds here. Called once.

        If `is_hung`, a worker process first writes the stacks of its threads to the log, if it can.
        """
