"""Read reasoning, content and tool calls of a chat's answer, in the same way whether it is streamed or not."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from servekit.api.responses.collect import Answer
from servekit.api.schemas.openai import FunctionCall, ToolCall
from servekit.engine.client_queue import ParsedDelta, TokenDelta
from servekit.parsing.answer_events import AnswerEvent, CallArguments, CallBegins, Content, Reasoning
from servekit.parsing.chat_format import AnswerParser


class ChatMessageReader:
    """Turns the tokens of one answer into events, and counts."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self.num_reasoning_tokens = 0
        self.num_calls = 0

    def read(self, deltas: Iterable[TokenDelta]) -> list[AnswerEvent]:
        """Return the events that these tokens complete."""
        events: list[AnswerEvent] = []
        for delta in deltas:
            if isinstance(delta, ParsedDelta):
                events += delta.events
                self.num_reasoning_tokens += any(isinstance(each, Reasoning) for each in delta.events)
                continue
            if delta.token_id is not None and self._parser.is_reasoning:
                self.num_reasoning_tokens += 1
            if delta.text:
                events += self._parser.feed(delta.text)
            if delta.finish_reason is not None:
                events += self._parser.finish()
        self.num_calls += sum(isinstance(each, CallBegins) for each in events)
        return events


class ChatMessageAnswer(Answer):
    """An answer whose message is collected."""

    __slots__ = ("_arguments", "_call_id_length", "_content", "_names", "_reasoning", "reader")

    def __init__(self, index: int, keeps_tokens: bool, reader: ChatMessageReader, call_id_length: int | None) -> None:
        super().__init__(index, keeps_tokens)
        self.reader = reader
        self._call_id_length = call_id_length
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []  # of each call, in pieces

    def add(self, deltas: Iterable[TokenDelta]) -> None:
        deltas = tuple(deltas)
        super().add(deltas)
        for each in self.reader.read(deltas):
            match each:
                case Content():
                    self._content.append(each.text)
                case Reasoning():
                    self._reasoning.append(each.text)
                case CallBegins():
                    self._names.append(each.name)
                    self._arguments.append([])
                case CallArguments():
                    self._arguments[each.index].append(each.text)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def tool_calls(self) -> list[ToolCall]:
        """Return the calls, with new ids."""
        return [
            ToolCall(new_call_id(self._call_id_length), FunctionCall(name, "".join(arguments)))
            for name, arguments in zip(self._names, self._arguments, strict=True)
        ]


def new_call_id(length: int | None) -> str:
    """Return an id for a call. Some chat templates accept ids of one length only, in letters and digits."""
    return f"call_{secrets.token_hex(12)}" if length is None else secrets.token_hex(length)[:length]
