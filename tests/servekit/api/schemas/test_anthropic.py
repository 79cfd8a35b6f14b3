"""Anthropic's bodies become the chats that OpenAI's clients would send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from servekit.api.schemas.anthropic import MessagesRequest, error_type, stop_reason
from servekit.api.schemas.json_body import decode
from servekit.errors import InvalidRequest
from servekit.scheduler.sequence import FinishReason

Json = dict[str, Any]
LOOK: Json = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}, "strict": True}


def body(messages: Any = "a", **fields: Any) -> MessagesRequest:
    if isinstance(messages, str | dict):
        messages = [{"role": "user", "content": messages if isinstance(messages, str) else [messages]}]
    found = decode(json.dumps({"messages": messages, "max_tokens": 5, **fields}).encode(), MessagesRequest)
    found.check()
    return found


def test_blocks_become_messages() -> None:
    spoken = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "I "},
        {"type": "text", "text": "look."},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 1}},
        {"type": "tool_use", "name": "look"},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "red"}]},
        {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
    ]
    wanted = body(
        [
            {"role": "user", "content": "Look!"},
            {"role": "assistant", "content": spoken},
            {"role": "user", "content": results},
            {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
        ],
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}},
        {"id": "", "type": "function", "function": {"name": "look", "arguments": {}}},
    ]
    of_tools = [
        {"role": "tool", "content": "red", "tool_call_id": "c1"},
        {"role": "tool", "content": "", "tool_call_id": "c2"},
    ]
    assert wanted.conversation() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls, "reasoning_content": "hm"},
        *of_tools,
        *of_tools,
        {"role": "user", "content": "And?"},
    ]
    wanted.drop_conversation()
    assert wanted.conversation() == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {}},
        {"type": "document"},
        {"type": "server_tool_use", "name": "web_search"},
        {"type": "text"},
        {"type": "tool_use"},
        {"type": "tool_result", "content": [{"type": "image"}]},
    ],
)
def test_what_is_no_text_is_refused_by_its_place(block: Json) -> None:
    with pytest.raises(InvalidRequest, match="this server supports text only") as refusal:
        body(block).conversation()
    assert (refusal.value.param or "").startswith("messages[0].content[0]")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"tools": [LOOK, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
        ({"tools": [LOOK, LOOK]}, "tools[1]"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": ["a"], "stop": "b"}, "stop"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
def test_what_has_no_meaning_here_is_refused(fields: Json, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        body(**fields)
    assert refusal.value.param == param and param.split("[")[0] in refusal.value.message


@pytest.mark.parametrize(
    ("choice", "demanded", "is_parallel"),
    [
        (None, False, True),
        ({"type": "auto"}, False, True),
        ({"type": "any"}, True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False),
        ({"type": "tool", "name": "look"}, True, False),
    ],
)
def test_the_choice_says_what_is_demanded(choice: Json | None, demanded: bool, is_parallel: bool) -> None:
    use = body(tools=[{**LOOK, "type": "custom"}], tool_choice=choice).to_chat().tool_use()
    assert use is not None and (use.is_demanded, use.is_parallel) == (demanded, is_parallel)
    (function,) = use.functions
    assert (function.name, function.parameters, function.is_strict) == ("look", '{"type":"object"}', True)


def test_tools_may_be_forbidden() -> None:
    chat = body(tools=[LOOK], tool_choice={"type": "none"}).to_chat()
    assert chat.tool_use() is None and chat.tools_for_template() is not None


@pytest.mark.parametrize(
    ("fields", "budget", "variables"),
    [
        ({}, None, {}),
        ({"thinking": {"type": "adaptive"}}, None, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 9, {}),
        ({"output_config": {"effort": "high"}}, None, {"reasoning_effort": "high"}),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            None,
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
        ),
    ],
)
def test_thinking_is_bounded_or_off(fields: Json, budget: int | None, variables: Json) -> None:
    chat = body(**fields).to_chat()
    assert (chat.max_reasoning_tokens, chat.template_variables()) == (budget, variables)


def test_only_a_last_message_of_the_assistant_is_continued() -> None:
    said = {"role": "assistant", "content": "a"}
    assert body([said]).to_chat().continue_final_message
    assert not body([said, {"role": "user", "content": "b"}]).to_chat().continue_final_message


def test_answers_and_errors_have_anthropics_names() -> None:
    for reason, stopped_by, has_calls, named in (
        (FinishReason.STOP, None, False, ("end_turn", None)),
        (FinishReason.STOP, 7, False, ("end_turn", None)),
        (FinishReason.STOP, "x", False, ("stop_sequence", "x")),
        (FinishReason.STOP, None, True, ("tool_use", None)),
        (FinishReason.LENGTH, None, True, ("max_tokens", None)),
        (FinishReason.DEADLINE, None, False, ("max_tokens", None)),
    ):
        assert stop_reason(reason, stopped_by, has_calls) == named
    for status, type_, name in (
        (400, "invalid_request_error", "invalid_request_error"),
        (404, "invalid_request_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (500, "server_error", "api_error"),
        (503, "overloaded_error", "overloaded_error"),
    ):
        assert error_type(status, type_) == name
