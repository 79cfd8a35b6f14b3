"""Answers in pieces: the same JSON as in one call, from few objects at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from servekit.api.responses.http import NUM_TOKENS_FOR_THREAD, respond_at_length
from servekit.api.responses.long_json import ITEMS_PER_PIECE, MIN_PIECE_BYTES, ItemList, LongJson
from servekit.api.schemas.json_body import encode


class Item(msgspec.Struct, weakref=True):
    number: int


TEXTS = ["\0", '"', "\\u0000", "ü", "\0001\0"]


def make(items: ItemList) -> dict[str, Any]:
    lists = (items({"text": TEXTS[at % 5], "top": items(range(at % 3))} for at in range(length)) for length in LENGTHS)
    return {"head": TEXTS, "lists": items(lists), "none": items(()), "tail": 1.5}


LENGTHS = [0, 1, ITEMS_PER_PIECE, ITEMS_PER_PIECE + 1, 5 * ITEMS_PER_PIECE, *range(200)]


def test_pieces_are_the_json_of_the_whole_answer() -> None:
    long_json = LongJson()
    pieces = long_json.pieces(make(long_json.items))
    assert b"".join(pieces) == encode(make(list))
    assert all(len(piece) >= MIN_PIECE_BYTES for piece in pieces[:-1]) and len(pieces) > 2
    assert max(map(len, pieces)) < 2 * MIN_PIECE_BYTES


def test_items_are_made_only_some_at_a_time() -> None:
    alive: list[int] = [0]
    most = 0

    def items() -> Iterator[Item]:
        nonlocal most
        for number in range(10 * ITEMS_PER_PIECE):
            item = Item(number)
            alive[0] += 1
            weakref.finalize(item, lambda: alive.__setitem__(0, alive[0] - 1))
            most = max(most, alive[0])
            yield item

    LongJson().items(items())
    assert ITEMS_PER_PIECE <= most <= 2 * ITEMS_PER_PIECE


@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS_FOR_THREAD])
async def test_answer_is_sent_with_its_length(num_tokens: int) -> None:
    response = await respond_at_length(make, num_tokens)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    await response({"type": "http", "method": "POST"}, receive, send)
    body = b"".join(message["body"] for message in sent[1:])
    assert body == encode(make(list))
    headers = dict(sent[0]["headers"])
    assert int(headers[b"content-length"]) == len(body) and headers[b"content-type"] == b"application/json"
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert (len(sent) > 2) == (num_tokens >= NUM_TOKENS_FOR_THREAD)


def test_json_that_is_encoded_already_is_cut_into_pieces_and_is_not_searched_for_marks() -> None:
    raw = b'["\\u0000' + b"7" * (3 * MIN_PIECE_BYTES) + b'"]'
    long_json = LongJson()
    pieces = long_json.pieces({"a": long_json.raw(memoryview(raw)), "b": long_json.raw(memoryview(b"[1]")), "c": "\0"})
    assert b"".join(pieces) == b'{"a":' + raw + b',"b":[1],"c":"\\u0000"}'
    assert max(map(len, pieces)) < 2 * MIN_PIECE_BYTES
