"""The fields of chats for tools and reasoning, as the model's format and its template get them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from servekit.api.schemas.json_body import decode
from servekit.api.schemas.openai import ChatCompletionRequest
from servekit.errors import InvalidRequest
from servekit.parsing.chat_format import Function, ToolUse, choose_chat_format
from servekit.requests.generation import Chat

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA, "strict": True}}
LOOK = {"type": "function", "function": {"name": "look"}}
TOO_MUCH = ['{"a": %s}' % ("9" * 30), '{"a": %s}' % ("[" * 70 + "]" * 70), '{"a": %s' % ("[" * 100_000)]
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def chat(messages: list[dict[str, Any]] | None = None, **fields: Any) -> ChatCompletionRequest:
    body = {"messages": messages or [{"role": "user", "content": "a"}], **fields}
    found = decode(json.dumps(body).encode(), ChatCompletionRequest)
    found.check()
    return found


def test_functions_have_their_schemas() -> None:
    use = chat(tools=[ADD, LOOK]).tool_use()
    assert use is not None and not use.is_demanded and use.is_parallel
    add, look = use.functions
    assert (add.name, json.loads(add.parameters), add.is_strict) == ("add", SCHEMA, True)
    assert look == Function("look") and json.loads(look.parameters) == NO_PARAMETERS


@pytest.mark.parametrize(
    ("fields", "names", "is_demanded", "is_parallel"),
    [
        ({"tool_choice": "auto"}, ["add", "look"], False, True),
        ({"tool_choice": "required"}, ["add", "look"], True, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["add", "look"], True, False),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, ["look"], True, False),
    ],
)
def test_the_choice_says_what_is_demanded(
    fields: dict[str, Any], names: list[str], is_demanded: bool, is_parallel: bool
) -> None:
    use = chat(tools=[ADD, LOOK], **fields).tool_use()
    assert use is not None
    assert [each.name for each in use.functions] == names
    assert (use.is_demanded, use.is_parallel) == (is_demanded, is_parallel)


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": None}, {"tools": [ADD], "tool_choice": "none"}])
def test_without_tools_nothing_is_called(fields: dict[str, Any]) -> None:
    assert chat(**fields).tool_use() is None


def test_templates_get_all_tools_as_they_were_sent() -> None:
    named = {"type": "function", "function": {"name": "look"}}
    assert chat(tools=[ADD, LOOK], tool_choice=named).tools_for_template() == [
        {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "look", "parameters": NO_PARAMETERS}},
    ]
    assert chat().tools_for_template() is None


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"function": {"name": "f", "arguments": '{"a": 1}'}}, {"function": {"name": "f", "arguments": {"a": 1}}}),
        ({"function": {"name": "f", "arguments": ""}}, {"function": {"name": "f", "arguments": {}}}),
        ({"function": {"name": "f", "arguments": '{"a":'}}, {"function": {"name": "f", "arguments": '{"a":'}}),
        ({"function": {"name": "f", "arguments": "[1]"}}, {"function": {"name": "f", "arguments": "[1]"}}),
        ({"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "f", "arguments": {"a": 1}}}),
        *((call, call) for call in ({"function": {"name": "f", "arguments": text}} for text in TOO_MUCH)),
        ({"function": "f"}, {"function": "f"}),
        ({"id": "1"}, {"id": "1"}),
    ],
)
def test_templates_get_arguments_as_objects(sent: dict[str, Any], expected: dict[str, Any]) -> None:
    (message,) = chat([{"role": "assistant", "content": None, "tool_calls": [sent]}]).conversation()
    assert message == {"role": "assistant", "content": "", "tool_calls": [expected]}


def test_templates_get_the_reasoning_of_earlier_turns() -> None:
    names = ("reasoning_content", "reasoning")
    for message in chat([{"role": "assistant", "content": "b", name: "a"} for name in names]).conversation():
        assert (message["reasoning_content"], message["thinking"]) == ("a", "a")
    (message,) = chat([{"role": "assistant", "content": "b", "reasoning": "a", "tool_calls": []}]).conversation()
    assert "thinking" in message
    call = {"function": {"name": "f", "arguments": {}}}
    (message,) = chat([{"role": "assistant", "content": "b", "reasoning": "a", "tool_calls": [call]}]).conversation()
    assert "thinking" not in message, "the template of gpt-oss takes one of them"


def test_reasoning_effort_becomes_variables_of_the_template() -> None:
    assert chat().template_variables() == {}
    assert chat(reasoning_effort="high").template_variables() == {"reasoning_effort": "high"}
    assert chat(reasoning_effort="none").template_variables() == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "thinking": False,
    }
    own = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}).template_variables()
    assert own["enable_thinking"] is True, "what the client says itself comes first"


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, None),
        ({"thinking_token_budget": 0}, 0),
        ({"thinking_token_budget": 7, "thinking_budget": 9}, 7),
        ({"thinking_budget": 9}, 9),
        ({"thinking_token_budget": -1}, None),
    ],
)
def test_the_budget_has_two_names(fields: dict[str, Any], most: int | None) -> None:
    assert chat(**fields).max_reasoning_tokens == most


def test_the_request_has_the_grammar_and_the_markers_of_its_answers() -> None:
    wanted = chat(tools=[ADD], tool_choice="required")
    found = choose_chat_format("", "none", "hermes", {}.get, ()).for_answers("", wanted.tool_use(), None, None)
    generation = wanted.to_generation_request("text", found)
    assert generation.grammar is found.grammar is not None
    assert generation.markers == ("<tool_call>", "</tool_call>")
    assert isinstance(found.use, ToolUse)


def test_chat_for_another_server_keeps_what_it_asks_for() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    wanted = chat(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}],
        tools=[ADD, LOOK],
        tool_choice=named,
        parallel_tool_calls=False,
        reasoning_effort="low",
        thinking_token_budget=5,
        chat_template_kwargs={"x": 1},
        max_tokens=7,
    )
    request = wanted.to_relayed_request(wanted.conversation())
    look = {"type": "function", "function": {"name": "look", "parameters": NO_PARAMETERS}}
    assert request.max_tokens == 7 and request.prompts[0].content == "be briefa", "its length is estimated of this"
    assert request.chat == Chat(
        messages=wanted.conversation(),
        tools=[ADD, look],
        tool_choice=named,
        is_parallel=False,
        reasoning_effort="low",
        max_reasoning_tokens=5,
        template_variables={"x": 1},
    )
    plain = chat(tool_choice="none", continue_final_message=True, add_generation_prompt=False)
    assert plain.to_relayed_request(plain.conversation()).chat == Chat(
        messages=plain.conversation(),
        tool_choice="none",
        adds_generation_prompt=False,
        continues_final_message=True,
    )
    with pytest.raises(InvalidRequest, match="runs on another server"):
        chat(chat_template="x").to_relayed_request([])
