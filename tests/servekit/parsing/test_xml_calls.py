"""Values of XML calls become JSON: the schema of the function tells strings from everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from servekit.parsing.answer_events import CallArguments, CallBegins
from servekit.parsing.chat_format import AnswerFormat, Function, ToolUse
from tests.support.chat_answers import answer_format, events_of, message, parse

PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "count": {"type": "integer"},
    "is_new": {"type": "boolean"},
    "lines": {"type": "array", "items": {"type": "string"}},
    "mode": {"enum": ["r", "w"]},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "any": {},
}
SCHEMA = {"type": "object", "properties": PROPERTIES}


def wanted(tools: str, schema: dict[str, Any] = SCHEMA) -> AnswerFormat:
    return answer_format(tools=tools, use=ToolUse((Function("edit", json.dumps(schema)),)))


def qwen_coder(key: str, value: str) -> str:
    """Return a call as the template of Qwen3-Coder writes it."""
    return f"<tool_call>\n<function=edit>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def glm(key: str, value: str) -> str:
    """Return a call as the template of GLM-4.5 writes it."""
    return f"<tool_call>edit\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


@pytest.mark.parametrize(("tools", "write"), [("qwen3_coder", qwen_coder), ("glm45", glm)])
@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("path", "a/b.py", "a/b.py"),
        ("path", "5", "5"),
        ("path", "null", "null"),
        ("path", "", ""),
        ("path", '  two\n\nlines "é" \\n </x> ', '  two\n\nlines "é" \\n </x> '),
        ("count", "5", 5),
        ("count", " 5 ", 5),
        ("count", "many", "many"),
        ("is_new", "true", True),
        ("is_new", "True", True),  # as templates write Python's values
        ("lines", '["a", "5"]', ["a", "5"]),
        ("lines", "[oh", "[oh"),
        ("mode", "w", "w"),
        ("limit", "None", None),
        ("limit", "7", 7),
        ("note", "7", "7"),
        ("note", "null", None),
        ("note", "text", "text"),
        ("any", '{"a": 1}', {"a": 1}),
        ("any", "NaN", "NaN"),
        ("unknown", "1.5", 1.5),
        ("unknown", "text", "text"),
    ],
)
def test_a_value_has_a_type_of_the_schema(tools: str, write: Any, key: str, written: str, value: Any) -> None:
    ((name, arguments),) = parse(wanted(tools), write(key, written))["calls"]
    assert name == "edit" and json.loads(arguments) == {key: value}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/name"}}, "$defs": {"name": {"type": "string"}}}, "5"),
        ({"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": {"type": "string"}}}}}, "5"),
        ({"properties": {"a": {"type": ["string", "null"]}}}, "5"),
        ({"properties": {"a": {"type": ["string", "number"]}}}, 5),
        ({"properties": {"a": {"const": "5"}}}, "5"),
        ({"properties": {"a": {"allOf": [{"$ref": "#/$defs/name"}]}}, "$defs": {"name": {"type": "string"}}}, "5"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, 5),
        ({"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 2}}}, 5),
        ({"properties": {"a": {"$ref": "elsewhere"}}}, 5),
        ({"properties": {"a": True}}, 5),
        ({"properties": []}, 5),
    ],
)
def test_the_type_is_found_behind_references_and_alternatives(schema: dict[str, Any], value: Any) -> None:
    ((_, arguments),) = parse(wanted("qwen3_coder", schema), qwen_coder("a", "5"))["calls"]
    assert json.loads(arguments) == {"a": value}


def test_a_function_that_the_request_does_not_have_is_called_as_it_is_written() -> None:
    text = "<tool_call><function=other><parameter=a>5</parameter></function></tool_call>"
    assert parse(wanted("qwen3_coder"), text) == {"calls": [("other", '{"a": 5}')]}


def test_a_string_arrives_in_pieces_while_the_model_writes_it() -> None:
    parser = wanted("qwen3_coder").make_parser()
    events = parser.feed("<tool_call>\n<function=edit>\n<parameter=path>\nprint(")
    assert events[0] == CallBegins(0, "edit")
    assert "".join(event.text for event in events if isinstance(event, CallArguments)) == '{"path": "print('
    assert parser.feed('"a")\n') == [CallArguments(0, r"\"a\")")], "a line break may belong to the end"
    assert parser.feed("b") == [CallArguments(0, r"\nb")]
    assert parser.finish() == [], "an answer that is cut has no closing quote"


def test_a_strict_call_begins_with_the_marker_behind_which_its_grammar_applies() -> None:
    strict = answer_format(tools="qwen3_coder", use=ToolUse((Function("edit", json.dumps(SCHEMA), is_strict=True),)))
    text = "<function=edit><parameter=count>many</parameter></function>"
    assert parse(strict, text) == {"content": text}


@pytest.mark.parametrize("tools", ["qwen3_coder", "glm45"])
def test_the_object_that_a_grammar_demands_is_read_too(tools: str) -> None:
    text = '<tool_call>\n{"name": "edit", "arguments": {"count": 5}}\n</tool_call>'
    assert parse(wanted(tools), text) == {"calls": [("edit", '{"count": 5}')]}


@pytest.mark.parametrize(
    ("tools", "text", "arguments", "content"),
    [
        (  # without the end of the function
            "qwen3_coder",
            "<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>\n</tool_call>",
            {"path": "a"},
            "",
        ),
        ("qwen3_coder", "<tool_call>\n<function=edit>\n</tool_call>", {}, ""),
        (  # without the end of a parameter: another one follows, or the end of the function
            "qwen3_coder",
            "<tool_call>\n<function=edit>\n<parameter=path>\na\nb\n<parameter=count>\n5\n</parameter>\n</function>\n"
            "</tool_call>",
            {"path": "a\nb", "count": 5},
            "",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=edit>\n<parameter=count>\n5\n<parameter=path>\na\n</function>\n</tool_call>",
            {"count": 5, "path": "a"},
            "",
        ),
        (  # something unknown between the members
            "qwen3_coder",
            "<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>\nDone.",
            {"path": "a"},
            "Done.",
        ),
        (
            "glm45",
            "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\nDone.",
            {"path": "a"},
            "Done.",
        ),
        (
            "glm45",
            "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n<arg_key>count</arg_key>5",
            {"path": "a"},
            "count</arg_key>5",
        ),
    ],
)
def test_a_call_with_a_faulty_form_has_arguments_that_are_json(
    tools: str, text: str, arguments: dict[str, Any], content: str
) -> None:
    for cut in range(len(text)):
        found = message(events_of(wanted(tools), [text[:cut], text[cut:]]))
        ((name, written),) = found["calls"]
        assert name == "edit" and json.loads(written) == arguments, cut
        assert found.get("content", "") == content, cut


@pytest.mark.parametrize(("tools", "write"), [("qwen3_coder", qwen_coder), ("glm45", glm)])
def test_a_call_that_was_cut_does_not_look_like_a_whole_one(tools: str, write: Any) -> None:
    text = write("path", "a")
    end = text.index("</function>" if tools == "qwen3_coder" else "</tool_call>")
    for length in range(text.index("a", text.index("path") + 4), end):
        ((_, written),) = parse(wanted(tools), text[:length])["calls"]
        with pytest.raises(json.JSONDecodeError):
            json.loads(written)
