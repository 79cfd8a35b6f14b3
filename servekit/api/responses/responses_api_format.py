"""Write answers in OpenAI's wire format of responses: /v1/responses, whole and as events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from servekit.api.responses.collect import Answer, new_id
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
from servekit.api.responses.sse import COMMENT, HEADERS, Framing, named_event
from servekit.api.schemas.responses_api import (
    AnyResponsesEvent,
    ContentPartAdded,
    ContentPartDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    OutputTokensDetails,
    ReasoningConfig,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponsesFailure,
    ResponsesRequest,
    ResponsesUsage,
    TextConfig,
    TextFormat,
)
from servekit.engine.client_queue import TokenDelta
from servekit.engine.request_state import RequestState
from servekit.parsing.chat_format import AnswerFormat
from servekit.scheduler.sequence import FinishReason

_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}  # of ids, as OpenAI's


class ResponsesBuilder:
    """Write one request's answer. Each block of it is an item of the output."""

    end_of_stream = b""

    def __init__(self, body: ResponsesRequest, state: RequestState, answer_format: AnswerFormat, model: str) -> None:
        self.framing = Framing(HEADERS, COMMENT, self._failure)
        self._state = state
        self._reader = BlockReader(answer_format)
        self._beginning = _beginning_of(body, model)
        self._item_ids: list[str] = []
        self._num_events = 0

    def _ended(self, reason: FinishReason) -> ResponseObject:
        """Return the whole answer. What was cut, by its limit or its deadline, is incomplete."""
        is_cut, blocks = reason is not FinishReason.STOP, self._reader.blocks
        num_prompt_tokens = self._state.num_prompt_tokens
        num_tokens = self._state.num_answer_tokens(self._reader.num_tokens)
        return replace(
            self._beginning,
            status="incomplete" if is_cut else "completed",
            output=[self._item(block, _status(is_cut and block is blocks[-1])) for block in blocks],
            usage=ResponsesUsage(
                num_prompt_tokens,
                InputTokensDetails(self._state.num_cached_tokens),
                num_tokens,
                OutputTokensDetails(self._reader.num_reasoning_tokens),
                num_prompt_tokens + num_tokens,
            ),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
        )

    def _item(self, block: Block, status: str) -> OutputItem:
        item_id = self._item_id(block)
        match block.kind:
            case BlockKind.TEXT:
                return OutputMessage(item_id, status, [OutputText(block.text)])
            case BlockKind.REASONING:
                return ReasoningItem(item_id, status, [ReasoningText(block.text)])
            case BlockKind.CALL:
                return FunctionCallItem(item_id, status, block.call_id, block.name, block.text)

    def _item_id(self, block: Block) -> str:
        if block.index == len(self._item_ids):
            self._item_ids.append(new_id(_PREFIXES[block.kind], "_"))
        return self._item_ids[block.index]

    # -- one JSON answer ----------------------------------------------------------------------------------------------

    def make_answer(self, _: int) -> Answer:
        return BlockAnswer(self._reader)

    def headers(self, _: list[list[Answer]]) -> dict[str, str]:
        return {}

    def response(self, prompts: list[list[Answer]], _: ItemList) -> ResponseObject:
        ((answer,),) = prompts
        return self._ended(answer.finish_reason)

    # -- a stream -----------------------------------------------------------------------------------------------------

    def events(self, deltas: list[TokenDelta]) -> bytes:
        return b"".join(map(self._numbered, self._events(deltas)))

    def last_events(self) -> bytes:
        return b""

    def _failure(self, body: Any) -> bytes:
        """Return the events of a stream that fails, given OpenAI's error object."""
        error = ResponsesFailure("server_error", body["error"]["message"])  # clients know a few codes of OpenAI's only
        failed = ResponseFailed(response=replace(self._beginning, status="failed", error=error))
        return b"".join(map(self._numbered, [*self._first_events(), failed]))

    def _numbered(self, event: AnyResponsesEvent) -> bytes:
        event.sequence_number = self._num_events
        self._num_events += 1
        return named_event(event)

    def _first_events(self) -> Iterator[AnyResponsesEvent]:
        if self._num_events == 0:
            yield ResponseCreated(response=self._beginning)
            yield ResponseInProgress(response=self._beginning)

    def _events(self, deltas: list[TokenDelta]) -> Iterator[AnyResponsesEvent]:
        yield from self._first_events()
        reason = deltas[-1].finish_reason
        changes = self._reader.read(deltas)
        for change in changes:
            is_cut = reason not in (None, FinishReason.STOP) and change is changes[-1]
            yield from self._events_of(change, _status(is_cut))
        if reason is not None:
            response = self._ended(reason)
            if response.status == "completed":
                yield ResponseCompleted(response=response)
            else:
                yield ResponseIncomplete(response=response)

    def _events_of(self, change: BlockEvent, status: str) -> Iterator[AnyResponsesEvent]:
        block = change.block
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        match change:
            case BlockBegins():
                item = self._item(block, "in_progress")
                if not isinstance(item, FunctionCallItem):
                    item.content = []
                yield OutputItemAdded(output_index=block.index, item=item)
                if block.kind is not BlockKind.CALL:
                    yield ContentPartAdded(_part(block), **place)
            case BlockGrows():
                match block.kind:
                    case BlockKind.TEXT:
                        yield OutputTextDelta(change.text, **place)
                    case BlockKind.REASONING:
                        yield ReasoningTextDelta(change.text, **place)
                    case BlockKind.CALL:
                        yield FunctionCallArgumentsDelta(change.text, **place)
            case BlockEnds():
                match block.kind:
                    case BlockKind.TEXT:
                        yield OutputTextDone(block.text, **place)
                    case BlockKind.REASONING:
                        yield ReasoningTextDone(block.text, **place)
                    case BlockKind.CALL:
                        yield FunctionCallArgumentsDone(block.name, block.text, **place)
                if block.kind is not BlockKind.CALL:
                    yield ContentPartDone(_part(block), **place)
                yield OutputItemDone(output_index=block.index, item=self._item(block, status))


def _status(is_cut: bool) -> str:
    return "incomplete" if is_cut else "completed"


def _part(block: Block) -> OutputText | ReasoningText:
    return OutputText(block.text) if block.kind is BlockKind.TEXT else ReasoningText(block.text)


def _beginning_of(body: ResponsesRequest, model: str) -> ResponseObject:
    return ResponseObject(
        id=new_id("resp", "_"),
        created_at=int(time.time()),
        model=model,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=body.tools or [],
        tool_choice=body.tool_choice or "auto",
        text=TextConfig(format=(body.text and body.text.format) or TextFormat(type="text")),
        reasoning=body.reasoning or ReasoningConfig(),
    )
