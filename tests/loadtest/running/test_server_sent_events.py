"""Test parsing server-sent events, against the standard written out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadtest.running.server_sent_events import Event, split


def as_the_standard_says(stream: bytes) -> list[tuple[bytes, bytes]]:
    """(name, data) of each event: WHATWG HTML 9.2.6, line by line and without a thought for speed."""
    stream = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events = []
    name, data, has_data = b"", b"", False
    for line in stream.split(b"\n")[:-1]:
        if not line:
            if has_data:
                events.append((name, data[:-1]))
            name, data, has_data = b"", b"", False
            continue
        field, colon, value = line.partition(b":")
        if colon and not field:
            continue
        if value[:1] == b" ":
            value = value[1:]
        if field == b"data":
            data, has_data = data + value + b"\n", True
        elif field == b"event":
            name = value
    return events


STREAMS = {
    "lf": b'data: {"a": 1}\n\n: ping\n\ndata:two\ndata: lines\n\ndata\n\n\n\ndata: last\n\n',
    "fields": b"event: error\ndata: x\nid: 7\n\nretry: 5\n\nevent: e\n\ndata: y\n\n",
    "crlf": b"data: a\r\n\r\n: ping\r\n\r\ndata: b\r\ndata: c\r\n\r\nevent: e\r\ndata:d\r\n\r\n",
    "cr": b"data: a\r\rdata: b\rdata: c\r\r:\r\rdata: d\r\r",
    "mixed": b"data: a\n\r\ndata: b\r\n\ndata: c\r\rdata: d\n\n",
    "begins with a mark": b"\xef\xbb\xbfdata: a\n\ndata: \xef\xbb\xbfb\n\n",
    "spaces and colons": b"data:  two\n\ndata: a: b\n\nnonsense\ndata: c\n\n data: no field\n\n",
    "unfinished": b"data: a\n\ndata: never ended\n",
}


def in_pieces(pieces: list[bytes]) -> Iterator[tuple[Event, int]]:
    """Each event, and the number of the piece with which it was whole."""
    rest, begun = b"", False
    for number, piece in enumerate(pieces):
        rest += piece
        events, consumed = split(rest, at_beginning=not begun)
        begun = begun or consumed > 0
        rest = rest[consumed:]
        for event in events:
            yield event, number


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_events_are_those_of_the_standard_however_their_bytes_come(stream: bytes) -> None:
    expected = as_the_standard_says(stream)
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1, 3):
            pieces = [stream[:first], stream[first:second], stream[second:]]
            assert [(event.name, event.data) for event, _ in in_pieces(pieces)] == expected
    assert [(event.name, event.data) for event, _ in in_pieces([bytes([byte]) for byte in stream])] == expected


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_an_event_is_there_with_the_byte_that_completes_it(line_end: bytes) -> None:
    one = b"data: x" + line_end * 2
    for length in range(len(one)):
        # Of the two bytes of the last line end, the first one ends the line.
        is_whole = line_end == b"\r\n" and length == len(one) - 1
        assert bool(split(one[:length])[0]) == is_whole
    (event,), consumed = split(one + b": ping")
    assert event.end == consumed == len(one)
