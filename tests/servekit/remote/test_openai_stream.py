"""How the stream of a remote server is read: in any pieces, and with mistakes of any kind."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import ContextTooLong, InvalidRequest, RemoteFailed
from servekit.parsing.answer_events import AnswerEvent, CallArguments, CallBegins, Content, Reasoning
from servekit.remote import openai_stream
from servekit.remote.openai_stream import (
    MAX_CALLS,
    MAX_EVENT_BYTES,
    AnswerReader,
    EventReader,
    NamedToken,
    Usage,
    message_of,
)
from servekit.scheduler.sequence import FinishReason

STREAM = b': comment\n\ndata: {"a": 1}\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\n\n\ndata: last'


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_do_not_depend_on_the_pieces_in_which_they_arrive(cuts: list[int]) -> None:
    reader, found, start = EventReader(), [], 0
    for cut in [*sorted(cuts), len(STREAM)]:
        found += reader.feed(STREAM[start:cut])
        start = cut
    assert [*found, *reader.finish()] == [b'{"a": 1}', b"two\nlines", b"last"]
    assert reader.finish() == []


def test_events_and_answers_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteFailed, match="an event of more"):
        EventReader().feed(b"data: " + b"x" * MAX_EVENT_BYTES)
    reader = EventReader()
    for _ in range(MAX_EVENT_BYTES // 1007):
        reader.feed(b"data: " + b"x" * 1000 + b"\n")
    with pytest.raises(RemoteFailed, match="an event of more"):
        reader.feed(b"data: " + b"x" * 1000 + b"\n" + b"data: " + b"x" * 1000)
    monkeypatch.setattr(openai_stream, "MAX_ANSWER_BYTES", 100)
    reader = EventReader()
    assert [reader.feed(b"data: x\n\n") for _ in range(11)] == [[b"x"]] * 11
    with pytest.raises(RemoteFailed, match="for one answer"):
        reader.feed(b"data: x\n\n")


def chunk(*choices: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"choices": choices, **fields}).encode()


def events_of(*deltas: dict[str, Any], reader: AnswerReader | None = None) -> list[AnswerEvent]:
    reader = reader or AnswerReader(1, is_chat=True)
    pieces = [piece for delta in deltas for piece in reader.read(chunk({"index": 0, "delta": delta}))]
    assert all(
        piece.text == "".join(each.text for each in piece.events if isinstance(each, Content)) for piece in pieces
    )
    return [event for piece in pieces for event in piece.events]


def call(
    index: int | None = None, name: str | None = None, arguments: str | None = None, call_id: str | None = None
) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}]}


def test_deltas_of_a_chat_become_events() -> None:
    assert events_of(
        {"role": "assistant", "content": ""},
        {"reasoning_content": "a"},
        {"reasoning": "b"},
        {"content": "c", "refusal": "d"},
        call(0, "f", "{"),
        {"content": None},
        call(0, None, "}"),
        call(1, "g"),
        call(1, None, "{}"),
    ) == [
        Reasoning("a"),
        Reasoning("b"),
        Content("cd"),
        CallBegins(0, "f"),
        CallArguments(0, "{"),
        CallArguments(0, "}"),
        CallBegins(1, "g"),
        CallArguments(1, "{}"),
    ]
    assert events_of(call(None, "f", "{}"), call(None, "g", "{"), call(None, None, "}")) == [
        CallBegins(0, "f"),
        CallArguments(0, "{}"),
        CallBegins(1, "g"),
        CallArguments(1, "{"),
        CallArguments(1, "}"),
    ]
    assert events_of(call(0, "f"), {"tool_calls": [{"index": 0}]}) == [CallBegins(0, "f")]


def test_calls_that_all_have_the_number_0_differ_by_their_ids() -> None:
    assert events_of(call(0, "f", "{}", "one"), call(0, "f", "{", "two"), call(0, None, "}")) == [
        CallBegins(0, "f"),
        CallArguments(0, "{}"),
        CallBegins(1, "f"),
        CallArguments(1, "{"),
        CallArguments(1, "}"),
    ]
    later = events_of(call(0, "f", None, "a"), call(0, "g", None, "b"), call(1, "h", "{}", "c"))
    assert later == [CallBegins(0, "f"), CallBegins(1, "g"), CallBegins(2, "h"), CallArguments(2, "{}")]
    numbered = {"tool_calls": [{"index": 0, "id": 7, "function": {"name": "f"}}]}
    assert events_of(numbered) == [CallBegins(0, "f")], "an id may be of any type"


@pytest.mark.parametrize(
    "deltas",
    [
        [call(0)],
        [call(None, None, "{}")],
        [call(1, "f")],
        [call(0, "f"), call(1, "g"), call(0, None, "{}")],
        [call(0, "f"), {"content": "x"}, call(0, None, "{}")],
        [call(number, "f") for number in range(MAX_CALLS + 1)],
    ],
)
def test_calls_out_of_order_are_the_servers_failure(deltas: list[dict[str, Any]]) -> None:
    with pytest.raises(RemoteFailed, match="tool call"):
        events_of(*deltas)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "ending"),
    [
        ("stop", "END", (FinishReason.STOP, "END")),
        ("length", None, (FinishReason.LENGTH, None)),
        ("tool_calls", None, (FinishReason.STOP, None)),
        ("content_filter", None, (FinishReason.STOP, "content_filter")),
        ("abort", None, (FinishReason.ABORT, None)),
    ],
)
def test_finish_reasons(reason: str, stop_reason: str | None, ending: tuple[FinishReason, str | None]) -> None:
    reader = AnswerReader(1, is_chat=False)
    choice = {"index": 0, "text": "x", "finish_reason": reason, "stop_reason": stop_reason}
    (piece,) = reader.read(chunk(choice))
    assert (piece.text, piece.events) == ("x", ()) and reader.is_complete
    assert (reader.endings[0].reason, reader.endings[0].stop_reason) == ending
    assert reader.read(chunk(choice)) == [], "what follows the end is not part of the answer"


def test_tokens_of_a_completion_have_their_logprobs() -> None:
    logprobs = {
        "tokens": ["Hi", "!", "?", "x"],
        "token_logprobs": [-0.5, None, -1.0, -2.0],
        "top_logprobs": [{"Hi": -0.5, "Ho": -0.1, "He": -9.0}, None, None],
    }
    data = chunk({"text": "Hi!?x", "logprobs": logprobs})
    (piece,) = AnswerReader(1, is_chat=False, num_top=2).read(data)
    first = NamedToken(b"Hi", -0.5, [(b"Ho", -0.1), (b"Hi", -0.5)])
    assert piece.tokens == (first, NamedToken(b"?", -1.0, []), NamedToken(b"x", -2.0, []))
    assert AnswerReader(1, is_chat=False).read(data)[0].tokens == (), "they were not asked for"
    assert AnswerReader(1, is_chat=False, num_top=2).read(chunk({"text": "", "logprobs": {}})) == []
    assert AnswerReader(1, is_chat=False, num_top=2).read(chunk({"text": "a"}))[0].tokens == ()


def test_tokens_of_a_chat_have_their_bytes() -> None:
    top = [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}, {"token": "u", "logprob": -2.0}]
    token = {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": top}
    reader = AnswerReader(1, is_chat=True, num_top=1)
    (piece,) = reader.read(chunk({"delta": {}, "logprobs": {"content": [token]}}))
    assert (piece.text, piece.events) == ("", ()), "a part of a character has no text yet"
    assert piece.tokens == (NamedToken(b"\xc3", -0.5, [(b"\xc3", -0.5)]),)
    (piece,) = reader.read(chunk({"delta": {}, "logprobs": {"content": [{"token": "\u00fc", "logprob": -1.0}]}}))
    assert piece.tokens == (NamedToken(b"\xc3\xbc", -1.0, []),), "without bytes, they are those of its text"
    token["bytes"] = [300]
    with pytest.raises(RemoteFailed, match="bytes"):
        reader.read(chunk({"delta": {}, "logprobs": {"content": [token]}}))


def test_answers_are_complete_when_all_have_ended() -> None:
    reader = AnswerReader(2, is_chat=True)
    reader.read(chunk({"index": 1, "delta": {}, "finish_reason": "stop"}))
    assert not reader.is_complete
    reader.read(chunk({"index": 0, "finish_reason": "stop"}, usage=None, error=None))
    assert reader.is_complete and reader.usage is None
    details = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    reader.read(json.dumps({"usage": details}).encode())
    assert reader.usage == Usage(3, 2, 4)
    reader.read(chunk(usage={"prompt_tokens_details": None}))
    assert reader.usage == Usage(0, 0, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"\xff",
        b"[1]",
        chunk({"index": 1}),
        chunk({"index": -1}),
        chunk({"index": "0"}),
        chunk(usage={"completion_tokens": -1}),
        b"[" * 100_000,
    ],
)
def test_nonsense_is_the_servers_failure(data: bytes) -> None:
    with pytest.raises(RemoteFailed):
        AnswerReader(1, is_chat=True).read(data)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "token_id(s) [9] are out of the vocabulary", "code": 400}, InvalidRequest),
        ({"message": "This model's maximum context length is 9", "code": "400"}, ContextTooLong),
        ({"message": "x", "code": 422}, InvalidRequest),
        ({"message": "x", "code": 500}, RemoteFailed),
        ({"message": "x", "code": "server_error"}, RemoteFailed),
    ],
)
def test_refusal_within_a_stream_is_the_clients_mistake(error: dict[str, object], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=re.escape(str(error["message"]))):
        AnswerReader(1, is_chat=True).read(chunk(error=error))


@pytest.mark.parametrize("error", [{"message": "out of memory"}, "out of memory"])
def test_error_within_a_stream_is_told(error: object) -> None:
    with pytest.raises(RemoteFailed, match="failed: out of memory"):
        AnswerReader(1, is_chat=True).read(chunk(error=error))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"error": {"message": "m", "code": "c"}}', ("m", "c")),
        (b'{"error": {"message": "m", "code": 400}}', ("m", "400")),
        (b'{"error": "m"}', ("m", None)),
        (b'{"object": "error", "message": "m", "code": 404}', ("m", "404")),
        (b"<html>", ("", None)),
        (b"\xff", ("", None)),
    ],
)
def test_message_of_an_error(body: bytes, told: tuple[str, str | None]) -> None:
    assert message_of(body) == told
