"""Claims about the reader of forms. httpx2's encoder is the outside truth."""

from __future__ import annotations

import time

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.api.multipart import MAX_HEADER_BYTES, MAX_PARTS, MultipartReader, Part
from servekit.errors import InvalidRequest

TYPE = "multipart/form-data; boundary=b"


def parts_of(content_type: str, body: bytes, sizes: list[int]) -> tuple[list[tuple[str, str | None, bytes]], bool]:
    """Return name, filename and content of all parts, and whether the form is complete; the body comes in pieces."""
    reader, found, at = MultipartReader(content_type), list[tuple[str, str | None, bytes]](), 0
    pieces = []
    for size in sizes:
        pieces.append(body[at : at + size])
        at += size
    for piece in [*pieces, body[at:]]:
        for event in reader.feed(piece):
            if isinstance(event, Part):
                found.append((event.name, event.filename, b""))
            else:
                found[-1] = (*found[-1][:2], found[-1][2] + event)
    return found, reader.is_complete


@given(
    content=st.one_of(
        st.binary(max_size=200),
        st.lists(st.sampled_from([b"\r", b"\n", b"-", b"--", b"\r\n--", b"b", b"x"]), max_size=30).map(b"".join),
    ),
    name=st.text('abc.é "', min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 40), max_size=40),
)
def test_a_form_is_read_alike_in_whatever_pieces_it_comes(content: bytes, name: str, sizes: list[int]) -> None:
    request = httpx2.Request("POST", "http://x", data={"purpose": "batch"}, files={"file": (name, content)})
    read, is_complete = parts_of(request.headers["content-type"], request.read(), sizes)
    assert is_complete and read == [("purpose", None, b"batch"), ("file", name, content)]


def test_a_form_that_is_cut_off_is_not_complete() -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nhello\r\n--b--\r\n'
    assert parts_of(TYPE, body, []) == ([("a", None, b"hello")], True)
    for length in range(len(body) - 2):
        assert not parts_of(TYPE, body[:length], [])[1]


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=b"])
def test_another_type_is_refused(content_type: str) -> None:
    with pytest.raises(InvalidRequest, match="form"):
        MultipartReader(content_type)


@pytest.mark.parametrize(
    "body",
    [
        b"--b\r\nX: y\r\n\r\nhello",
        b"--bx\r\n",
        b"--b\r\nX: " + b"x" * MAX_HEADER_BYTES,
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * (MAX_PARTS + 1),
    ],
    ids=["no name", "text behind a boundary", "long headers", "many parts"],
)
def test_what_is_no_form_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parts_of(TYPE, body, [7] * (len(body) // 7))


@pytest.mark.parametrize(
    "filler",
    [b"a", b" ", b"a=;", b";", b'a="', b"\\", b"content-disposition: form-data;\n"],
    ids=["letters", "spaces", "parameters", "semicolons", "quotes", "backslashes", "lines"],
)
@pytest.mark.parametrize("beginning", [b"", b" a", b' a="', b" a=x", b' a=""'])
def test_the_headers_of_a_part_are_read_in_linear_time(beginning: bytes, filler: bytes) -> None:
    """On the event loop. Before, 8 KB of letters took 0.6 s, and a form has 16 parts."""
    head = b"Content-Disposition: form-data;" + beginning
    head += filler * ((MAX_HEADER_BYTES - len(head) - 1) // len(filler)) + b'"'
    reader = MultipartReader(TYPE)
    began_s = time.thread_time()
    with pytest.raises(InvalidRequest, match="has no name"):
        list(reader.feed(b"--b\r\n" + head + b"\r\n\r\n"))
    assert time.thread_time() - began_s < 0.1


def test_other_parameters_than_quoted_ones_are_skipped() -> None:
    head = b'Content-Disposition: form-data; filename*=UTF-8\'\'x; name="a;b" ; filename="c"'
    assert parts_of(TYPE, b"--b\r\n" + head + b"\r\n\r\nd\r\n--b--", [])[0] == [("a;b", "c", b"d")]


def test_what_follows_the_form_is_dropped() -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nhello\r\n--b--\r\n'
    reader = MultipartReader(TYPE)
    assert len(list(reader.feed(body + b"x" * 1000))) == 2
    for _ in range(3):
        assert list(reader.feed(b"x" * 1000)) == []
    assert reader.is_complete and len(reader._buffer) == 0
