"""Bodies of /v1/responses become the chats that OpenAI's clients would send to /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from servekit.api.schemas.json_body import decode
from servekit.api.schemas.responses_api import ResponsesRequest
from servekit.errors import InvalidRequest

Json = dict[str, Any]
LOOK: Json = {"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object"}}


def body(asked: Any = "a", **fields: Any) -> ResponsesRequest:
    found = decode(json.dumps({"input": asked, **fields}).encode(), ResponsesRequest)
    found.check()
    return found


def test_what_the_assistant_did_in_one_turn_is_one_message() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look!"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "!"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'},
        {"type": "function_call", "name": "look"},
        {"type": "function_call_output", "call_id": "c1", "output": "red"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "blue"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "And?"},
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}},
        {"id": "", "type": "function", "function": {"name": "look", "arguments": {}}},
    ]
    wanted = body(items, instructions="You see.")
    assert wanted.conversation() == [
        {"role": "system", "content": "You see."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls, "reasoning_content": "hm!"},
        {"role": "tool", "content": "red", "tool_call_id": "c1"},
        {"role": "tool", "content": "blue", "tool_call_id": "c2"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "And?"},
    ]
    wanted.drop_conversation()
    assert wanted.conversation() == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0]"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "input[0].content[0]"),
        ({"type": "function_call_output", "output": [{"type": "input_file"}]}, "input[0].output[0]"),
        ({"type": "message", "content": "a"}, "input[0].role"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0]"),
        ({"type": "function_call", "call_id": "c"}, "input[0]"),
    ],
)
def test_an_item_that_cannot_be_read_is_refused_by_its_place(item: Json, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        body([item]).conversation()
    assert refusal.value.param == param and param in refusal.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [LOOK, {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [LOOK, LOOK]}, "tools[1]"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
)
def test_what_has_no_meaning_here_is_refused(fields: Json, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        body(**fields)
    assert refusal.value.param == param and param.split("[")[0].split(".")[0] in refusal.value.message


def test_false_and_disabled_are_no_wishes() -> None:
    assert body(background=False, truncation="disabled", top_logprobs=0).to_chat() == body().to_chat()


def test_tools_reasoning_and_limits_are_those_of_the_chat() -> None:
    choice = {"type": "function", "name": "look"}
    chat = body(tools=[LOOK], tool_choice=choice, max_output_tokens=9, reasoning={"effort": "low"}).to_chat()
    use = chat.tool_use()
    assert use is not None and use.is_demanded and [function.name for function in use.functions] == ["look"]
    assert (chat.max_completion_tokens, chat.template_variables()) == (9, {"reasoning_effort": "low"})
    assert body(tools=[LOOK], tool_choice="none").to_chat().tool_use() is None
