"""Write answers in Anthropic's wire format: /v1/messages, whole and as events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_never

import msgspec

from servekit.api.responses.collect import Answer
from servekit.api.responses.long_json import ItemList
from servekit.api.responses.message_blocks import (
    Block,
    BlockAnswer,
    BlockBegins,
    BlockEnds,
    BlockEvent,
    BlockGrows,
    BlockKind,
    BlockReader,
)
from servekit.api.responses.sse import HEADERS, Framing, named_event
from servekit.api.schemas.anthropic import (
    AnthropicError,
    AnthropicEvent,
    AnthropicMessage,
    AnthropicUsage,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageStop,
    OutputBlock,
    Ping,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    stop_reason,
)
from servekit.engine.client_queue import TokenDelta
from servekit.engine.request_state import RequestState
from servekit.parsing.chat_format import AnswerFormat
from servekit.scheduler.sequence import FinishReason

SIGNATURE = "unsigned"  # some clients send reasoning back only if it has a signature


def _error_event(body: Any) -> bytes:
    return named_event(msgspec.convert(body, AnthropicError))


class AnthropicResponseBuilder:
    """Write one request's answer."""

    framing = Framing(HEADERS, named_event(Ping()), _error_event)
    end_of_stream = b""

    def __init__(self, state: RequestState, answer_format: AnswerFormat, message_id: str, model: str) -> None:
        self._state = state
        self._reader = BlockReader(answer_format)
        self._head = (message_id, model)
        self._has_begun = False

    def _usage(self) -> AnthropicUsage:
        num_cached = self._state.num_cached_tokens
        num_tokens = self._state.num_answer_tokens(self._reader.num_tokens)
        return AnthropicUsage(self._state.num_prompt_tokens - num_cached, num_tokens, num_cached)

    # -- one JSON answer ----------------------------------------------------------------------------------------------

    def make_answer(self, _: int) -> Answer:
        return BlockAnswer(self._reader)

    def headers(self, _: list[list[Answer]]) -> dict[str, str]:
        return {}

    def response(self, prompts: list[list[Answer]], _: ItemList) -> AnthropicMessage:
        ((answer,),) = prompts
        content = [_whole(block) for block in self._reader.blocks]
        message = AnthropicMessage(*self._head, content, self._usage())
        message.stop_reason, message.stop_sequence = self._stop_reason(answer.finish_reason, answer.stop_reason)
        return message

    def _stop_reason(self, reason: FinishReason, stopped_by: str | int | None) -> tuple[str, str | None]:
        return stop_reason(reason, stopped_by, self._reader.has_calls)

    # -- a stream -----------------------------------------------------------------------------------------------------

    def events(self, deltas: list[TokenDelta]) -> bytes:
        return b"".join(map(named_event, self._events(deltas)))

    def last_events(self) -> bytes:
        return b""

    def _events(self, deltas: list[TokenDelta]) -> Iterator[AnthropicEvent]:
        if not self._has_begun:
            self._has_begun = True
            yield MessageStart(AnthropicMessage(*self._head, [], self._usage()))
            yield Ping()
        for each in self._reader.read(deltas):
            yield from _events_of(each)
        last = deltas[-1]
        if last.finish_reason is not None:
            yield MessageDelta(MessageEnd(*self._stop_reason(last.finish_reason, last.stop_reason)), self._usage())
            yield MessageStop()


def _whole(block: Block) -> OutputBlock:
    match block.kind:
        case BlockKind.TEXT:
            return TextBlock(block.text)
        case BlockKind.REASONING:
            return ThinkingBlock(block.text, SIGNATURE)
        case BlockKind.CALL:
            return ToolUseBlock(block.call_id, block.name, _arguments(block.text))


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none if they are no JSON object, because the answer was cut, say."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _events_of(change: BlockEvent) -> Iterator[AnthropicEvent]:
    match change:
        case BlockBegins(block):
            yield ContentBlockStart(block.index, _empty(block))
        case BlockGrows(block, text):
            yield ContentBlockDelta(block.index, _delta(block, text))
        case BlockEnds(block):
            if block.kind is BlockKind.REASONING:
                yield ContentBlockDelta(block.index, SignatureDelta(SIGNATURE))
            yield ContentBlockStop(block.index)
        case _:
            assert_never(change)


def _empty(block: Block) -> OutputBlock:
    match block.kind:
        case BlockKind.TEXT:
            return TextBlock("")
        case BlockKind.REASONING:
            return ThinkingBlock("", "")
        case BlockKind.CALL:
            return ToolUseBlock(block.call_id, block.name, {})


def _delta(block: Block, text: str) -> TextDelta | ThinkingDelta | InputJsonDelta:
    match block.kind:
        case BlockKind.TEXT:
            return TextDelta(text)
        case BlockKind.REASONING:
            return ThinkingDelta(text)
        case BlockKind.CALL:
            return InputJsonDelta(text)
