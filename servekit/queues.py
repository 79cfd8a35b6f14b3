"""The task queue and the result queue between manager and worker: one-way, bounded, carrying bytes.

Each is one end of an operating-system pipe from `multiprocessing`, with msgpack messages in length-prefixed frames.
Why not `multiprocessing.Queue`: it pickles, it needs a thread to feed it, and when its reader is killed while waiting
it stays locked for whoever reads next. A pipe reports the death of the other end as EOF within milliseconds, and
asyncio can watch it. The bound is the pipe's buffer. A queue lives as long as one worker incarnation, never longer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec

# A step plan has about 5 bytes for each token and block that it names, and what a request may bring along is bounded
# where it comes in; so this is far beyond any honest message, and a longer frame means that the stream is garbage.
MAX_MESSAGE_BYTES = 2**30
# Large enough that a plan hardly ever blocks the manager's event loop while the worker is busy computing.
PIPE_BYTES = 2**20
HEADER_BYTES = 4

Message = TypeVar("Message")


class MessageSender(Generic[Message]):
    """The writing end."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._encode = msgspec.msgpack.Encoder().encode
        self._unsent = bytearray()

    def send(self, message: Message) -> None:
        """Write one message, however long it takes. Raises BrokenPipeError when the reader is gone."""
        self._connection.send_bytes(self._encode(message))

    def send_ready(self, message: Message) -> bool:
        """Write as much of it as the pipe takes now, for an event loop, which waits for nobody; True if that was all.

        The pipe must be non-blocking, and what is left goes with `flush`, when there is room. Raises like `send`.
        """
        frame = self._encode(message)
        self._unsent += len(frame).to_bytes(HEADER_BYTES, "big", signed=True) + frame
        return self.flush()

    def flush(self) -> bool:
        """Write as much of what is left as the pipe takes now; True if that was all."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: os.write(self.fileno(), self._unsent)]
        return not self._unsent

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()


class MessageReceiver(Generic[Message]):
    """The reading end. Bytes become typed, validated values here and nowhere else."""

    def __init__(self, connection: Connection[Any, Any], message_type: Any) -> None:
        self._connection = connection
        self._decode = msgspec.msgpack.Decoder(message_type).decode
        self._begun = bytearray()  # of a message whose rest has not come yet

    def receive(self) -> Message:
        """Wait for one message. Raises EOFError when the writer is gone, ValueError when it sends garbage."""
        frame = self._connection.recv_bytes(MAX_MESSAGE_BYTES)
        message: Message = self._decode(frame)
        return message

    def has_message(self) -> bool:
        """Whether `receive` would find something at once, be it the end."""
        return self._connection.poll(0)

    def receive_ready(self) -> list[Message]:
        """The messages that are whole by now, for an event loop that says there is something to read.

        A large result comes in pieces, and nobody waits for the next one; that loop has made the pipe non-blocking.
        Raises like `receive`.
        """
        piece = os.read(self._connection.fileno(), PIPE_BYTES)
        if not piece:
            raise EOFError
        self._begun += piece
        messages = []
        while (end := self._end_of_frame()) is not None:
            message: Message = self._decode(bytes(self._begun[HEADER_BYTES:end]))
            messages.append(message)
            del self._begun[:end]
        return messages

    def _end_of_frame(self) -> int | None:
        """Where the first message ends, if it is all there. Its length stands before it, as `Connection` writes it."""
        if len(self._begun) < HEADER_BYTES:
            return None
        length = int.from_bytes(self._begun[:HEADER_BYTES], "big", signed=True)
        if not 0 <= length <= MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        end = HEADER_BYTES + length
        return end if len(self._begun) >= end else None

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()


def make_pipe() -> tuple[Connection[Any, Any], Connection[Any, Any]]:
    """(reader, writer) of a fresh one-way pipe."""
    reader, writer = Pipe(duplex=False)
    with contextlib.suppress(OSError):  # an unprivileged user's pipe memory may be used up; smaller only waits more
        fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reader, writer


def adopt_reader(file_descriptor: int) -> Connection[Any, Any]:
    """The reading end that a parent process handed down."""
    return Connection(file_descriptor, writable=False)


def adopt_writer(file_descriptor: int) -> Connection[Any, Any]:
    """The writing end that a parent process handed down."""
    return Connection(file_descriptor, readable=False)
