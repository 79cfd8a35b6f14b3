"""Claims about what is said at each door and how answers are read, against the standard, and servekit's own schemas."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from loadtest.doors import BatchAnswer, StreamReader, body_of, read_batch, reader_for, refusal_code, refusal_message
from loadtest.events import Event, split
from loadtest.record import Counted, Outcome
from loadtest.scrape import read_metrics
from loadtest.target import Door, Target
from servekit.schemas import native, openai, tgi
from servekit.schemas.fields import Usage
from servekit.sequence import FinishReason

# -- events ------------------------------------------------------------------------------------------------------------


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


# -- requests ----------------------------------------------------------------------------------------------------------


def asked(door: Door, *histories: list[str], model: str | None = None, **fields: Any) -> dict[str, Any]:
    target = Target(["http://127.0.0.1:1"], door, fields=fields)
    told: dict[str, Any] = json.loads(body_of(target, model, histories or [["hi"]], 7))
    return told


def test_each_door_is_asked_in_its_own_words() -> None:
    assert asked(Door.GENERATE_STREAM) == {"prompt": "hi", "max_tokens": 7, "ignore_eos": True}
    assert asked(Door.GENERATE, ["a"], ["b"]) == {"prompts": ["a", "b"], "max_tokens": 7, "ignore_eos": True}
    assert asked(Door.TGI) == {
        "inputs": "hi",
        "parameters": {"max_new_tokens": 7, "details": True, "ignore_eos": True},
    }
    openai_fields = {"max_tokens": 7, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    assert asked(Door.COMPLETIONS, model="m") == {"model": "m", "prompt": "hi"} | openai_fields
    assert asked(Door.CHAT) == {"messages": [{"role": "user", "content": "hi"}]} | openai_fields


def test_servekit_takes_what_is_asked() -> None:
    for door, schema in (
        (Door.GENERATE_STREAM, native.GenerateRequest),
        (Door.GENERATE, native.GenerateRequest),
        (Door.TGI, tgi.TgiRequest),
        (Door.COMPLETIONS, openai.CompletionRequest),
        (Door.CHAT, openai.ChatCompletionRequest),
    ):
        msgspec.convert(asked(door, temperature=0, stop=["x"]), schema)


def test_a_conversation_is_messages_in_a_chat_and_one_text_elsewhere() -> None:
    history = ["Hello", " there", ", you"]
    assert asked(Door.COMPLETIONS, history)["prompt"] == "Hello there, you"
    assert [(each["role"], each["content"]) for each in asked(Door.CHAT, history)["messages"]] == [
        ("user", "Hello"),
        ("assistant", " there"),
        ("user", ", you"),
    ]


def test_fields_of_the_user_have_the_last_word() -> None:
    assert asked(Door.COMPLETIONS, ignore_eos=False, temperature=0)["ignore_eos"] is False
    told = asked(Door.TGI, temperature=0.5, details=False, stream=True, parameters={"top_k": 3})
    assert told["parameters"] == {
        "max_new_tokens": 7,
        "details": False,
        "ignore_eos": True,
        "temperature": 0.5,
        "top_k": 3,
    }
    assert told["stream"] is True


# -- streams -----------------------------------------------------------------------------------------------------------


def event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def read(door: Door, *pieces: bytes, keeps_text: bool = True) -> StreamReader:
    """Pieces that come at the times 1, 2, 3, …; what is whole is read as it comes."""
    reader = reader_for(door, keeps_text)
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
    reader = read(Door.GENERATE_STREAM, *pieces)
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
        ([*ONE_TO_THREE[:2], native_end(3, "c", "abx")], Outcome.GARBLED),  # a text that is not what was told
        ([*ONE_TO_THREE[:2], native_end(2, "", "ab")], Outcome.GARBLED),  # an end that counts differently
    ],
)
def test_a_native_answer_is_whole_or_it_is_not(events: list[native.StreamEvent], outcome: Outcome) -> None:
    assert read(Door.GENERATE_STREAM, *map(event, events)).verdict()[0] is outcome


def test_a_lost_event_shows_even_if_nobody_keeps_the_text() -> None:
    lost_at_the_end = native.StreamEvent(
        2, None, generated_text="ab", finish_reason=FinishReason.LENGTH, usage=Usage(5, 3, 8, 0)
    )
    reader = read(Door.GENERATE_STREAM, *map(event, [*ONE_TO_THREE[:2], lost_at_the_end]), keeps_text=False)
    assert reader.verdict() == (Outcome.GARBLED, "usage and the events tell different numbers of tokens")


def test_a_native_event_that_was_lost_in_the_middle_shows_even_if_nobody_keeps_the_text() -> None:
    # Its neighbours' numbers may be those of events with several tokens.
    events = [native_event(number, text) for number, text in ((1, "a"), (2, "b"), (4, "d"))]
    for end, verdict in (
        (native_end(5, "e", "abcde"), (Outcome.GARBLED, "the last event's text is not that of the events")),
        (native_end(5, "e", "abde"), (Outcome.OK, "")),
    ):
        assert read(Door.GENERATE_STREAM, *map(event, [*events, end]), keeps_text=False).verdict() == verdict


def test_an_answer_that_its_deadline_ended_is_not_whole() -> None:
    end = native.StreamEvent(
        1, None, generated_text="a", id="gen-1", finish_reason=FinishReason.DEADLINE, usage=Usage(5, 1, 6, 0)
    )
    reader = read(Door.GENERATE_STREAM, event(native_event(1, "a")), event(end))
    assert reader.verdict() == (Outcome.FAILED, "deadline")
    assert list(reader.token_times_s) == [1.0], "its end brought no token"


def tgi_event(index: int, text: str, **last: Any) -> tgi.TgiStreamEvent:
    return tgi.TgiStreamEvent(index, tgi.TgiToken(65, text, -0.5, False), **last)


def test_tgis_events_are_read_with_and_without_what_only_servekit_tells() -> None:
    end = tgi_event(4, "d", generated_text="abcd", details=tgi.TgiStreamDetails("length", 4, 9, None))
    reader = read(Door.TGI, event(tgi_event(1, "a")), event(tgi_event(3, "bc")), event(end))
    assert reader.verdict() == (Outcome.OK, "")
    assert list(reader.tokens_per_event) == [1, 2, 1]
    assert (reader.num_prompt_tokens, reader.num_output_tokens, reader.finish_reason) == (9, 4, "length")
    # As TGI writes it: no space behind the colon, and of old no index.
    piece = (
        b'data:{"token":{"id":1,"text":"x","logprob":-1.5,"special":false},"generated_text":null,"details":null}\n\n'
    )
    last = piece.replace(b'"generated_text":null', b'"generated_text":"xx"')
    older = read(Door.TGI, piece, last)
    assert older.verdict() == (Outcome.OK, "")
    assert (older.num_seen_tokens, older.counted_by) == (2, Counted.EVENTS)


def test_tgis_end_at_a_deadline_brings_no_token() -> None:
    details = tgi.TgiStreamDetails("deadline", 1, 9, None)
    end = tgi.TgiStreamEvent(1, tgi.TgiToken(0, "", None, True), generated_text="a", details=details)
    reader = read(Door.TGI, event(tgi_event(1, "a")), event(end))
    assert reader.verdict() == (Outcome.FAILED, "deadline") and reader.num_seen_tokens == 1


def test_tgis_number_of_tokens_is_that_of_its_events() -> None:
    for num_tokens, outcome in ((2, Outcome.OK), (10, Outcome.GARBLED), (1, Outcome.GARBLED)):
        details = tgi.TgiStreamDetails("length", num_tokens, 9, None)
        end = tgi_event(2, "b", generated_text="ab", details=details)
        assert read(Door.TGI, event(tgi_event(1, "a")), event(end)).verdict()[0] is outcome


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


def test_a_completions_tokens_are_its_chunks_with_text_and_their_number_is_the_usage() -> None:
    reader = read(Door.COMPLETIONS, completion("a"), completion("b"), completion("", "length"), usage_chunk(3) + DONE)
    assert reader.verdict() == (Outcome.OK, "")
    assert list(reader.token_times_s) == [1.0, 2.0], "a chunk without text brought nothing to show"
    assert (reader.num_output_tokens, reader.counted_by, reader.text) == (3, Counted.USAGE, "ab")
    without_usage = read(Door.COMPLETIONS, completion("a"), completion("b", "stop") + DONE)
    assert (without_usage.num_output_tokens, without_usage.num_seen_tokens) == (None, 2)
    assert without_usage.counted_by is Counted.EVENTS


def test_running_totals_tell_how_many_tokens_a_chunk_has() -> None:
    pieces = [completion("a", usage=used(1)), completion("bcd", usage=used(5)), completion("e", "length", used(6))]
    reader = read(Door.COMPLETIONS, *pieces, usage_chunk(6) + DONE)
    assert list(reader.tokens_per_event) == [1, 4, 1] and reader.num_output_tokens == 6


@pytest.mark.parametrize(("num_tokens", "outcome"), [(2, Outcome.GARBLED), (3, Outcome.OK), (64, Outcome.OK)])
def test_more_chunks_with_text_than_tokens_are_a_chunk_that_came_twice(num_tokens: int, outcome: Outcome) -> None:
    chunks = [completion("a"), completion("b"), completion("b"), completion("", "length")]
    plain = read(Door.COMPLETIONS, *chunks, usage_chunk(num_tokens) + DONE)
    assert plain.verdict()[0] is outcome, "of several tokens in a chunk there are fewer chunks than tokens"
    totals = [completion("a", usage=used(1)), *[completion("b", usage=used(2))] * 2, completion("c", "length", used(3))]
    assert read(Door.COMPLETIONS, *totals, usage_chunk(3) + DONE).verdict() == (
        Outcome.GARBLED,
        "more events brought text than usage has tokens",
    )


def test_a_chats_first_chunk_has_a_role_and_no_token() -> None:
    first, last = chat(openai.ChatDelta("assistant", "")), chat(openai.ChatDelta(), "stop")
    reader = read(Door.CHAT, first, chat(openai.ChatDelta(content="a")), last, usage_chunk(1) + DONE)
    assert reader.verdict() == (Outcome.OK, "") and list(reader.token_times_s) == [2.0]
    thinking = event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]})
    thinker = read(Door.CHAT, thinking, chat(openai.ChatDelta(content="a"), "stop") + DONE)
    assert list(thinker.token_times_s) == [1.0, 2.0], "a thought is a token like others"


@pytest.mark.parametrize(
    ("pieces", "verdict"),
    [
        ([completion("a", "stop")], (Outcome.GARBLED, "the stream ends without the mark of its end")),
        ([completion("a"), DONE], (Outcome.GARBLED, "[DONE] without a finish reason")),
        ([completion("a", "stop"), DONE, completion("b")], (Outcome.GARBLED, "an event after the mark of the end")),
        ([completion("a", "abort"), DONE], (Outcome.FAILED, "abort")),
        ([completion("a"), b"data: {nonsense\n\n"], (Outcome.GARBLED, "an event is not the JSON that it should be")),
        (
            [completion("a"), b'data: {"choices": 5}\n\n'],
            (Outcome.GARBLED, "an event is not the JSON that it should be"),
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
def test_a_completion_is_whole_or_it_is_not(pieces: list[bytes], verdict: tuple[Outcome, str]) -> None:
    assert read(Door.COMPLETIONS, *pieces).verdict() == verdict


def test_comments_and_unknown_fields_change_nothing() -> None:
    strange = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop","new":{"x":[1]}}],"more":1}\n\n'
    reader = read(Door.COMPLETIONS, b": keep-alive\n\n", strange, b": keep-alive\n\n", DONE)
    assert reader.verdict() == (Outcome.OK, "") and list(reader.token_times_s) == [2.0]


def test_an_events_time_is_that_of_its_last_byte() -> None:
    stream = b"".join(map(event, ONE_TO_THREE))
    ends = [number for number in range(1, len(stream) + 1) if stream[:number].endswith(b"\n\n")]
    reader = read(Door.GENERATE_STREAM, *(bytes([byte]) for byte in stream))
    assert list(reader.token_times_s) == ends
    at_once = reader_for(Door.GENERATE_STREAM, keeps_text=False)
    assert at_once is not None
    marks = array("L", range(1, len(stream) + 1))
    assert at_once.feed(stream, marks, array("d", marks)) == len(stream)
    assert list(at_once.token_times_s) == ends


def test_what_the_server_waited_is_read_where_it_is_told() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 1}
    end = {"choices": [], "usage": usage, "metrics": {"queue_time_ms": 12.5}}
    assert read(Door.COMPLETIONS, completion("a", "stop"), event(end) + DONE).queue_s == 0.0125


# -- whole answers -----------------------------------------------------------------------------------------------------


def batch(texts: list[str], reasons: list[str], num_tokens: int) -> bytes:
    return msgspec.json.encode(
        native.BatchGenerateResponse(
            "gen-1",
            texts,
            [FinishReason(reason) for reason in reasons],
            [None] * len(texts),
            Usage(7, num_tokens, 9, 0),
        )
    )


def test_a_batch_is_one_answer_for_each_prompt() -> None:
    assert read_batch(batch(["ab", "c"], ["length", "stop"], 3), 2, max_tokens=2) == [
        BatchAnswer("ab", 2, 4, "length"),
        BatchAnswer("c", 1, 3, "stop"),
    ]


@pytest.mark.parametrize(
    ("reasons", "num_tokens", "dealt"),
    [
        (["length", "length", "length"], 12, [4, 4, 4]),
        (["stop", "length", "stop"], 9, [3, 4, 2]),
        (["stop", "stop", "stop"], 2, [1, 1, 0]),
        (["length", "length", "stop"], 8, [4, 4, 0]),
    ],
)
def test_tokens_of_a_batch_add_up_to_what_the_server_tells(
    reasons: list[str], num_tokens: int, dealt: list[int]
) -> None:
    answers = read_batch(batch(["a", "b", "c"], reasons, num_tokens), 3, max_tokens=4)
    assert not isinstance(answers, str)
    assert [answer.num_output_tokens for answer in answers] == dealt and sum(dealt) == num_tokens


@pytest.mark.parametrize(
    ("reasons", "num_tokens"),
    [(["length", "length"], 7), (["length", "length"], 9), (["length", "stop"], 3), (["stop", "stop"], 9)],
)
def test_a_batch_whose_answers_cannot_have_so_many_tokens_is_garbled(reasons: list[str], num_tokens: int) -> None:
    told = read_batch(batch(["a", "b"], reasons, num_tokens), 2, max_tokens=4)
    assert told == "usage has another number of tokens than such answers can have"


def test_a_batch_with_an_answer_too_few_is_garbled() -> None:
    assert read_batch(batch(["a"], ["stop"], 1), 2, 4) == "the reply has another number of answers than prompts"
    assert read_batch(b"{", 2, 4) == "the reply is not the JSON that it should be"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ('{"error":{"message":"m","type":"overloaded_error","param":null,"code":"overloaded"}}', "overloaded"),
        ('{"error":{"message":"m","type":"BadRequestError","param":null,"code":400}}', "BadRequestError"),
        ('{"object":"error","message":"m","type":"NotFoundError","code":404}', "NotFoundError"),
        ('{"error":"Model is overloaded","error_type":"overloaded"}', "overloaded"),
        ('{"error":"queue full"}', "queue full"),
        ("<html>Bad Gateway</html>", ""),
        ("{}", ""),
    ],
)
def test_a_refusal_is_counted_by_the_servers_own_code(body: str, code: str) -> None:
    assert refusal_code(body.encode()) == code


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error":{"message":"no field `temprature`","code":"unknown_field"}}', "no field `temprature`"),
        ('{"object":"error","message":"too long","type":"NotFoundError","code":404}', "too long"),
        ('{"error":"Model is overloaded","error_type":"overloaded"}', "Model is overloaded"),
        ('{"error":{"message":["m"]}}', ""),
        ('{"error":{"message":"' + "m" * 600 + '"}}', "m" * 500),
        ("<html>Bad Gateway</html>", ""),
        ("{}", ""),
    ],
)
def test_a_refusal_is_quoted_in_the_servers_own_words(body: str, message: str) -> None:
    assert refusal_message(body.encode()) == message


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_are_gauges_counters_and_the_sums_of_histograms() -> None:
    text = """# HELP servekit_num_requests_running Sequences that hold KV blocks.
# TYPE servekit_num_requests_running gauge
servekit_num_requests_running 3.0
# TYPE servekit_num_preemptions counter
servekit_num_preemptions_total 2.0
servekit_num_preemptions_created 1.7e+09
# TYPE servekit_step_seconds histogram
servekit_step_seconds_bucket{le="0.1"} 4.0
servekit_step_seconds_bucket{le="+Inf"} 5.0
servekit_step_seconds_count 5.0
servekit_step_seconds_sum 0.6
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 7.0
# TYPE process_open_fds gauge
process_open_fds 12.0
"""
    assert read_metrics(text) == {
        "servekit_num_requests_running": 3.0,
        "servekit_num_preemptions_total": 2.0,
        "servekit_step_seconds_count": 5.0,
        "servekit_step_seconds_sum": 0.6,
        'vllm:num_requests_running{engine="0",model_name="m"}': 7.0,
    }
