"""Write answers in Ollama's wire format: /api/chat and /api/generate, whole or in lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET

from servekit.api.responses.chat_message import ChatMessageAnswer, ChatMessageReader
from servekit.api.responses.collect import Answer
from servekit.api.responses.long_json import ItemList
from servekit.api.responses.sse import Framing
from servekit.api.schemas.json_body import encode
from servekit.api.schemas.ollama import (
    OllamaAnswer,
    OllamaAnswerMessage,
    OllamaChatResponse,
    OllamaFunctionCall,
    OllamaGenerateResponse,
    OllamaToolCall,
)
from servekit.api.schemas.openai import ChatLogprob, TopLogprob
from servekit.engine.client_queue import TokenDelta
from servekit.engine.request_state import RequestState
from servekit.engine.tokenizer import Tokenizer
from servekit.parsing.answer_events import AnswerEvent, CallArguments, CallBegins, Content, Reasoning
from servekit.parsing.chat_format import AnswerFormat
from servekit.scheduler.sequence import FinishReason

HEADERS = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # tells nginx to pass lines on at once
]


AnswerKind = type[OllamaChatResponse] | type[OllamaGenerateResponse]


def line(value: Any) -> bytes:
    """Return one line of a stream with the value as JSON."""
    return encode(value) + b"\n"


def timestamp(at_s: float) -> str:
    """Return a time, in seconds since 1970, as Ollama writes it."""
    return datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")


def loaded(kind: AnswerKind, model: str) -> OllamaAnswer:
    """Return the answer to a request that only loads the model."""
    answer = _with_message(kind, model, OllamaAnswerMessage(""))
    answer.done, answer.done_reason = True, "load"
    return answer


def _with_message(
    kind: AnswerKind, model: str, message: OllamaAnswerMessage
) -> OllamaChatResponse | OllamaGenerateResponse:
    now = timestamp(time.time())
    if kind is OllamaChatResponse:
        return OllamaChatResponse(model=model, created_at=now, message=message)
    return OllamaGenerateResponse(model=model, created_at=now, response=message.content, thinking=message.thinking)


class _Part:
    """What some events add to an answer. Ollama sends a call when its arguments are complete, as an object."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.thinking: list[str] = []
        self.calls: list[OllamaToolCall] = []

    def add_call(self, name: str, arguments: str) -> None:
        """Add a complete call. What is no JSON object, because the answer was cut short, becomes content."""
        try:
            self.calls.append(OllamaToolCall(function=OllamaFunctionCall(name=name, arguments=_object(arguments))))
        except (msgspec.DecodeError, RecursionError):  # of msgspec, at some hundred levels
            self.content.append(arguments)


_object = msgspec.json.Decoder(dict[str, Any]).decode


class OllamaResponseBuilder:
    """Write one request's answer. `answer_format` is None for a prompt that is no chat."""

    end_of_stream = b""

    def __init__(
        self,
        kind: AnswerKind,
        state: RequestState,
        tokenizer: Tokenizer,
        model: str,
        answer_format: AnswerFormat | None,
        shows_thinking: bool,
    ) -> None:
        self._kind = kind
        self._state = state
        self._tokenizer = tokenizer
        self._model = model
        self._format = answer_format if answer_format is not None and answer_format.is_parsed else None
        self._shows_thinking = shows_thinking
        self._reader = None if self._format is None else ChatMessageReader(self._format.make_parser())
        self._open_call: tuple[str, list[str]] | None = None
        self._num_tokens = 0
        self.needs_tokens = state.request.logprobs is not None
        self.framing = Framing(HEADERS, line(self._written(_Part())), line)

    def make_answer(self, index: int) -> Answer:
        if self._reader is None:
            return Answer(index, self.needs_tokens)
        return ChatMessageAnswer(index, self.needs_tokens, self._reader, None)

    def headers(self, _: list[list[Answer]]) -> dict[str, str]:
        return {}

    # -- one JSON answer ----------------------------------------------------------------------------------------------

    def response(self, prompts: list[list[Answer]], items: ItemList) -> OllamaAnswer:
        ((answer,),) = prompts
        part = _Part()
        if isinstance(answer, ChatMessageAnswer):
            part.content.append(answer.content)
            part.thinking.append(answer.reasoning)
            for call in answer.tool_calls():
                part.add_call(call.function.name, call.function.arguments)
        else:
            part.content.append(answer.text)
        written = self._written(part)
        if self.needs_tokens:
            written.logprobs = items(self._logprobs(answer.tokens))
        self._num_tokens = answer.num_tokens
        self._end(written, answer.finish_reason)
        return written

    # -- a stream -----------------------------------------------------------------------------------------------------

    def events(self, deltas: list[TokenDelta]) -> bytes:
        self._num_tokens += sum(delta.token_id is not None for delta in deltas)
        reason = deltas[-1].finish_reason
        part = _Part()
        if self._reader is None:
            part.content.append("".join(delta.text for delta in deltas))
        else:
            self._add(part, self._reader.read(deltas))
            if reason is not None:
                self._close_call(part)
        written = self._written(part)
        if self.needs_tokens:
            written.logprobs = list(self._logprobs(deltas))
        has_more = any(part.content) or (any(part.thinking) and self._shows_thinking) or part.calls or written.logprobs
        lines = line(written) if has_more else b""
        if reason is not None:
            last = self._written(_Part())
            self._end(last, reason)
            lines += line(last)
        return lines

    def last_events(self) -> bytes:
        return b""

    def _add(self, part: _Part, events: Iterable[AnswerEvent]) -> None:
        for each in events:
            match each:
                case Content():
                    part.content.append(each.text)
                case Reasoning():
                    part.thinking.append(each.text)
                case CallBegins():
                    self._close_call(part)
                    self._open_call = each.name, []
                case CallArguments():
                    assert self._open_call is not None
                    self._open_call[1].append(each.text)

    def _close_call(self, part: _Part) -> None:
        if self._open_call is not None:
            name, arguments = self._open_call
            part.add_call(name, "".join(arguments))
            self._open_call = None

    # -- both ---------------------------------------------------------------------------------------------------------

    def _written(self, part: _Part) -> OllamaChatResponse | OllamaGenerateResponse:
        thinking = "".join(part.thinking) if self._shows_thinking else ""
        message = OllamaAnswerMessage("".join(part.content), thinking=thinking or UNSET, tool_calls=part.calls or UNSET)
        return _with_message(self._kind, self._model, message)

    def _end(self, answer: OllamaAnswer, reason: FinishReason) -> None:
        """Add why the answer ended, its numbers of tokens, and its times."""
        (output,) = self._state.outputs
        arrival_s = output.sequence.arrival_s
        begun_s = output.sequence.first_scheduled_s or arrival_s
        first_s = output.first_token_s or begun_s
        last_s = output.last_token_s or first_s
        answer.done, answer.done_reason = True, str(reason)
        answer.total_duration = _nanoseconds(last_s - arrival_s)
        answer.load_duration = 0
        answer.prompt_eval_count = self._state.num_prompt_tokens
        answer.prompt_eval_duration = _nanoseconds(first_s - begun_s)
        answer.eval_count = self._state.num_answer_tokens(self._num_tokens)
        answer.eval_duration = _nanoseconds(last_s - first_s)

    def _logprobs(self, deltas: Iterable[TokenDelta]) -> Iterator[ChatLogprob]:
        for delta in deltas:
            if delta.token_id is not None and delta.logprobs is not None:
                top = [TopLogprob(*self._names(id_, logprob)) for id_, logprob in delta.logprobs.top]
                yield ChatLogprob(*self._names(delta.token_id, delta.logprobs.logprob), top)

    def _names(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        own = self._tokenizer.token_bytes_with_special(token_id)
        return self._tokenizer.decode([token_id]), logprob, list(own)


def _nanoseconds(seconds: float) -> int:
    """Return a duration; at least one, because clients divide by it."""
    return max(1, round(1e9 * seconds))
