"""Read an answer that a server streams in OpenAI's format: server-sent events, each with one chunk. This is pure.

The server is not trusted. What it sends is bounded and checked, and an error in it is reported as one sentence.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from servekit.errors import ContextTooLong, InvalidRequest, RemoteFailed, ServekitError
from servekit.parsing.answer_events import AnswerEvent, CallArguments, CallBegins, Content, Reasoning
from servekit.remote.failure import OF_THE_REQUEST
from servekit.scheduler.sequence import FinishReason

MAX_EVENT_BYTES = 2**20
MAX_ANSWER_BYTES = 2**26  # of one response: all events, with their JSON
MAX_CALLS = 128  # of one answer
MAX_SHOWN = 300  # characters of the server's message that an error repeats

DONE = b"[DONE]"


class EventReader:
    """Splits the bytes of a response into the data of its events."""

    def __init__(self) -> None:
        self._rest = bytearray()  # of an incomplete line
        self._data: list[bytes] = []  # of an incomplete event
        self._num_event_bytes = 0
        self._num_bytes = 0

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of the events that these bytes complete. Raises RemoteFailed for one that is too long."""
        self._num_bytes += len(received)
        if self._num_bytes > MAX_ANSWER_BYTES:
            raise RemoteFailed(f"the model's server sent more than {MAX_ANSWER_BYTES} bytes for one answer")
        self._rest += received
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        events = [event for line in lines if (event := self._read(line.removesuffix(b"\r"))) is not None]
        if self._num_event_bytes + len(rest) > MAX_EVENT_BYTES:
            raise RemoteFailed(f"the model's server sent an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def finish(self) -> list[bytes]:
        """End the response: return the data of a last event that has no empty line after it."""
        events = [self._read(bytes(self._rest)), self._read(b"")]
        self._rest.clear()
        return [event for event in events if event is not None]

    def _read(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data, self._num_event_bytes = self._data, [], 0
            return b"\n".join(data) if data else None
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._num_event_bytes += len(line)
        return None  # a comment, or a field that is not used here


class _FunctionDelta(Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(Struct):
    index: int | None = None
    id: Any = None
    function: _FunctionDelta | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Likely(Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _ChatLogprob(_Likely):
    top_logprobs: list[_Likely] = []


class _Logprobs(Struct):
    """Logprobs in a chunk: those of a chat are in `content`, those of a completion in three lists."""

    content: list[_ChatLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(Struct):
    index: int = 0
    logprobs: _Logprobs | None = None
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class Usage(Struct, frozen=True):
    """The tokens of one response, as the server counted them."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int


class NamedToken(Struct, frozen=True):
    """A token with its logprob. `text` may be a part of a character."""

    text: bytes
    logprob: float
    top: list[tuple[bytes, float]]  # the likeliest tokens, the likeliest first


class Piece(Struct, frozen=True):
    """The next piece of an answer. `events` says what it is, in a chat; `text` is its content."""

    index: int  # of the answer
    text: str
    events: tuple[AnswerEvent, ...]
    tokens: tuple[NamedToken, ...] = ()  # if the request asks for logprobs


class Ending(Struct, frozen=True):
    """Why an answer ended."""

    reason: FinishReason
    stop_reason: str | int | None = None


_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "abort": FinishReason.ABORT,
}
_decode = msgspec.json.Decoder(_Chunk).decode


class _Answer:
    """What is known of one answer."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.call_number: int | None = None  # the number that the server gave to the last call
        self.call_id: Any = None  # of that call
        self.is_in_call = False  # whether more arguments of the last call may come


class AnswerReader:
    """Reads the chunks of one response."""

    def __init__(self, num_answers: int, is_chat: bool, num_top: int | None = None) -> None:
        """`num_top`: how many of the likeliest tokens are wanted for each token; None: no logprobs are wanted."""
        self._num_top = num_top
        self.usage: Usage | None = None
        self.endings: dict[int, Ending] = {}  # by answer
        self._answers = [_Answer() for _ in range(num_answers)]
        self._is_chat = is_chat

    @property
    def is_complete(self) -> bool:
        """Whether all answers have ended."""
        return len(self.endings) == len(self._answers)

    def read(self, data: bytes) -> list[Piece]:
        """Return the pieces of the chunk in an event.

        Raises RemoteFailed, and InvalidRequest or ContextTooLong where the server refuses the request.
        """
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteFailed(f"the model's server sent an invalid event: {str(error)[:MAX_SHOWN]}") from None
        if chunk.error is not None:
            raise _error_of(*message_of(data))
        if chunk.usage is not None:
            self._note_usage(chunk.usage)
        return [piece for choice in chunk.choices or () if (piece := self._piece(choice)) is not None]

    def _note_usage(self, usage: _Usage) -> None:
        details = usage.prompt_tokens_details
        cached = 0 if details is None else details.cached_tokens or 0
        counts = usage.prompt_tokens or 0, cached, usage.completion_tokens or 0
        if not all(0 <= count < 2**31 for count in counts):
            raise RemoteFailed("the model's server sent an impossible usage")
        self.usage = Usage(*counts)

    def _piece(self, choice: _Choice) -> Piece | None:
        index = choice.index
        if not 0 <= index < len(self._answers):
            raise RemoteFailed(f"the model's server sent answer {index} of {len(self._answers)}")
        if index in self.endings:
            return None  # some servers repeat an empty chunk
        if self._is_chat:
            events = tuple(self._events(self._answers[index], choice.delta or _Delta()))
            text = "".join(event.text for event in events if isinstance(event, Content))
        else:
            events, text = (), choice.text or ""
        if (reason := choice.finish_reason) is not None:
            known = _REASONS.get(reason)
            if known is None:  # such as content_filter
                self.endings[index] = Ending(FinishReason.STOP, reason[:64])
            else:
                self.endings[index] = Ending(known, choice.stop_reason)
        tokens = () if self._num_top is None or choice.logprobs is None else _tokens(choice.logprobs, self._num_top)
        return Piece(index, text, events, tokens) if text or events or tokens else None

    def _events(self, answer: _Answer, delta: _Delta) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        if reasoning := delta.reasoning_content or delta.reasoning:
            events.append(Reasoning(reasoning))
        if content := (delta.content or "") + (delta.refusal or ""):
            events.append(Content(content))
        answer.is_in_call &= not events
        for call in delta.tool_calls or ():
            events += self._call_events(answer, call)
        return events

    def _call_events(self, answer: _Answer, call: _CallDelta) -> list[AnswerEvent]:
        function = call.function or _FunctionDelta()
        last = answer.num_calls - 1
        index = call.index
        # Some servers send whole calls without a number, and some give several calls the same one.
        if function.name and (index is None or call.id not in (None, "", answer.call_id)):
            index = last + 1
        elif index is None or index == answer.call_number:
            index = last
        events: list[AnswerEvent] = []
        if index == last + 1 and index < MAX_CALLS:
            if not function.name:
                raise RemoteFailed("the model's server sent a tool call without the function's name")
            answer.num_calls += 1
            answer.call_number, answer.call_id = call.index, call.id
            answer.is_in_call = True
            events.append(CallBegins(index, function.name[:128]))
        elif index != last or (function.arguments and not answer.is_in_call):
            raise RemoteFailed(f"the model's server sent a part of tool call {index} out of order")
        if function.arguments:
            events.append(CallArguments(index, function.arguments))
        return events


def _tokens(logprobs: _Logprobs, num_top: int) -> tuple[NamedToken, ...]:
    """Return the tokens that have logprobs. Raises RemoteFailed."""
    if logprobs.content is not None:
        return tuple(
            NamedToken(
                _text_of(each), each.logprob, [(_text_of(top), top.logprob) for top in each.top_logprobs[:num_top]]
            )
            for each in logprobs.content
        )
    names, tops = logprobs.tokens or [], logprobs.top_logprobs or []
    found = []
    for number, (name, logprob) in enumerate(zip(names, logprobs.token_logprobs or [], strict=False)):
        if logprob is not None:
            likely = (tops[number] if number < len(tops) else None) or {}
            top = sorted(likely.items(), key=lambda each: -each[1])[:num_top]
            found.append(NamedToken(_encoded(name), logprob, [(_encoded(text), value) for text, value in top]))
    return tuple(found)


def _text_of(token: _Likely) -> bytes:
    if token.bytes is None:
        return _encoded(token.token)
    try:
        return bytes(token.bytes)
    except ValueError:
        raise RemoteFailed("the model's server sent a token with invalid bytes") from None


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _error_of(message: str, code: str | None) -> ServekitError:
    """Return the error for an error message that came instead of an answer. vLLM checks some fields that late."""
    if code is not None and len(code) == 3 and code.isdecimal() and int(code) in OF_THE_REQUEST:
        kind = ContextTooLong if "maximum context length" in message else InvalidRequest
        return kind(f"the model's server refused the request: {message}")
    return RemoteFailed(f"the model's server failed: {message}")


class _Error(Struct):
    message: str = ""
    code: str | int | None = None


class _WithError(Struct):
    error: _Error | str


class _WithMessage(Struct):
    message: str
    code: str | int | None = None


def message_of(body: bytes | bytearray) -> tuple[str, str | None]:
    """Return the message and the code of an error in the format of OpenAI's servers, older versions of vLLM, or TGI."""
    error: _Error | _WithMessage
    try:
        told = msgspec.json.decode(body, type=_WithError).error
        error = _Error(told) if isinstance(told, str) else told
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            error = msgspec.json.decode(body, type=_WithMessage)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "", None
    return error.message[:MAX_SHOWN], None if error.code is None else str(error.code)[:64]
