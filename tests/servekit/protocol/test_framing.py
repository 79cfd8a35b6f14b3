"""Tests of framed messages: in pieces, invalid, and larger than the pipe."""

from __future__ import annotations

import os
import random
import tracemalloc
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.protocol.frames import MAX_MESSAGE_BYTES
from servekit.protocol.framing import PIPE_BYTES, MessageReceiver, MessageSender, PipeWriter, make_pipe
from servekit.protocol.messages import FromWorker, StepResult


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30_000), min_size=1, max_size=5), st.lists(st.integers(1, 50_000), max_size=8))
def test_messages_are_complete_for_any_split_of_their_bytes(sizes: list[int], cuts: list[int]) -> None:
    results = [StepResult(0, number, (7,) * size, 0.5) for number, size in enumerate(sizes)]
    reader, writer = make_pipe()
    for result in results:
        MessageSender[FromWorker](writer).send(result)
    os.set_blocking(reader.fileno(), False)
    sent = b""
    with suppress(BlockingIOError):
        while True:
            sent += os.read(reader.fileno(), 2**20)
    edges = sorted({0, len(sent), *(cut % len(sent) for cut in cuts)})
    receiver = MessageReceiver[FromWorker](reader, FromWorker)
    received = []
    for begin, end in pairwise(edges):
        os.write(writer.fileno(), sent[begin:end])
        received += receiver.receive_ready()
    assert received == results
    writer.close()
    with pytest.raises(EOFError):
        receiver.receive_ready()
    receiver.close()


@pytest.mark.parametrize("length", [-2, MAX_MESSAGE_BYTES + 1])
def test_an_invalid_length_is_refused(length: int) -> None:
    reader, writer = make_pipe()
    os.write(writer.fileno(), length.to_bytes(4, "big", signed=True) + b"garbage")
    with pytest.raises(ValueError, match="bytes"):
        MessageReceiver[FromWorker](reader, FromWorker).receive_ready()
    writer.close()
    reader.close()


def test_the_rest_of_a_large_message_is_sent_later_without_blocking() -> None:
    """A stopped worker reads nothing; the event loop continues, and the plan arrives complete in the end."""
    results = [StepResult(0, number, (7,) * size, 0.5) for number, size in enumerate([10, 3_000_000, 10])]
    reader, writer = make_pipe()
    os.set_blocking(writer.fileno(), False)
    os.set_blocking(reader.fileno(), False)
    sender, receiver = MessageSender[FromWorker](writer), MessageReceiver[FromWorker](reader, FromWorker)
    assert [sender.send_ready(result) for result in results] == [True, False, False]
    received = receiver.receive_ready()
    while not sender.flush():
        received += receiver.receive_ready()
    while len(received) < len(results):
        received += receiver.receive_ready()
    assert received == results
    reader.close()
    with pytest.raises(BrokenPipeError):
        sender.send_ready(results[0])
    sender.close()


def test_what_does_not_fit_into_the_pipe_is_not_copied() -> None:
    """A plan or an image of megabytes is encoded once. Each copy of it would hold the event loop for milliseconds."""
    reader, writer = make_pipe()
    os.set_blocking(writer.fileno(), False)
    os.set_blocking(reader.fileno(), False)
    pipe, data = PipeWriter(writer), random.Random(1).randbytes(8 * PIPE_BYTES)
    received = bytearray()
    tracemalloc.start()
    assert not pipe.write_ready(b"head", data, b"", b"tail")
    assert 7 * PIPE_BYTES <= pipe.num_unsent < 8 * PIPE_BYTES + 8
    assert tracemalloc.get_traced_memory()[1] < PIPE_BYTES / 2
    tracemalloc.stop()
    while not pipe.flush():
        received += os.read(reader.fileno(), PIPE_BYTES)
    while len(received) < len(data) + 8:
        received += os.read(reader.fileno(), PIPE_BYTES)
    assert bytes(received) == b"head" + data + b"tail" and pipe.num_unsent == 0
    reader.close()
    pipe.close()


def test_one_call_writes_no_more_than_a_pipe_full_although_its_reader_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one call would write all of 8 MB while a worker on another core reads."""
    monkeypatch.setattr(os, "writev", lambda _, parts: min(2**16, sum(map(len, parts))))
    reader, writer = make_pipe()
    pipe = PipeWriter(writer)
    assert not pipe.write_ready(bytes(3_000_000))
    assert pipe.num_unsent == 3_000_000 - PIPE_BYTES
    assert not pipe.flush() and pipe.flush()
    reader.close()
    pipe.close()
