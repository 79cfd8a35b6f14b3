"""A call is read from a JSON object with its members in any order, as models write it."""

from __future__ import annotations

import pytest

from tests.support.chat_answers import answer_format, parse

HERMES = answer_format("none", "hermes")


def call(members: str) -> str:
    return f"<tool_call>{{{members}}}</tool_call>"


@pytest.mark.parametrize(
    ("members", "arguments"),
    [
        ('"name": "add", "arguments": {"a": 1}', '{"a": 1}'),
        ('"name":"add","parameters":{"a":1}', '{"a":1}'),
        ('"arguments": {"a": 1}, "name": "add"', '{"a": 1}'),
        ('"id": [7], "name": "add" , "arguments": {} , "type": {"x": "}"} ', "{}"),
        ('"name": "add", "arguments": "{\\"a\\": 1}"', '{"a": 1}'),
        ('"name": "add", "arguments": null', "{}"),
        ('"name": "add"', "{}"),
        ('"name": "add", "arguments": [1]', "[1]"),
    ],
)
def test_members_come_in_any_order(members: str, arguments: str) -> None:
    assert parse(HERMES, call(members)) == {"calls": [("add", arguments)]}


@pytest.mark.parametrize(
    "members",
    ['"arguments": {}', '"name": "", "arguments": {}', '"name": 5', '"name" "add"', '"name": "add"; 1', 'name: "add"'],
)
def test_an_object_that_is_no_call_is_content(members: str) -> None:
    assert parse(HERMES, call(members)) == {"content": call(members)}


@pytest.mark.parametrize("rest", ['{"a": 1}, "x"}', '{"a": 1}, "x": ]}', '{"a": 1}]'])
def test_what_follows_a_call_wrongly_is_content(rest: str) -> None:
    found = parse(HERMES, f'<tool_call>{{"name": "add", "arguments": {rest}</tool_call> end')
    assert found["calls"] == [("add", '{"a": 1}')] and found["content"].endswith("end")


def test_a_second_call_that_is_none_does_not_bring_back_the_marker() -> None:
    text = '[TOOL_CALLS][{"name": "add", "arguments": {}}, oh'
    assert parse(answer_format("none", "mistral"), text) == {"calls": [("add", "{}")], "content": "oh"}


def test_names_without_letters_are_no_names() -> None:
    begin = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
    for tools, text in (("mistral", "[TOOL_CALLS] {}"), ("deepseek_v31", f"{begin} <｜tool▁sep｜>{{}}")):
        assert "calls" not in parse(answer_format("none", tools), text)
