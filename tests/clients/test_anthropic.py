"""Anthropic's own client against a real server: answers and streams, tools, and errors of its own kinds.

The package takes seconds to import. So it is imported by the tests that run, and not by each process that collects
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.support.server_process import ServerProcess

if TYPE_CHECKING:
    from anthropic import Anthropic

QUESTION: Any = [{"role": "user", "content": "What color is the sky?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
CITIES = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
QUERIES = {
    "type": "object",
    "properties": {"query": {"enum": ["weather in Paris", "weather in Rome"]}},
    "required": ["query"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "search", "description": "Search the web.", "input_schema": QUERIES}
ODD = {"type": "object", "properties": {"cities": {"type": "array", "uniqueItems": True}}}  # no grammar enforces it
SEARCH: Any = {"name": "search", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
GREEDY = {"temperature": 0}  # the client has no parameter for it
DEMANDED: Any = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Anthropic]:
    from anthropic import Anthropic

    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: Anthropic, messages: Any = QUESTION, **fields: Any) -> Any:
    asked = {"model": "demo", "max_tokens": 60, "messages": messages, "extra_body": GREEDY}
    return client.messages.create(**asked | fields)


def test_an_answer(client: Anthropic) -> None:
    message = ask(client, system=[{"type": "text", "text": "Answer.", "cache_control": {"type": "ephemeral"}}])
    assert message.content[0].type == "text" and message.content[0].text
    plain = ask(client, metadata={"user_id": "u"})
    assert plain.content[0].text == "The sky is blue." and (plain.role, plain.model) == ("assistant", "demo")
    assert (plain.stop_reason, plain.stop_sequence, plain.usage.output_tokens) == ("end_turn", None, 6)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 10


def test_why_an_answer_ends(client: Anthropic) -> None:
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"
    stopped = ask(client, stop_sequences=["is"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "is")
    assert stopped.content[0].text.strip() == "The sky"


def test_a_model_that_does_not_reason_uses_nothing_of_its_budget(client: Anthropic) -> None:
    message = ask(client, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1500)
    assert [block.type for block in message.content] == ["text"]


def test_a_last_message_of_the_assistant_is_continued(client: Anthropic) -> None:
    message = ask(client, [*QUESTION, {"role": "assistant", "content": "The sky"}])
    assert message.content[0].text == " is blue."


def test_a_stream_is_the_answer_in_pieces(client: Anthropic) -> None:
    with client.messages.stream(model="demo", max_tokens=60, messages=QUESTION, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        message = stream.get_final_message()
    (block,) = message.content
    assert block.type == "text" and block.text == "The sky is blue." and message.stop_reason == "end_turn"
    deltas = kinds.count("content_block_delta")
    expected = ["message_start", "content_block_start", *["content_block_delta"] * deltas]
    assert kinds == [*expected, "content_block_stop", "message_delta", "message_stop"] and deltas > 3
    assert message.usage.output_tokens == 6


def test_events_on_the_wire(server: ServerProcess) -> None:
    """The client ignores pings, and does not show the names of events."""
    body = {"messages": QUESTION, "max_tokens": 2, "stream": True}
    lines = httpx2.post(f"{server.url}/v1/messages", json=body, timeout=60).text.split("\n\n")
    events = [line.split("\n") for line in lines if line]
    for name, data in events:
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert [name for name, _ in events[:3]] == ["event: message_start", "event: ping", "event: content_block_start"]
    assert events[-1] == ["event: message_stop", 'data: {"type":"message_stop"}']


def test_a_call_goes_round(client: Anthropic) -> None:
    message = ask(client, WEATHER, **DEMANDED)
    (call,) = message.content
    assert call.type == "tool_use" and message.stop_reason == "tool_use"
    assert (call.name, call.input) == ("search", {"query": "weather in Rome"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21 degrees"}]}
    messages = [*WEATHER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = ask(client, messages, tools=[TOOL], tool_choice={"type": "none"})
    assert answer.content[0].type == "text" and answer.stop_reason in ("end_turn", "max_tokens")


def test_a_streamed_call_by_the_models_own_choice_goes_round(client: Anthropic) -> None:
    fields: Any = {"model": "demo", "max_tokens": 100, "tools": [SEARCH], "extra_body": GREEDY}
    with client.messages.stream(messages=WEATHER, **fields) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    (call,) = message.content
    assert call.type == "tool_use" and message.stop_reason == "tool_use"
    assert (call.name, call.input) == ("search", {"query": "weather in Rome"})
    assert len(pieces) > 3 and json.loads("".join(pieces)) == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"}
    messages: Any = [*WEATHER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=messages, **fields) as stream:
        assert "".join(stream.text_stream) == "The weather in Rome is sunny, 21 degrees."
        assert stream.get_final_message().stop_reason == "end_turn"
    assert ask(client, tools=[SEARCH]).content[0].text == "The sky is blue."


def test_a_streamed_call_is_the_call_of_one_answer(client: Anthropic) -> None:
    choice = {"type": "tool", "name": "search"}
    expected = ask(client, WEATHER, tools=[TOOL], tool_choice=choice).content[0]
    fields: Any = {"tools": [TOOL], "tool_choice": choice, "extra_body": GREEDY}
    with client.messages.stream(model="demo", max_tokens=60, messages=WEATHER, **fields) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    (call,) = message.content
    assert call.type == "tool_use" and (call.name, call.input) == (expected.name, expected.input)
    assert len(pieces) > 3 and json.loads("".join(pieces)) == call.input and message.stop_reason == "tool_use"


def test_an_answer_matches_a_schema(client: Anthropic) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": CITIES}}
    assert json.loads(ask(client, WEATHER, output_config=config).content[0].text)["city"] in ("Paris", "Rome")


def test_tokens_are_counted_as_the_prompt_has_them(client: Anthropic) -> None:
    usage = ask(client).usage
    counted = client.messages.count_tokens(model="demo", messages=QUESTION)
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_are_of_the_clients_own_kinds(client: Anthropic) -> None:
    from anthropic import BadRequestError, NotFoundError

    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    search = {"type": "web_search_20250305", "name": "w"}
    for fields, error, kind, text in (
        ({"model": "claude"}, NotFoundError, "not_found_error", "'claude' does not exist"),
        ({"messages": [{"role": "user", "content": [image]}]}, BadRequestError, "invalid_request_error", "'image'"),
        ({"max_tokens": 0}, BadRequestError, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 10**6}, BadRequestError, "invalid_request_error", "max_tokens"),
        (
            {**DEMANDED, "tools": [{**TOOL, "input_schema": ODD}]},
            BadRequestError,
            "invalid_request_error",
            "uniqueItems",
        ),
        (
            {"tools": [search]},
            BadRequestError,
            "invalid_request_error",
            "tools[0]",
        ),
    ):
        for stream in (False, True):
            with pytest.raises(error) as refusal:
                ask(client, stream=stream, **fields)
            body: Any = refusal.value.body
            assert body["type"] == "error" and body["error"]["type"] == kind == refusal.value.type, body
            assert text in body["error"]["message"]
