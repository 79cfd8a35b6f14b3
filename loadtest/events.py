"""Server-sent events out of bytes: WHATWG HTML, section 9.2.6, "Interpreting an event stream".

Nothing is kept between calls but bytes: what is not yet a whole event is looked at again when there is more of it. So a
CR at the end of what has come is no special case: whether a LF follows makes a difference only within an event, and
then both are looked at together; behind one it is an empty line, which means nothing.
"""

from __future__ import annotations

import re

from msgspec import Struct

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_LINE_END = re.compile(rb"\r\n|\n|\r")


class Event(Struct, frozen=True, gc=False):
    """`data` without the line end after it. `end` is where in the bytes it was whole: behind its empty line."""

    data: bytes
    end: int
    name: bytes = b""


def split(received: bytes | bytearray, at_beginning: bool = False) -> tuple[list[Event], int]:
    """The events that are whole, and where the rest begins.

    `at_beginning` of the stream there may be a byte order mark. Comments are no events, and neither are fields without
    data between two empty lines, as the standard has it; `id` and `retry` are for clients that come back.
    """
    received = bytes(received)
    skipped = 0
    if at_beginning:
        if received.startswith(BYTE_ORDER_MARK):
            skipped = len(BYTE_ORDER_MARK)
        elif BYTE_ORDER_MARK.startswith(received):
            return [], 0
    return _split_slowly(received, skipped) if skipped or b"\r" in received else _split_at_newlines(received)


def _split_at_newlines(received: bytes) -> tuple[list[Event], int]:
    """The same where lines end with LF, which is what servers of models send: several times as fast."""
    events = []
    end = 0
    for block in received.split(b"\n\n")[:-1]:
        end += len(block) + 2
        if block.startswith(b"data:") and b"\n" not in block:
            events.append(Event(block[6:] if block.startswith(b"data: ") else block[5:], end))
        elif (event := _read(block.split(b"\n"), end)) is not None:
            events.append(event)
    return events, end


def _split_slowly(received: bytes, begin: int) -> tuple[list[Event], int]:
    events = []
    lines: list[bytes] = []
    whole = line_begin = begin
    for found in _LINE_END.finditer(received, begin):
        line = received[line_begin : found.start()]
        line_begin = found.end()
        if line:
            lines.append(line)
            continue
        if (event := _read(lines, line_begin)) is not None:
            events.append(event)
        lines.clear()
        whole = line_begin
    return events, whole


def _read(lines: list[bytes], end: int) -> Event | None:
    data: list[bytes] = []
    name = b""
    for line in lines:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return Event(b"\n".join(data), end, name) if data else None
