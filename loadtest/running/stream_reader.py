"""Read streamed answers: text, tokens, their times, and whether the answer is complete.

Missing fields are no error as long as the answer is complete: it has the mark of its end, and as far as the API lets
one tell, no event is missing or duplicated.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from loadtest.record import Counted, Outcome
from loadtest.running.error_bodies import ErrorBody, error_code, refusal_code
from loadtest.running.server_sent_events import Event, split
from loadtest.target import ApiFormat

# Finish reasons of answers that the server ended early; they are not complete.
BROKEN_OFF = frozenset({"abort", "error", "deadline"})


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Token(Struct):
    text: str = ""


class _Metrics(Struct):
    queue_time_ms: float | None = None  # vLLM's name


class _NativeEvent(Struct):
    index: int | None = None
    token: _Token | None = None
    generated_text: str | None = None
    finish_reason: str | None = None
    usage: _Usage | None = None
    metrics: _Metrics | None = None
    error: ErrorBody | str | None = None


class _TgiDetails(Struct):
    finish_reason: str | None = None
    generated_tokens: int | None = None
    input_length: int | None = None


class _TgiEvent(Struct):
    index: int | None = None
    token: _Token | None = None
    generated_text: str | None = None
    details: _TgiDetails | None = None
    error: ErrorBody | str | None = None
    error_type: str | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _OpenAIChunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    metrics: _Metrics | None = None
    error: ErrorBody | str | None = None


_decode_native = msgspec.json.Decoder(_NativeEvent).decode
_decode_tgi = msgspec.json.Decoder(_TgiEvent).decode
_decode_openai = msgspec.json.Decoder(_OpenAIChunk).decode


class StreamReader:
    """Read one streamed answer. Feed it the bytes in any portions, and ask for the verdict at the end."""

    __slots__ = (
        "_begun",
        "_ended",
        "_failed",
        "_garbled",
        "_keeps_text",
        "_text_checksum",
        "_texts",
        "_whole_text",
        "finish_reason",
        "num_output_tokens",
        "num_prompt_tokens",
        "num_seen_tokens",
        "queue_s",
        "token_times_s",
        "tokens_per_event",
    )

    def __init__(self, keeps_text: bool) -> None:
        self.token_times_s = array("d")  # when each event with tokens was complete
        self.tokens_per_event = array("L")
        self.num_seen_tokens = 0
        self.num_prompt_tokens: int | None = None
        self.num_output_tokens: int | None = None  # as the server reports it
        self.finish_reason: str | None = None
        self.queue_s: float | None = None
        self._keeps_text = keeps_text
        self._texts: list[str] = []
        self._text_checksum = 0  # of all texts; it takes 0.1 µs an event, and no memory
        self._whole_text: str | None = None  # as the last event repeats it
        self._begun = False
        self._ended = False
        self._failed = ""
        self._garbled = ""

    def feed(self, received: bytes | bytearray, ends: Sequence[int], times_s: Sequence[float]) -> int:
        """Read the complete events; return where the rest begins, which must be fed again.

        At `times_s[i]`, `ends[i]` bytes of `received` had come. The time of an event is when its last byte came.
        """
        events, consumed = split(received, at_beginning=not self._begun)
        self._begun = self._begun or consumed > 0
        place = 0
        for event in events:
            while ends[place] < event.end:
                place += 1
            self._read_safely(event, times_s[place])
        return consumed

    @property
    def text(self) -> str:
        """The text of the answer, if the reader keeps it."""
        return "".join(self._texts)

    @property
    def counted_by(self) -> Counted:
        if self.num_output_tokens is not None:
            return Counted.USAGE
        return Counted.EVENTS if self.num_seen_tokens else Counted.NONE

    def verdict(self) -> tuple[Outcome, str]:
        """Return the outcome of an answer that is complete as far as HTTP is concerned."""
        if self._garbled:
            return Outcome.GARBLED, self._garbled
        if self._failed:
            return Outcome.FAILED, self._failed
        if not self._ended:
            return Outcome.GARBLED, "the stream ended without its end mark"
        if self.finish_reason in BROKEN_OFF:
            return Outcome.FAILED, self.finish_reason or ""
        if self._whole_text is not None and zlib.crc32(self._whole_text.encode()) != self._text_checksum:
            return Outcome.GARBLED, "the text of the last event differs from that of all events"
        return self._verdict_on_count()

    @property
    def error(self) -> tuple[Outcome, str] | None:
        """What was wrong with an answer before it was cut off."""
        if self._failed:
            return Outcome.FAILED, self._failed
        return (Outcome.GARBLED, self._garbled) if self._garbled else None

    def _verdict_on_count(self) -> tuple[Outcome, str]:
        """Where the API numbers tokens, those that were seen must be all."""
        if self.num_output_tokens not in (None, self.num_seen_tokens):
            return Outcome.GARBLED, "usage and the events have different numbers of tokens"
        return Outcome.OK, ""

    def _read_safely(self, event: Event, at_s: float) -> None:
        if self._ended:
            self._garbled = self._garbled or "an event after the end mark"
        elif event.name == b"error":
            self._failed = refusal_code(event.data) or "error"
        elif event.data:
            try:
                self._read(event.data, at_s)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._garbled = self._garbled or "an event is not the expected JSON"

    def _read(self, data: bytes, at_s: float) -> None:
        raise NotImplementedError

    def _add_tokens(self, num_tokens: int, text: str, at_s: float) -> None:
        self.token_times_s.append(at_s)
        self.tokens_per_event.append(num_tokens)
        self.num_seen_tokens += num_tokens
        self._text_checksum = zlib.crc32(text.encode(), self._text_checksum)
        if self._keeps_text:
            self._texts.append(text)

    def _add_numbered(self, index: int | None, text: str, at_s: float) -> None:
        """Note a token by its number in the answer; an event with the last of several tokens stands for all of them."""
        if index is None:
            index = self.num_seen_tokens + 1
        if index <= self.num_seen_tokens:
            self._garbled = self._garbled or "a token's index does not increase"
            return
        self._add_tokens(index - self.num_seen_tokens, text, at_s)

    def _add_usage(self, usage: _Usage | None) -> None:
        if usage is not None:
            self.num_prompt_tokens, self.num_output_tokens = usage.prompt_tokens, usage.completion_tokens


class _NativeReader(StreamReader):
    """servekit's own format. The last event is the one with a finish reason.

    An event may carry several tokens and has the index of the last one, so a lost event leaves no gap in the count. It
    shows in the text, because the last event repeats all of it.
    """

    __slots__ = ()

    def _read(self, data: bytes, at_s: float) -> None:
        event = _decode_native(data)
        if event.error is not None:
            self._failed = error_code(event.error, None) or "error"
            return
        if event.token is not None:
            self._add_numbered(event.index, event.token.text, at_s)
        if event.finish_reason is not None:
            self._ended = True
            self.finish_reason, self._whole_text = event.finish_reason, event.generated_text
            self._add_usage(event.usage)
            self.queue_s = _queue_s(event.metrics)


class _TgiReader(StreamReader):
    """TGI's format. The last event is the one with the whole text.

    That text leaves out special tokens, so it is not compared with the texts of the events.
    """

    __slots__ = ()

    def _read(self, data: bytes, at_s: float) -> None:
        event = _decode_tgi(data)
        if event.error is not None:
            self._failed = error_code(event.error, event.error_type) or "error"
            return
        details = event.details
        if event.token is not None and not self._is_end_without_token(event):
            self._add_numbered(event.index, event.token.text, at_s)
        if event.generated_text is not None:
            self._ended = True
            if details is not None:
                self.finish_reason = details.finish_reason
                self.num_prompt_tokens, self.num_output_tokens = details.input_length, details.generated_tokens

    def _is_end_without_token(self, event: _TgiEvent) -> bool:
        """Recognise servekit's end of an answer at a deadline.

        TGI's clients expect a token in every event, so this event carries one that does not count.
        """
        return event.generated_text is not None and event.index is not None and event.index == self.num_seen_tokens


class _OpenAIReader(StreamReader):
    """Completions and chats: the end is `[DONE]`. If chunks report usage, it gives the number of tokens in each."""

    __slots__ = ()

    def _read(self, data: bytes, at_s: float) -> None:
        if data == b"[DONE]":
            self._ended = True
            if self.finish_reason is None and not self._failed:
                self._garbled = self._garbled or "[DONE] without a finish reason"
            return
        chunk = _decode_openai(data)
        if chunk.error is not None:
            self._failed = error_code(chunk.error, None) or "error"
            return
        if chunk.metrics is not None:
            self.queue_s = _queue_s(chunk.metrics)
        for choice in chunk.choices:
            if text := _text_of(choice):
                self._add_tokens(self._num_new(chunk.usage), text, at_s)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
        self._add_usage(chunk.usage)

    def _verdict_on_count(self) -> tuple[Outcome, str]:
        """A chunk may have several tokens, and a token may have no text yet; but text never comes without a token."""
        if self.num_output_tokens is not None and self.num_seen_tokens > self.num_output_tokens:
            return Outcome.GARBLED, "more events have text than usage has tokens"
        return Outcome.OK, ""

    def _num_new(self, usage: _Usage | None) -> int:
        """Return how many tokens a chunk with text has: by its running total (`continuous_usage_stats`), or one."""
        if usage is None or usage.completion_tokens is None:
            return 1
        return max(1, usage.completion_tokens - self.num_seen_tokens)


def _text_of(choice: _Choice) -> str | None:
    delta = choice.delta
    if delta is None:
        return choice.text
    return delta.content or delta.reasoning_content or delta.reasoning


def _queue_s(metrics: _Metrics | None) -> float | None:
    return None if metrics is None or metrics.queue_time_ms is None else metrics.queue_time_ms / 1e3


_READERS: dict[ApiFormat, type[StreamReader]] = {
    ApiFormat.GENERATE_STREAM: _NativeReader,
    ApiFormat.COMPLETIONS: _OpenAIReader,
    ApiFormat.CHAT: _OpenAIReader,
    ApiFormat.TGI: _TgiReader,
}


def reader_for(api: ApiFormat, keeps_text: bool) -> StreamReader | None:
    """Return a new reader; None for the API whose answers come whole."""
    reader = _READERS.get(api)
    return None if reader is None else reader(keeps_text)
