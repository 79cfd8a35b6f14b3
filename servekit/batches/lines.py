"""Read a batch's input file: one request on each line, as OpenAI's Batch API takes them.

The file is read line by line, never as a whole. Everything here runs in threads. The body of a line is copied and not
decoded, so that a long line holds the interpreter's lock for only about a millisecond. A check of a file pauses as long
as it works: else the event loop would wait for the lock for 5 ms, the interpreter's switch interval, each time it wakes
up. A lower priority of the thread would not help: it would hold the lock while it waits for a core.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Raw, Struct

from servekit.batches.records import LineError

MAX_LINES = 50_000  # of a batch, as with OpenAI
MAX_LINE_BYTES = 2**21
MAX_CUSTOM_ID = 512  # characters
MAX_ERRORS = 100  # reported for one file
_SLICE_BYTES = 2**18  # size of the lines that are read at once
WORK_S = 0.001  # a check pauses after this time, for as long as it has worked


class RequestLine(Struct):
    """One request: a line of the input file, without unknown fields."""

    custom_id: str
    method: str
    url: str
    body: Raw


class _Body(Struct):
    """The fields of a body that are checked before the batch begins. The schema of its route checks the rest."""

    stream: bool | None = None


def check_lines(path: Path, endpoint: str) -> tuple[int, list[LineError]]:
    """Return the number of requests in a file, and the errors in its lines. Raises OSError."""
    seen: set[str] = set()
    errors: list[LineError] = []
    with path.open("rb") as file:
        begun_s = time.monotonic()
        for number, line in _numbered(file):
            if (worked_s := time.monotonic() - begun_s) >= WORK_S:
                time.sleep(worked_s)
                begun_s = time.monotonic()
            if len(seen) >= MAX_LINES:
                message = f"the file has more than {MAX_LINES} requests; divide it among several batches"
                return len(seen), [LineError("too_many_lines", message)]
            try:
                custom_id = _check(line, number, endpoint)
            except _Wrong as wrong:
                errors.append(wrong.error)
            else:
                if custom_id in seen:
                    message = f"custom_id {custom_id[:64]!r} is used by an earlier line; each needs one of its own"
                    errors.append(LineError("duplicate_custom_id", message, number, "custom_id"))
                seen.add(custom_id)
            if len(errors) >= MAX_ERRORS:
                break
    if not seen and not errors:
        errors.append(LineError("empty_file", "the file has no requests; write one JSON object on each line"))
    return len(seen), errors


class _Wrong(Exception):
    def __init__(self, code: str, message: str, number: int, param: str | None = None) -> None:
        super().__init__(message)
        self.error = LineError(code, message, number, param)


def _check(line: bytes, number: int, endpoint: str) -> str:
    """Return the line's custom_id. Raises _Wrong."""
    if len(line) > MAX_LINE_BYTES:
        raise _Wrong("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes", number)
    try:
        request = decode_line(line)
    except msgspec.ValidationError as error:
        raise _Wrong("invalid_request", f"the line is not a request of a batch: {error}", number) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Wrong("invalid_json_line", f"the line is not valid JSON: {error}", number) from None
    if not 0 < len(request.custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id has {len(request.custom_id)} characters; it takes 1 to {MAX_CUSTOM_ID}"
        raise _Wrong("invalid_custom_id", message, number, "custom_id")
    if request.method != "POST":
        raise _Wrong("invalid_method", f"method = {request.method[:20]!r}; it takes POST", number, "method")
    if request.url != endpoint:
        message = f"url = {request.url[:100]!r}, but the batch was created for {endpoint}"
        raise _Wrong("mismatched_endpoint", message, number, "url")
    try:
        body = msgspec.json.decode(request.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Wrong("invalid_body", f"body: {error}", number, "body") from None
    if body.stream:
        message = "stream = true: a batch has no streams; leave it out"
        raise _Wrong("invalid_body", message, number, "body.stream")
    return request.custom_id


def decode_line(line: bytes) -> RequestLine:
    """Decode one line. Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError."""
    line.decode()  # msgspec does not check the UTF-8 of values that it leaves raw
    return _decoder.decode(line)


_decoder = msgspec.json.Decoder(RequestLine)


class LineReader:
    """Reads the requests of a checked input file that have no answer yet, in slices."""

    def __init__(self, path: Path, answered: Container[int]) -> None:
        """`answered` has the numbers of the lines to leave out. Raises OSError."""
        self._file = path.open("rb")
        self._lines = _numbered(self._file)
        self._answered = answered

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read(self) -> list[tuple[int, RequestLine]]:
        """Return the next lines with their numbers; none at the end of the file. Raises OSError."""
        found, num_bytes = [], 0
        for number, line in self._lines:
            if number in self._answered:
                continue
            found.append((number, decode_line(line)))
            num_bytes += len(line)
            if num_bytes >= _SLICE_BYTES:
                break
        return found


def _numbered(file: BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers; of a line that is too long, a part that is too long."""
    readline = file.readline
    number = 0
    while line := readline(MAX_LINE_BYTES + 2):
        number += 1
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            rest = readline(MAX_LINE_BYTES)
            if not rest or rest.endswith(b"\n"):
                break
        if line := line.strip():
            yield number, line
