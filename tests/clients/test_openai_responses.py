"""OpenAI's own client and its responses against a real server: answers, streams, tools, formats and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.support.server_process import ServerProcess

QUESTION = "What color is the sky?"
WEATHER: Any = [{"role": "user", "content": [{"type": "input_text", "text": "What is the weather in Rome?"}]}]
CITIES = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ODD = {"type": "object", "properties": {"cities": {"type": "array", "uniqueItems": True}}}  # no grammar enforces it
QUERIES = {
    "type": "object",
    "properties": {"query": {"enum": ["weather in Paris", "weather in Rome"]}},
    "required": ["query"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "search", "description": "Search.", "parameters": QUERIES, "strict": True}
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}}
SEARCH: Any = {"type": "function", "name": "search", "parameters": QUERY, "strict": False}
DEMANDED: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: OpenAI, asked: Any = QUESTION, **fields: Any) -> Any:
    return client.responses.create(model="demo", input=asked, temperature=0, **fields)


def test_an_answer(client: OpenAI) -> None:
    response = ask(client, metadata={"a": "b"}, store=True)
    assert response.output_text == "The sky is blue." and response.status == "completed"
    assert (response.metadata, response.store, response.usage.output_tokens) == ({"a": "b"}, False, 6)
    cut = ask(client, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    longer = ask(client, instructions="Answer.").usage
    assert longer.input_tokens > response.usage.input_tokens


def test_a_stream_is_the_answer_in_pieces(client: OpenAI) -> None:
    with client.responses.stream(model="demo", input=QUESTION, temperature=0) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert response.output_text == "The sky is blue." and response.status == "completed"
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 3 and kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_call_goes_round(client: OpenAI) -> None:
    (call,) = ask(client, WEATHER, **DEMANDED).output
    assert (call.type, call.name, call.arguments) == ("function_call", "search", '{"query": "weather in Rome"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    answer = ask(client, [*WEATHER, call, result], tools=[TOOL], tool_choice="none", max_output_tokens=30)
    assert answer.output_text and [item.type for item in answer.output] == ["message"]


def test_a_streamed_call_by_the_models_own_choice_goes_round(client: OpenAI) -> None:
    fields: Any = {"model": "demo", "temperature": 0, "tools": [SEARCH]}
    with client.responses.stream(input=WEATHER, **fields) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and call.name == "search"
    assert "".join(pieces) == call.arguments == '{"query": "weather in Rome"}' and len(pieces) > 3
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    turns: Any = [*WEATHER, call.model_dump(include={"type", "call_id", "name", "arguments"}), result]
    with client.responses.stream(input=turns, **fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        answer = stream.get_final_response()
    assert answer.output_text == "".join(deltas) == "The weather in Rome is sunny, 21 degrees." and len(deltas) > 3
    assert ask(client, tools=[SEARCH]).output_text == "The sky is blue."


def test_a_streamed_call_is_the_call_of_one_answer(client: OpenAI) -> None:
    named: Any = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "search"}}
    expected = ask(client, WEATHER, **named).output[0]
    with client.responses.stream(model="demo", input=WEATHER, temperature=0, **named) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and (call.name, call.arguments) == (expected.name, expected.arguments)
    assert "".join(pieces) == call.arguments and len(pieces) > 3


def test_an_answer_matches_a_schema(client: OpenAI) -> None:
    wanted: Any = {"format": {"type": "json_schema", "name": "weather", "schema": CITIES, "strict": True}}
    assert json.loads(ask(client, WEATHER, text=wanted).output_text)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"asked": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({**DEMANDED, "tools": [{**TOOL, "parameters": ODD}]}, "tools"),
        ({"max_output_tokens": 10**6}, None),
    ],
)
def test_refusals_name_the_field(client: OpenAI, fields: dict[str, Any], param: str | None) -> None:
    for stream in (False, True):
        with pytest.raises(BadRequestError) as refusal:
            ask(client, stream=stream, **fields)
        assert param is None or refusal.value.param == param
