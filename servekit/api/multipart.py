"""Read a multipart/form-data body (RFC 7578) as it arrives, with bounds on everything but the contents of its parts.

The caller bounds those: it gets them in pieces. The reader keeps no more than one piece, or the headers of one part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from servekit.errors import InvalidRequest

MAX_PARTS = 16
MAX_HEADER_BYTES = 2**13  # of one part
_BOUNDARY = re.compile(
    r"""multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))""", re.I | re.S
)
_DISPOSITION = re.compile(rb"^content-disposition:\s*form-data\s*;(.*)$", re.I | re.M)
# One parameter, and the semicolon after it. Parameters are matched one after the other, from the beginning. Searching
# for them in 8 KB of letters takes half a second, because a search begins again at each letter.
_PARAMETER = re.compile(rb'\s*([a-z*]+)=(?:"((?:[^"\\\r\n]|\\.)*)"|[^";\s]*)\s*(?:;|$)', re.I)


class Part(Struct, frozen=True):
    """The beginning of a part. Its content follows, as bytes."""

    name: str
    filename: str | None


class MultipartReader:
    """Splits one body into its parts."""

    def __init__(self, content_type: str) -> None:
        """Raises InvalidRequest if this is not the type of a form."""
        found = _BOUNDARY.match(content_type)
        if found is None:
            raise InvalidRequest(
                f"content-type = {content_type[:60]!r}: the body must be a form, multipart/form-data with a "
                "boundary, as curl -F sends it",
                param="content-type",
            )
        self._delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1", "replace")
        self._buffer = bytearray(b"\r\n")  # so that the first delimiter is like the others
        self._is_in_part = False
        self._is_in_headers = False
        self._num_to_skip = 0  # bytes before the content: the line end that ends the headers
        self._num_parts = 0
        self.is_complete = False  # the last delimiter has come

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        """Yield the parts that begin in this piece of the body, each followed by what there is of its content.

        What follows the last delimiter is dropped. Raises InvalidRequest for what is not a form.
        """
        if self.is_complete:
            return
        buffer = self._buffer
        buffer += data
        while not self.is_complete:
            if self._is_in_headers:
                end = buffer.find(b"\r\n\r\n")
                if (len(buffer) if end < 0 else end) > MAX_HEADER_BYTES:
                    raise InvalidRequest(f"the headers of a part of the form exceed {MAX_HEADER_BYTES} bytes")
                if end < 0:
                    return
                yield self._part(bytes(buffer[:end]))
                # The line end before the content belongs to a delimiter that may follow at once.
                del buffer[: end + 2]
                self._is_in_headers, self._is_in_part = False, True
                self._num_to_skip = 2
            at = buffer.find(self._delimiter)
            if at < 0:
                yield from self._content(len(buffer) - len(self._delimiter) + 1)
                return
            after = at + len(self._delimiter)
            if len(buffer) < after + 2:
                yield from self._content(at)
                return
            yield from self._content(at)
            mark = bytes(buffer[len(self._delimiter) : len(self._delimiter) + 2])
            del buffer[: len(self._delimiter) + 2]
            if mark == b"--":
                self.is_complete = True
                buffer.clear()
            elif mark != b"\r\n":
                raise InvalidRequest("the body is not a valid form: a boundary is followed by other text")
            self._is_in_part, self._is_in_headers = False, True

    def _content(self, length: int) -> Iterator[bytes]:
        """Take this many bytes from the buffer; yield them if they are the content of a part."""
        if length <= 0:
            return
        content = bytes(self._buffer[:length])
        del self._buffer[:length]
        if self._is_in_part:
            num_skipped = min(self._num_to_skip, length)
            self._num_to_skip -= num_skipped
            if length > num_skipped:
                yield content[num_skipped:]

    def _part(self, headers: bytes) -> Part:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts")
        disposition = _DISPOSITION.search(headers.replace(b"\r\n", b"\n"))
        parameters = _parameters(disposition[1]) if disposition else {}
        if b"name" not in parameters:
            raise InvalidRequest("a part of the form has no name; it needs Content-Disposition: form-data; name=...")
        filename = parameters.get(b"filename")
        return Part(_text(parameters[b"name"]), None if filename is None else _text(filename))


def _parameters(text: bytes) -> dict[bytes, bytes]:
    """Return the parameters whose values are quoted, up to the first one that is not valid. Takes linear time."""
    found, at = {}, 0
    while at < len(text) and (parameter := _PARAMETER.match(text, at)):
        if parameter[2] is not None:
            found[parameter[1]] = parameter[2]
        at = parameter.end()
    return found


def _text(value: bytes) -> str:
    return value.replace(b'\\"', b'"').replace(b"%22", b'"').decode("utf-8", "replace")
