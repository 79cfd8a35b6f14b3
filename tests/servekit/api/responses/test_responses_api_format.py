"""A response is the same whether it is streamed or not, and OpenAI's package reads both.

The answers are given texts, in pieces. The real formats, builders and types of the package read them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from servekit.api.responses.responses_api_format import ResponsesBuilder
from servekit.api.schemas.json_body import decode, encode
from servekit.api.schemas.responses_api import ResponsesRequest
from servekit.parsing.chat_format import Function, ToolUse, choose_chat_format
from servekit.scheduler.sequence import FinishReason
from tests.servekit.api.responses.test_chat_message import CALLS, State, deltas_of

EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
USE = ToolUse((Function("add"), Function("look")))
ANSWERS = [
    ("plain", " A text.\nAnd more. "),
    ("nothing", ""),
    ("calls", CALLS),
    ("everything", f"<think>\nHm, a sum.\n</think>\n\nLet me add.\n{CALLS}\nDone."),
]


def builder() -> ResponsesBuilder:
    answer_format = choose_chat_format("", "qwen3", "hermes", {}.get, ()).for_answers("", USE, None, None)
    state: Any = State()
    return ResponsesBuilder(decode(b'{"input": "a"}', ResponsesRequest), state, answer_format, "demo")


def whole(text: str, reason: FinishReason) -> Response:
    made = builder()
    answer = made.make_answer(0)
    for delta in deltas_of(text, reason, 0):
        answer.add((delta,))
    return Response.model_validate_json(encode(made.response([[answer]], list)))


def read(data: bytes) -> list[Any]:
    """Return the events, as the package reads them."""
    events = []
    for number, event in enumerate(data.decode().split("\n\n")[:-1]):
        name, _, line = event.partition("\n")
        body = json.loads(line.removeprefix("data: "))
        assert name == f"event: {body['type']}" and body["sequence_number"] == number
        events.append(EVENTS.validate_python(body))
    return events


def comparable(response: Response) -> list[dict[str, Any]]:
    items = [item.model_dump() for item in response.output]
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("text", [text for _, text in ANSWERS], ids=[name for name, _ in ANSWERS])
def test_a_streamed_response_is_the_whole_one(text: str, reason: FinishReason) -> None:
    expected = whole(text, reason)
    assert expected.status == ("completed" if reason is FinishReason.STOP else "incomplete")
    for seed in range(5):
        made = builder()
        events = read(b"".join(made.events([delta]) for delta in deltas_of(text, reason, seed)) + made.last_events())
        last = events[-1]
        assert last.type == f"response.{expected.status}" and comparable(last.response) == comparable(expected)
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == last.response.output, "each item ended as it is in the answer"
        for index, item in enumerate(done):
            deltas = [event.delta for event in events if "delta" in event.type and event.output_index == index]
            assert "".join(deltas) == (item.arguments if item.type == "function_call" else item.content[0].text)


def test_an_answer_is_a_row_of_items() -> None:
    response = whole(ANSWERS[3][1], FinishReason.STOP)
    assert [item.type for item in response.output] == [
        *("reasoning", "message", "function_call", "function_call", "message")
    ]
    assert response.output_text == "Let me add.Done." and response.usage is not None


def test_a_stream_that_fails_begins_and_says_why() -> None:
    error = {"error": {"code": "worker_failed", "message": "The worker ended."}}
    begun = deltas_of("A", FinishReason.STOP, 0)[:1]
    for sent, beginning in (([], ["response.created", "response.in_progress"]), (begun, None)):
        made = builder()
        data = b"".join(made.events([delta]) for delta in sent)
        events = read(data + made.framing.write_error(error))
        assert events[-1].type == "response.failed" and events[-1].response.error.message == "The worker ended."
        assert beginning is None or [event.type for event in events[:-1]] == beginning
        assert [event.type for event in events].count("response.created") == 1
