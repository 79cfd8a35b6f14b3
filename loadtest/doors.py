"""What is said at each door: the bytes of a request, and what an answer means.

The shapes are those of servekit (docs/native.md, docs/openai.md, docs/tgi.md), vLLM and text-generation-inference.
Fields that are not needed are not looked at, and one that is missing is no error as long as the answer is whole: it has
the mark of its end, and no event is missing, or there twice, as far as what the door tells can show it.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from loadtest.events import Event, split
from loadtest.record import Counted, Outcome
from loadtest.target import Door, Target

PATHS = {
    Door.GENERATE_STREAM: "/generate_stream",
    Door.GENERATE: "/generate",
    Door.COMPLETIONS: "/v1/completions",
    Door.CHAT: "/v1/chat/completions",
    Door.TGI: "/generate_stream",
}
DOORS_WITH_MODELS = (Door.COMPLETIONS, Door.CHAT)
# What the server gave up by itself; an answer that ends so is not whole.
BROKEN_OFF = frozenset({"abort", "error", "deadline"})
# Of a body's fields, those that TGI has beside `parameters`.
_BESIDE_PARAMETERS = frozenset({"inputs", "parameters", "stream", "model", "options"})

MAX_MESSAGE_LENGTH = 500  # characters

History = Sequence[str]  # what was said so far: prompt, answer, prompt, …, and the prompt to be answered


# -- requests ----------------------------------------------------------------------------------------------------------


def body_of(target: Target, model: str | None, histories: Sequence[History], max_tokens: int) -> bytes:
    """The body of one request. Only the batched door takes more than one history."""
    assert len(histories) == 1 or target.door is Door.GENERATE
    body = _fields_of(target, model, histories, max_tokens)
    if target.door is Door.TGI:
        parameters = body["parameters"]
        for name, value in target.fields.items():
            if name == "parameters":
                parameters.update(value)
            else:
                (body if name in _BESIDE_PARAMETERS else parameters)[name] = value
    else:
        body.update(target.fields)
    return msgspec.json.encode(body)


def _fields_of(target: Target, model: str | None, histories: Sequence[History], max_tokens: int) -> dict[str, Any]:
    prompts = ["".join(history) for history in histories]
    if target.door is Door.GENERATE_STREAM:
        return {"prompt": prompts[0], "max_tokens": max_tokens, "ignore_eos": True}
    if target.door is Door.GENERATE:
        return {"prompts": prompts, "max_tokens": max_tokens, "ignore_eos": True}
    if target.door is Door.TGI:
        # `ignore_eos` is servekit's; TGI ignores what it does not know.
        parameters = {"max_new_tokens": max_tokens, "details": True, "ignore_eos": True}
        return {"inputs": prompts[0], "parameters": parameters}
    fields: dict[str, Any] = {} if model is None else {"model": model}
    if target.door is Door.COMPLETIONS:
        fields["prompt"] = prompts[0]
    else:
        roles = ("user", "assistant")
        fields["messages"] = [{"role": roles[n % 2], "content": said} for n, said in enumerate(histories[0])]
    # The older name of `max_completion_tokens`, which more servers know.
    return fields | {
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


# -- what is read ------------------------------------------------------------------------------------------------------


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _ErrorBody(Struct):
    code: str | int | None = None
    type: str | None = None
    message: Any = None


class _Failure(Struct):
    """servekit's and OpenAI's error object, or TGI's text and type."""

    error: _ErrorBody | str | None = None
    error_type: str | None = None
    code: str | int | None = None  # of older vLLM, where the object is the body
    type: str | None = None
    message: Any = None


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
    error: _ErrorBody | str | None = None


class _TgiDetails(Struct):
    finish_reason: str | None = None
    generated_tokens: int | None = None
    input_length: int | None = None


class _TgiEvent(Struct):
    index: int | None = None
    token: _Token | None = None
    generated_text: str | None = None
    details: _TgiDetails | None = None
    error: _ErrorBody | str | None = None
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
    error: _ErrorBody | str | None = None


class _Batch(Struct):
    generated_texts: list[str]
    finish_reasons: list[str | None] | None = None
    usage: _Usage | None = None


_decode_native = msgspec.json.Decoder(_NativeEvent).decode
_decode_tgi = msgspec.json.Decoder(_TgiEvent).decode
_decode_openai = msgspec.json.Decoder(_OpenAIChunk).decode
_decode_batch = msgspec.json.Decoder(_Batch).decode
_decode_failure = msgspec.json.Decoder(_Failure).decode


def refusal_code(body: bytes | bytearray) -> str:
    """The server's own code for why it refused, from the body; empty if it has none that we know."""
    try:
        told = _decode_failure(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    if told.error is None:
        return _code(_ErrorBody(told.code, told.type), "")
    return _code(told.error, told.error_type or "")


def refusal_message(body: bytes | bytearray) -> str:
    """The server's own words for why it refused, shortened; empty if it has none that we know."""
    try:
        told = _decode_failure(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    message = told.error.message if isinstance(told.error, _ErrorBody) else told.error or told.message
    return message[:MAX_MESSAGE_LENGTH] if isinstance(message, str) else ""


def _code(error: _ErrorBody | str, error_type: str | None) -> str:
    """Words before numbers: a status in the place of a code says what the status has said already."""
    if isinstance(error, str):
        return error_type or error[:80]
    if isinstance(error.code, str) and error.code:
        return error.code
    return error.type or error_type or ("" if error.code is None else str(error.code))


# -- streams -----------------------------------------------------------------------------------------------------------


class StreamReader:
    """One streamed answer. Feed it what came, as it comes or much at a time, and ask for the verdict at the end."""

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
        self.token_times_s = array("d")  # when each event that brought tokens was whole
        self.tokens_per_event = array("L")
        self.num_seen_tokens = 0
        self.num_prompt_tokens: int | None = None
        self.num_output_tokens: int | None = None  # as the server tells
        self.finish_reason: str | None = None
        self.queue_s: float | None = None
        self._keeps_text = keeps_text
        self._texts: list[str] = []
        self._text_checksum = 0  # of all texts: a tenth of a microsecond an event, and no memory
        self._whole_text: str | None = None  # as the last event has it
        self._begun = False
        self._ended = False
        self._failed = ""
        self._garbled = ""

    def feed(self, received: bytes | bytearray, ends: Sequence[int], times_s: Sequence[float]) -> int:
        """Read the events that are whole, and return where the rest begins, which is to be fed again.

        At `times_s[i]` there were `ends[i]` bytes of `received`; an event's time is when its last byte was there.
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
        """What was answered, if the reader keeps it."""
        return "".join(self._texts)

    @property
    def counted_by(self) -> Counted:
        if self.num_output_tokens is not None:
            return Counted.USAGE
        return Counted.EVENTS if self.num_seen_tokens else Counted.NONE

    def verdict(self) -> tuple[Outcome, str]:
        """Of an answer that HTTP says is whole."""
        if self._garbled:
            return Outcome.GARBLED, self._garbled
        if self._failed:
            return Outcome.FAILED, self._failed
        if not self._ended:
            return Outcome.GARBLED, "the stream ends without the mark of its end"
        if self.finish_reason in BROKEN_OFF:
            return Outcome.FAILED, self.finish_reason or ""
        if self._whole_text is not None and zlib.crc32(self._whole_text.encode()) != self._text_checksum:
            return Outcome.GARBLED, "the last event's text is not that of the events"
        return self._verdict_on_count()

    @property
    def trouble(self) -> tuple[Outcome, str] | None:
        """What was wrong already with an answer that was not to end."""
        if self._failed:
            return Outcome.FAILED, self._failed
        return (Outcome.GARBLED, self._garbled) if self._garbled else None

    def _verdict_on_count(self) -> tuple[Outcome, str]:
        """Where the door numbers tokens, those that were seen are all there are."""
        if self.num_output_tokens not in (None, self.num_seen_tokens):
            return Outcome.GARBLED, "usage and the events tell different numbers of tokens"
        return Outcome.OK, ""

    def _read_safely(self, event: Event, at_s: float) -> None:
        if self._ended:
            self._garbled = self._garbled or "an event after the mark of the end"
        elif event.name == b"error":
            self._failed = refusal_code(event.data) or "error"
        elif event.data:
            try:
                self._read(event.data, at_s)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._garbled = self._garbled or "an event is not the JSON that it should be"

    def _read(self, data: bytes, at_s: float) -> None:
        raise NotImplementedError

    def _brought(self, num_tokens: int, text: str, at_s: float) -> None:
        self.token_times_s.append(at_s)
        self.tokens_per_event.append(num_tokens)
        self.num_seen_tokens += num_tokens
        self._text_checksum = zlib.crc32(text.encode(), self._text_checksum)
        if self._keeps_text:
            self._texts.append(text)

    def _numbered(self, index: int | None, text: str, at_s: float) -> None:
        """A token, and its number in the answer; an event with the last of several tells of those before, too."""
        if index is None:
            index = self.num_seen_tokens + 1
        if index <= self.num_seen_tokens:
            self._garbled = self._garbled or "a token's index does not grow"
            return
        self._brought(index - self.num_seen_tokens, text, at_s)

    def _used(self, usage: _Usage | None) -> None:
        if usage is not None:
            self.num_prompt_tokens, self.num_output_tokens = usage.prompt_tokens, usage.completion_tokens


class _NativeReader(StreamReader):
    """The last event is the one that has a finish reason.

    An event may bring several tokens and has the index of the last, so one that was lost in the middle is no gap in the
    count: it shows in the text, which the last event has as a whole.
    """

    __slots__ = ()

    def _read(self, data: bytes, at_s: float) -> None:
        event = _decode_native(data)
        if event.error is not None:
            self._failed = _code(event.error, None) or "error"
            return
        if event.token is not None:
            self._numbered(event.index, event.token.text, at_s)
        if event.finish_reason is not None:
            self._ended = True
            self.finish_reason, self._whole_text = event.finish_reason, event.generated_text
            self._used(event.usage)
            self.queue_s = _queue_s(event.metrics)


class _TgiReader(StreamReader):
    """The last event is the one that has the whole text, though not special tokens', so that it is not held against
    the events' texts."""

    __slots__ = ()

    def _read(self, data: bytes, at_s: float) -> None:
        event = _decode_tgi(data)
        if event.error is not None:
            self._failed = _code(event.error, event.error_type) or "error"
            return
        details = event.details
        if event.token is not None and not self._is_end_without_token(event):
            self._numbered(event.index, event.token.text, at_s)
        if event.generated_text is not None:
            self._ended = True
            if details is not None:
                self.finish_reason = details.finish_reason
                self.num_prompt_tokens, self.num_output_tokens = details.input_length, details.generated_tokens

    def _is_end_without_token(self, event: _TgiEvent) -> bool:
        """servekit's end at a deadline: TGI's clients want a token in every event, so there is one of no account."""
        return event.generated_text is not None and event.index is not None and event.index == self.num_seen_tokens


class _OpenAIReader(StreamReader):
    """Completions and chats: the end is `[DONE]`. Where chunks tell their usage, it counts the tokens of each."""

    __slots__ = ()

    def _read(self, data: bytes, at_s: float) -> None:
        if data == b"[DONE]":
            self._ended = True
            if self.finish_reason is None and not self._failed:
                self._garbled = self._garbled or "[DONE] without a finish reason"
            return
        chunk = _decode_openai(data)
        if chunk.error is not None:
            self._failed = _code(chunk.error, None) or "error"
            return
        if chunk.metrics is not None:
            self.queue_s = _queue_s(chunk.metrics)
        for choice in chunk.choices:
            if text := _text_of(choice):
                self._brought(self._num_new(chunk.usage), text, at_s)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
        self._used(chunk.usage)

    def _verdict_on_count(self) -> tuple[Outcome, str]:
        """A chunk may have several tokens, and a token may have no text yet; but no text comes without a token."""
        if self.num_output_tokens is not None and self.num_seen_tokens > self.num_output_tokens:
            return Outcome.GARBLED, "more events brought text than usage has tokens"
        return Outcome.OK, ""

    def _num_new(self, usage: _Usage | None) -> int:
        """Tokens that a chunk with text brought: as its running total says (`continuous_usage_stats`), or one."""
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


_READERS: dict[Door, type[StreamReader]] = {
    Door.GENERATE_STREAM: _NativeReader,
    Door.COMPLETIONS: _OpenAIReader,
    Door.CHAT: _OpenAIReader,
    Door.TGI: _TgiReader,
}


def reader_for(door: Door, keeps_text: bool) -> StreamReader | None:
    """A new reader; None for the door whose answers come whole."""
    reader = _READERS.get(door)
    return None if reader is None else reader(keeps_text)


# -- whole answers -----------------------------------------------------------------------------------------------------


class BatchAnswer(Struct):
    """One prompt's part of a reply to several."""

    text: str
    num_output_tokens: int | None
    num_prompt_tokens: int | None
    finish_reason: str | None


def read_batch(body: bytes | bytearray, num_prompts: int, max_tokens: int) -> list[BatchAnswer] | str:
    """One answer for each prompt, in their order, or what is wrong with the reply.

    The door tells the tokens of all answers together. An answer that ended by its length has `max_tokens`; what is left
    of the sum is dealt out evenly to the others, so that one number may be off while their sum never is; so with the
    tokens of the prompts. A sum that cannot be that of such answers is wrong.
    """
    try:
        told = _decode_batch(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "the reply is not the JSON that it should be"
    reasons = told.finish_reasons or [None] * num_prompts
    if len(told.generated_texts) != num_prompts or len(reasons) != num_prompts:
        return "the reply has another number of answers than prompts"
    usage = told.usage or _Usage()
    known = [max_tokens if reason == "length" else None for reason in reasons]
    least, most = sum(each or 0 for each in known), max_tokens * num_prompts
    if usage.completion_tokens is not None and not least <= usage.completion_tokens <= most:
        return "usage has another number of tokens than such answers can have"
    num_outputs = _dealt(usage.completion_tokens, known)
    num_inputs = _dealt(usage.prompt_tokens, [None] * num_prompts)
    return [BatchAnswer(*answer) for answer in zip(told.generated_texts, num_outputs, num_inputs, reasons, strict=True)]


def _dealt(total: int | None, known: list[int | None]) -> list[int | None]:
    """`total` over places of which some are known."""
    if total is None:
        return [None] * len(known)
    num_unknown = known.count(None)
    rest = total - sum(number or 0 for number in known)
    share, num_larger = divmod(rest, max(1, num_unknown))
    shares = iter([share + 1] * num_larger + [share] * (num_unknown - num_larger))
    return [next(shares) if number is None else number for number in known]
