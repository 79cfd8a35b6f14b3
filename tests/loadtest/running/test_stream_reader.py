"""Test reading streamed answers of each API, made with servekit's own schemas."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from loadtest.record import Counted, Outcome
from loadtest.running.stream_reader import StreamReader, reader_for
from loadtest.target import ApiFormat
from servekit.api.schemas import native, openai, tgi
from servekit.api.schemas.common_fields import Usage
from servekit.scheduler.sequence import FinishReason


def event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def read(api: ApiFormat, *pieces: bytes, keeps_text: bool = True) -> StreamReader:
    """Pieces that come at the times 1, 2, 3, …; what is whole is read as it comes."""
    reader = reader_for(api, keeps_text)
    assert reader is not None
    rest = b""
    for number, piece in enumerate(pieces, 1):
        ends, times_s = array("L", [len(rest), len(rest) + len(piece)]), array("d", [-1.0, number])
        rest += piece
        rest = rest[reader.feed(rest, ends, times_s) :]
    return reader


def native_event(index: int, text: str, **last: Any) -> native.StreamEvent:
    return native.StreamEvent(index, native.Token(65, text, False), **last)


def native_end(index: int, text: str, whole: str) -> native.StreamEvent:
    usage = Usage(5, index, 5 + index, 0)
    return native_event(
        index, text, generated_text=whole, id="gen-1", finish_reason=FinishReason.LENGTH, stop_reason=None, usage=usage
    )


def test_native_events_that_carry_several_tokens_are_counted_by_their_index() -> None:
    pieces = [event(native_event(1, "a")), event(native_event(4, "bcd")), event(native_end(6, "ef", "abcdef"))]
    reader = read(ApiFormat.GENERATE_STREAM, *pieces)
    assert reader.verdict() == (Outcome.OK, "")
    assert list(reader.token_times_s) == [1.0, 2.0, 3.0]
    assert list(reader.tokens_per_event) == [1, 3, 2]
    assert (reader.num_prompt_tokens, reader.num_output_tokens) == (5, 6)
    assert (reader.counted_by, reader.finish_reason, reader.text) == (Counted.USAGE, "length", "abcdef")


ONE_TO_THREE = [native_event(1, "a"), native_event(2, "b"), native_end(3, "c", "abc")]


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        (ONE_TO_THREE, Outcome.OK),
        (ONE_TO_THREE[:2], Outcome.GARBLED),  # no end
        ([ONE_TO_THREE[0], *ONE_TO_THREE], Outcome.GARBLED),  # one came twice
        ([ONE_TO_THREE[1], ONE_TO_THREE[0], ONE_TO_THREE[2]], Outcome.GARBLED),  # in another order
        ([*ONE_TO_THREE, ONE_TO_THREE[2]], Outcome.GARBLED),  # something behind the end
        ([*ONE_TO_THREE[:2], native_end(3, "c", "abx")], Outcome.GARBLED),  # a text that is not what was reported
        ([*ONE_TO_THREE[:2], native_end(2, "", "ab")], Outcome.GARBLED),  # an end that counts differently
    ],
)
def test_incomplete_native_answers_are_garbled(events: list[native.StreamEvent], outcome: Outcome) -> None:
    assert read(ApiFormat.GENERATE_STREAM, *map(event, events)).verdict()[0] is outcome


def test_a_lost_event_is_detected_without_keeping_the_text() -> None:
    lost_at_the_end = native.StreamEvent(
        2, None, generated_text="ab", finish_reason=FinishReason.LENGTH, usage=Usage(5, 3, 8, 0)
    )
    reader = read(ApiFormat.GENERATE_STREAM, *map(event, [*ONE_TO_THREE[:2], lost_at_the_end]), keeps_text=False)
    assert reader.verdict() == (Outcome.GARBLED, "usage and the events have different numbers of tokens")


def test_a_lost_native_event_in_the_middle_is_detected_without_keeping_the_text() -> None:
    # Its neighbours' numbers may be those of events with several tokens.
    events = [native_event(number, text) for number, text in ((1, "a"), (2, "b"), (4, "d"))]
    for end, verdict in (
        (native_end(5, "e", "abcde"), (Outcome.GARBLED, "the text of the last event differs from that of all events")),
        (native_end(5, "e", "abde"), (Outcome.OK, "")),
    ):
        assert read(ApiFormat.GENERATE_STREAM, *map(event, [*events, end]), keeps_text=False).verdict() == verdict


def test_an_answer_that_a_deadline_ended_is_failed() -> None:
    end = native.StreamEvent(
        1, None, generated_text="a", id="gen-1", finish_reason=FinishReason.DEADLINE, usage=Usage(5, 1, 6, 0)
    )
    reader = read(ApiFormat.GENERATE_STREAM, event(native_event(1, "a")), event(end))
    assert reader.verdict() == (Outcome.FAILED, "deadline")
    assert list(reader.token_times_s) == [1.0], "its end brought no token"


def tgi_event(index: int, text: str, **last: Any) -> tgi.TgiStreamEvent:
    return tgi.TgiStreamEvent(index, tgi.TgiToken(65, text, -0.5, False), **last)


def test_tgi_events_are_read_with_and_without_servekits_fields() -> None:
    end = tgi_event(4, "d", generated_text="abcd", details=tgi.TgiStreamDetails("length", 4, 9, None))
    reader = read(ApiFormat.TGI, event(tgi_event(1, "a")), event(tgi_event(3, "bc")), event(end))
    assert reader.verdict() == (Outcome.OK, "")
    assert list(reader.tokens_per_event) == [1, 2, 1]
    assert (reader.num_prompt_tokens, reader.num_output_tokens, reader.finish_reason) == (9, 4, "length")
    # As TGI writes it: no space behind the colon, and of old no index.
    piece = (
        b'data:{"token":{"id":1,"text":"x","logprob":-1.5,"special":false},"generated_text":null,"details":null}\n\n'
    )
    last = piece.replace(b'"generated_text":null', b'"generated_text":"xx"')
    older = read(ApiFormat.TGI, piece, last)
    assert older.verdict() == (Outcome.OK, "")
    assert (older.num_seen_tokens, older.counted_by) == (2, Counted.EVENTS)


def test_tgis_end_at_a_deadline_brings_no_token() -> None:
    details = tgi.TgiStreamDetails("deadline", 1, 9, None)
    end = tgi.TgiStreamEvent(1, tgi.TgiToken(0, "", None, True), generated_text="a", details=details)
    reader = read(ApiFormat.TGI, event(tgi_event(1, "a")), event(end))
    assert reader.verdict() == (Outcome.FAILED, "deadline") and reader.num_seen_tokens == 1


def test_tgis_number_of_tokens_is_that_of_its_events() -> None:
    for num_tokens, outcome in ((2, Outcome.OK), (10, Outcome.GARBLED), (1, Outcome.GARBLED)):
        details = tgi.TgiStreamDetails("length", num_tokens, 9, None)
        end = tgi_event(2, "b", generated_text="ab", details=details)
        assert read(ApiFormat.TGI, event(tgi_event(1, "a")), event(end)).verdict()[0] is outcome


DONE = b"data: [DONE]\n\n"
HEAD: dict[str, Any] = {"id": "cmpl-1", "created": 1, "model": "m"}


def completion(text: str, finish_reason: str | None = None, usage: openai.OpenAIUsage | None = None) -> bytes:
    return event(
        openai.CompletionResponse(
            **HEAD,
            choices=[openai.CompletionChoice(0, text, finish_reason=finish_reason)],
            usage=usage,
        )
    )


def chat(delta: openai.ChatDelta, finish_reason: str | None = None) -> bytes:
    return event(
        openai.ChatCompletionChunk(
            **HEAD, choices=[openai.ChatChunkChoice(0, delta, finish_reason=finish_reason)], usage=None
        )
    )


def used(num_tokens: int) -> openai.OpenAIUsage:
    return openai.OpenAIUsage(5, num_tokens, 5 + num_tokens, openai.PromptTokensDetails(0))


def usage_chunk(num_tokens: int) -> bytes:
    return event(openai.CompletionResponse(**HEAD, choices=[], usage=used(num_tokens)))


def test_completion_tokens_are_counted_by_usage_or_by_chunks_with_text() -> None:
    reader = read(
        ApiFormat.COMPLETIONS, completion("a"), completion("b"), completion("", "length"), usage_chunk(3) + DONE
    )
    assert reader.verdict() == (Outcome.OK, "")
    assert list(reader.token_times_s) == [1.0, 2.0], "a chunk without text brought nothing to show"
    assert (reader.num_output_tokens, reader.counted_by, reader.text) == (3, Counted.USAGE, "ab")
    without_usage = read(ApiFormat.COMPLETIONS, completion("a"), completion("b", "stop") + DONE)
    assert (without_usage.num_output_tokens, without_usage.num_seen_tokens) == (None, 2)
    assert without_usage.counted_by is Counted.EVENTS


def test_running_totals_give_the_tokens_of_a_chunk() -> None:
    pieces = [completion("a", usage=used(1)), completion("bcd", usage=used(5)), completion("e", "length", used(6))]
    reader = read(ApiFormat.COMPLETIONS, *pieces, usage_chunk(6) + DONE)
    assert list(reader.tokens_per_event) == [1, 4, 1] and reader.num_output_tokens == 6


@pytest.mark.parametrize(("num_tokens", "outcome"), [(2, Outcome.GARBLED), (3, Outcome.OK), (64, Outcome.OK)])
def test_more_chunks_with_text_than_tokens_are_garbled(num_tokens: int, outcome: Outcome) -> None:
    chunks = [completion("a"), completion("b"), completion("b"), completion("", "length")]
    plain = read(ApiFormat.COMPLETIONS, *chunks, usage_chunk(num_tokens) + DONE)
    assert plain.verdict()[0] is outcome, "of several tokens in a chunk there are fewer chunks than tokens"
    totals = [completion("a", usage=used(1)), *[completion("b", usage=used(2))] * 2, completion("c", "length", used(3))]
    assert read(ApiFormat.COMPLETIONS, *totals, usage_chunk(3) + DONE).verdict() == (
        Outcome.GARBLED,
        "more events have text than usage has tokens",
    )


def test_a_chats_first_chunk_has_a_role_and_no_token() -> None:
    first, last = chat(openai.ChatDelta("assistant", "")), chat(openai.ChatDelta(), "stop")
    reader = read(ApiFormat.CHAT, first, chat(openai.ChatDelta(content="a")), last, usage_chunk(1) + DONE)
    assert reader.verdict() == (Outcome.OK, "") and list(reader.token_times_s) == [2.0]
    thinking = event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]})
    thinker = read(ApiFormat.CHAT, thinking, chat(openai.ChatDelta(content="a"), "stop") + DONE)
    assert list(thinker.token_times_s) == [1.0, 2.0], "a thought is a token like others"


@pytest.mark.parametrize(
    ("pieces", "verdict"),
    [
        ([completion("a", "stop")], (Outcome.GARBLED, "the stream ended without its end mark")),
        ([completion("a"), DONE], (Outcome.GARBLED, "[DONE] without a finish reason")),
        ([completion("a", "stop"), DONE, completion("b")], (Outcome.GARBLED, "an event after the end mark")),
        ([completion("a", "abort"), DONE], (Outcome.FAILED, "abort")),
        ([completion("a"), b"data: {nonsense\n\n"], (Outcome.GARBLED, "an event is not the expected JSON")),
        (
            [completion("a"), b'data: {"choices": 5}\n\n'],
            (Outcome.GARBLED, "an event is not the expected JSON"),
        ),
        (
            [completion("a"), event({"error": {"message": "m", "type": "server_error", "code": "worker_lost"}}), DONE],
            (Outcome.FAILED, "worker_lost"),
        ),
        (
            [completion("a"), event({"error": {"message": "m", "type": "InternalServerError", "code": 500}}), DONE],
            (Outcome.FAILED, "InternalServerError"),
        ),
        ([completion("a"), b'event: error\ndata: {"type": "overloaded"}\n\n'], (Outcome.FAILED, "overloaded")),
    ],
)
def test_incomplete_completions_are_garbled(pieces: list[bytes], verdict: tuple[Outcome, str]) -> None:
    assert read(ApiFormat.COMPLETIONS, *pieces).verdict() == verdict


def test_comments_and_unknown_fields_change_nothing() -> None:
    strange = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop","new":{"x":[1]}}],"more":1}\n\n'
    reader = read(ApiFormat.COMPLETIONS, b": keep-alive\n\n", strange, b": keep-alive\n\n", DONE)
    assert reader.verdict() == (Outcome.OK, "") and list(reader.token_times_s) == [2.0]


def test_an_events_time_is_that_of_its_last_byte() -> None:
    stream = b"".join(map(event, ONE_TO_THREE))
    ends = [number for number in range(1, len(stream) + 1) if stream[:number].endswith(b"\n\n")]
    reader = read(ApiFormat.GENERATE_STREAM, *(bytes([byte]) for byte in stream))
    assert list(reader.token_times_s) == ends
    at_once = reader_for(ApiFormat.GENERATE_STREAM, keeps_text=False)
    assert at_once is not None
    marks = array("L", range(1, len(stream) + 1))
    assert at_once.feed(stream, marks, array("d", marks)) == len(stream)
    assert list(at_once.token_times_s) == ends


def test_queue_time_is_read_if_the_server_reports_it() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 1}
    end = {"choices": [], "usage": usage, "metrics": {"queue_time_ms": 12.5}}
    assert read(ApiFormat.COMPLETIONS, completion("a", "stop"), event(end) + DONE).queue_s == 0.0125
