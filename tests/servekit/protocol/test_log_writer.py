"""Tests of the log writer: nothing waits for the reader of standard error, and no line is lost unreported."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import pytest

from servekit.protocol import log_writer
from servekit.protocol.log_writer import MAX_QUEUED_BYTES, LogWriter


def record(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, "", 0, text, arguments, None)


@pytest.fixture
def pipe() -> tuple[int, int]:
    """(reader, writer) of a pipe. It stays open, because the thread of a log writer lives on."""
    return os.pipe()


def read_in_thread(reader: int) -> Callable[[], list[str]]:
    """Read the pipe in a thread. Returns a function that returns the lines so far."""
    data = bytearray()

    def read() -> None:
        while piece := os.read(reader, 2**16):
            data.extend(piece)

    threading.Thread(target=read, daemon=True).start()
    return lambda: data.decode().splitlines()


def wait_for(is_done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_lines_are_written_in_order(pipe: tuple[int, int]) -> None:
    handler, lines = LogWriter(pipe[1]), read_in_thread(pipe[0])
    for number in range(2000):
        handler.handle(record("line %d", number))
    handler.flush()
    wait_for(lambda: len(lines()) == 2000)
    assert lines() == [f"line {number}" for number in range(2000)]
    assert handler.num_dropped == 0


def test_without_a_reader_lines_are_dropped_and_their_number_is_reported_later(pipe: tuple[int, int]) -> None:
    """The first lines are kept. The report stands where the others are missing."""
    handler, size = LogWriter(pipe[1]), 1000
    num_lines = 2 * MAX_QUEUED_BYTES // size
    for number in range(num_lines):
        handler.handle(record("%d %s", number, "x" * size))
    num_dropped = handler.num_dropped
    assert 0 < num_dropped < num_lines, "this thread came here, although nobody reads the pipe"
    lines = read_in_thread(pipe[0])
    wait_for(lambda: len(lines()) == num_lines - num_dropped + 1)
    handler.handle(record("afterwards"))
    wait_for(lambda: lines()[-1] == "afterwards")
    *kept, report, _ = lines()
    assert [line.split()[0] for line in kept] == [str(number) for number in range(num_lines - num_dropped)]
    assert report == f"{num_dropped} log lines were dropped: standard error was not read, or could not be written"


def test_flushing_is_bounded(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "FLUSH_TIMEOUT_S", 0.1)
    handler = LogWriter(pipe[1])
    for _ in range(200):
        handler.handle(record("x" * 1000))
    handler.flush()  # returns, although the pipe holds 64 KiB
    assert handler.num_dropped == 0


def test_lines_that_cannot_be_written_are_counted_and_reported_when_writing_works_again(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_full = True

    def write(number: int, data: memoryview) -> int:
        if is_full:
            raise OSError(28, "No space left on device")
        return os.writev(number, [data])

    monkeypatch.setattr(log_writer.os, "write", write)
    handler, lines = LogWriter(pipe[1]), read_in_thread(pipe[0])
    for number in range(3):
        handler.handle(record("lost %d", number))
    handler.flush()
    assert handler.num_dropped == 3
    is_full = False
    handler.handle(record("kept"))
    wait_for(lambda: len(lines()) == 2)
    assert lines()[0].startswith("3 log lines were dropped") and lines()[1] == "kept"


def test_a_pipe_that_another_program_made_non_blocking_loses_nothing(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    handler = LogWriter(pipe[1])
    for number in range(500):
        handler.handle(record("%d %s", number, "x" * 1000))
    lines = read_in_thread(pipe[0])
    wait_for(lambda: len(lines()) == 500)
    assert handler.num_dropped == 0


def test_a_record_that_cannot_be_formatted_is_replaced_by_the_reason(pipe: tuple[int, int]) -> None:
    handler, lines = LogWriter(pipe[1]), read_in_thread(pipe[0])
    handler.handle(record("%d", "no number"))
    wait_for(lambda: len(lines()) > 1)
    assert lines()[-1].startswith("TypeError")
