"""Send messages between processes: msgpack in frames (`servekit/protocol/frames.py`), over one-way pipes.

The task queue and the result queue between manager and worker are such pipes, made by `multiprocessing`; sandbox
processes use their standard input and output. Why not `multiprocessing.Queue`: it pickles, it needs a thread to feed
it, and when its reader is killed while waiting, it stays locked for the next reader. A pipe reports the death of the
other end as EOF within milliseconds, and asyncio can watch it. The pipe's buffer is the bound. A pipe lives as long as
the process at its other end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import deque
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec

from servekit.protocol.frames import MAX_MESSAGE_BYTES, Bytes, FrameCodec, encode_length

# Large enough that a plan almost always fits while the worker is busy computing.
PIPE_BYTES = 2**20
MAX_JOINED_BYTES = 2**16
MAX_PARTS_AT_ONCE = 64  # in one call of the kernel, which takes 1,024 at most

Message = TypeVar("Message")


class PipeWriter:
    """The writing end of a pipe that must not block. What does not fit into the pipe is kept, and is not copied."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._unsent: deque[memoryview] = deque()  # none is empty
        self.num_unsent = 0  # bytes

    def write_ready(self, *data: Bytes) -> bool:
        """Write as much as fits into the pipe, without blocking. Returns True if all was written.

        The pipe must be non-blocking. Call `flush` to write the rest when there is room. What is written must not
        change until then. Raises BrokenPipeError if the reader has exited.
        """
        if sum(map(len, data)) <= MAX_JOINED_BYTES:  # almost always; copying few bytes is faster than keeping parts
            data = (b"".join(data),)
            if not self._unsent:
                with contextlib.suppress(BlockingIOError):
                    num_written = os.write(self.fileno(), data[0])
                    if num_written == len(data[0]):
                        return True
                    data = (memoryview(data[0])[num_written:],)
        for part in data:
            if len(part):
                self._unsent.append(memoryview(part))
                self.num_unsent += len(part)
        return self.flush()

    def flush(self) -> bool:
        """Write as much of the rest as fits into the pipe. Returns True if all was written.

        One call writes about as much as the pipe holds. Without this limit, a call would last as long as the reader
        empties the pipe: for 8 MB, some milliseconds.
        """
        num_written = 0
        with contextlib.suppress(BlockingIOError):
            while self._unsent and num_written < PIPE_BYTES:
                num_bytes = os.writev(self.fileno(), list(islice(self._unsent, MAX_PARTS_AT_ONCE)))
                self._drop(num_bytes)
                num_written += num_bytes
        return not self._unsent

    def _drop(self, num_bytes: int) -> None:
        """Drop the first bytes, which are written."""
        self.num_unsent -= num_bytes
        while num_bytes:
            first = self._unsent.popleft()
            if num_bytes < len(first):
                self._unsent.appendleft(first[num_bytes:])
                return
            num_bytes -= len(first)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()


class MessageSender(PipeWriter, Generic[Message]):
    """The writing end of a pipe, for messages."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        super().__init__(connection)
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: Message) -> None:
        """Write one message; blocks until it is written. Raises BrokenPipeError if the reader has exited."""
        self._connection.send_bytes(self._encode(message))

    def send_ready(self, message: Message) -> bool:
        """Write as much of a message as fits into the pipe, like `write_ready`."""
        payload = self._encode(message)
        return self.write_ready(encode_length(len(payload)), payload)


class MessageReceiver(Generic[Message]):
    """The reading end of a pipe. It decodes and validates messages."""

    def __init__(self, connection: Connection[Any, Any], message_type: Any) -> None:
        self._connection = connection
        self._decode = msgspec.msgpack.Decoder(message_type).decode
        self._frames = FrameCodec()

    def receive(self) -> Message:
        """Wait for one message. Raises EOFError if the writer has exited, ValueError for invalid bytes."""
        frame = self._connection.recv_bytes(MAX_MESSAGE_BYTES)
        message: Message = self._decode(frame)
        return message

    def has_message(self) -> bool:
        """Whether `receive` would return or raise EOFError without waiting."""
        return self._connection.poll(0)

    def receive_ready(self) -> list[Message]:
        """The messages that have arrived completely. Call it when the event loop reports the pipe as readable.

        A large message arrives in pieces, so this may return none. The pipe must be non-blocking. Raises like
        `receive`, and BlockingIOError if there is nothing to read.
        """
        piece = os.read(self._connection.fileno(), PIPE_BYTES)
        if not piece:
            raise EOFError
        return [self._decode(payload) for payload in self._frames.decode(piece)]

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()


def make_pipe() -> tuple[Connection[Any, Any], Connection[Any, Any]]:
    """(reader, writer) of a new one-way pipe."""
    reader, writer = Pipe(duplex=False)
    # This fails if the pipe memory of an unprivileged user is used up. A smaller pipe only blocks more often.
    with contextlib.suppress(OSError):
        fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reader, writer


def adopt_reader(file_descriptor: int) -> Connection[Any, Any]:
    """The reading end that was inherited from the parent process."""
    return Connection(file_descriptor, writable=False)


def adopt_writer(file_descriptor: int) -> Connection[Any, Any]:
    """The writing end that was inherited from the parent process."""
    return Connection(file_descriptor, readable=False)
