"""A message is the same whether it is streamed or not, and Anthropic's package reads both.

The answers are given texts, in pieces. The real formats, builders and types of the package read them. The package takes
seconds to import. So it is imported by the tests that run, and not by each process that collects them.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from pydantic import TypeAdapter

from servekit.api.responses.anthropic_format import SIGNATURE, AnthropicResponseBuilder
from servekit.api.responses.http import as_written_on, error_body
from servekit.api.responses.message_blocks import BlockAnswer
from servekit.api.schemas.json_body import encode
from servekit.errors import WorkerNotReady
from servekit.parsing.chat_format import Function, ToolUse, choose_chat_format
from servekit.scheduler.sequence import FinishReason
from tests.servekit.api.responses.test_chat_message import CALLS, State, deltas_of

if TYPE_CHECKING:
    from anthropic.types import Message, RawMessageStreamEvent

USE = ToolUse((Function("add"), Function("look")))
ANSWERS = [
    ("plain", " A text.\nAnd more. "),
    ("nothing", ""),
    ("calls", CALLS),
    ("everything", f"<think>\nHm, a sum.\n</think>\n\nLet me add.\n{CALLS}\nDone."),
    ("a call that is cut", CALLS[:50]),
]


def builder() -> AnthropicResponseBuilder:
    answer_format = choose_chat_format("", "qwen3", "hermes", {}.get, ()).for_answers("", USE, None, None)
    state: Any = State()
    return AnthropicResponseBuilder(state, answer_format, "msg_1", "demo")


@functools.cache
def event_types() -> TypeAdapter[RawMessageStreamEvent]:
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


def whole(text: str, reason: FinishReason, seed: int) -> Message:
    from anthropic.types import Message

    made = builder()
    answer = made.make_answer(0)
    assert isinstance(answer, BlockAnswer)
    for delta in deltas_of(text, reason, seed):
        answer.add((delta,))
    return Message.model_validate_json(encode(made.response([[answer]], list)))


def streamed(text: str, reason: FinishReason, seed: int) -> tuple[Message, list[str]]:
    """Return the message that the package makes of the events, and their kinds."""
    from anthropic.lib.streaming._messages import accumulate_event

    made, message, kinds = builder(), None, []
    buffers: dict[int, bytes] = {}
    data = b"".join(made.events([delta]) for delta in deltas_of(text, reason, seed)) + made.last_events()
    for sent in data.decode().split("\n\n")[:-1]:
        name, _, line = sent.partition("\n")
        body = json.loads(line.removeprefix("data: "))
        kinds.append(body["type"])
        assert name == f"event: {body['type']}"
        if body["type"] != "ping":
            event = event_types().validate_python(body)
            message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    return cast("Message", message), kinds


def comparable(message: Message) -> dict[str, Any]:
    shown = message.model_dump(exclude_none=True)
    for block in shown["content"]:
        block.pop("id", None)  # random
        block.pop("parsed_output", None)
    return shown


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("text", [text for _, text in ANSWERS], ids=[name for name, _ in ANSWERS])
def test_a_streamed_message_is_the_whole_one(text: str, reason: FinishReason) -> None:
    expected = comparable(whole(text, reason, 0))
    if text == CALLS[:50]:
        expected["content"][0].pop("input")
    for seed in range(5):
        message, kinds = streamed(text, reason, seed)
        shown = comparable(message)
        if text == CALLS[:50]:  # the client shows what has arrived; a whole answer has none of it
            shown["content"][0].pop("input")
        assert {name: value for name, value in shown.items() if name != "usage"} == {
            name: value for name, value in expected.items() if name != "usage"
        }
        assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(shown["content"])


def test_an_answer_is_a_row_of_blocks() -> None:
    message = whole(ANSWERS[3][1], FinishReason.STOP, 1)
    thinking, text, add, look, last = message.content
    assert thinking.type == "thinking" and (thinking.thinking, thinking.signature) == ("Hm, a sum.", SIGNATURE)
    assert text.type == last.type == "text" and (text.text, last.text) == ("Let me add.", "Done.")
    assert add.type == look.type == "tool_use" and (add.input, look.input) == ({"a": 1}, {})
    assert add.id != look.id and message.stop_reason == "tool_use"


def test_cached_tokens_are_counted_apart() -> None:
    state: Any = State()
    state.num_cached_tokens = 5
    made = AnthropicResponseBuilder(
        state, choose_chat_format("", "none", "none", {}.get, ()).for_answers("", None, None, None), "msg_1", "demo"
    )
    answer = made.make_answer(0)
    for delta in deltas_of("A text.", FinishReason.STOP, 0):
        answer.add((delta,))
    usage = made.response([[answer]], list).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (2, 5, answer.num_tokens)


def test_a_stream_that_fails_says_why_in_an_event_of_its_own() -> None:
    body = as_written_on("/v1/messages", error_body(WorkerNotReady("The worker ended.")), 503)
    name, _, line = builder().framing.write_error(body).decode().strip().partition("\n")
    told = json.loads(line.removeprefix("data: "))
    assert (name, told["type"]) == ("event: error", "error")
    assert (told["error"]["type"], told["error"]["message"]) == ("api_error", "The worker ended.")
