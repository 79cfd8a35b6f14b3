"""Encode an answer of many megabytes in pieces of some kilobytes.

One call that encodes a whole answer holds the interpreter's lock for as long as it takes, and its objects take four
times the memory of the JSON. So the items of long lists are made and encoded some at a time. The answer has marks
in their place, which the encoded pieces replace at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from msgspec import Raw

from servekit.api.schemas.json_body import encode

ITEMS_PER_PIECE = 64  # tokens with 20 logprobs each take 80 kB
MIN_PIECE_BYTES = 2**16  # of what is sent at once
_MARK = b"\0"  # JSON cannot contain it: in texts it is escaped

# Returns the items as a list, either unchanged or as marks for encoded pieces. Response builders call it.
ItemList = Callable[[Iterable[Any]], list[Any]]


class LongJson:
    """The pieces of one answer."""

    def __init__(self, items_per_piece: int = ITEMS_PER_PIECE) -> None:
        self._items_per_piece = items_per_piece
        self._pieces: list[bytes | memoryview] = []

    def items(self, items: Iterable[Any]) -> list[Any]:
        """Encode the items of a list, and return the marks that take their place in the answer."""
        remaining, marks = iter(items), []
        while some := list(islice(remaining, self._items_per_piece)):
            inner = encode(some)[1:-1]  # it may contain marks of its own
            marks.append(Raw(b"%b%d%b" % (_MARK, len(self._pieces), _MARK)))
            self._pieces.append(inner)
        return marks

    def raw(self, json: memoryview) -> Raw:
        """Return the mark for JSON that is encoded already, and is not copied in one piece."""
        self._pieces.append(json)
        return Raw(b"%b%d%b" % (_MARK, len(self._pieces) - 1, _MARK))

    def pieces(self, answer: Any) -> list[bytes]:
        """Return the JSON of an answer, whose concatenation is the whole."""
        joined, unsent, num_bytes = [], list[bytes | memoryview](), 0
        for part in self._expanded(encode(answer)):
            unsent.append(part)
            num_bytes += len(part)
            if num_bytes >= MIN_PIECE_BYTES:
                joined.append(b"".join(unsent))
                unsent, num_bytes = [], 0
        return [*joined, b"".join(unsent)]

    def _expanded(self, text: bytes) -> Iterator[bytes | memoryview]:
        for number, part in enumerate(text.split(_MARK)):
            if number % 2 == 0:
                yield part
                continue
            piece, self._pieces[int(part)] = self._pieces[int(part)], b""
            if isinstance(piece, bytes):
                yield from self._expanded(piece)
            else:
                yield from (piece[at : at + MIN_PIECE_BYTES] for at in range(0, len(piece), MIN_PIECE_BYTES))
