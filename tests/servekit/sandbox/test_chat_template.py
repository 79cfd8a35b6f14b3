"""Templates get earlier tool calls with their arguments in the form that they can use, and the tools."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.engine.model_files import DEMO_MODEL_PATH, find_chat_template
from servekit.sandbox.chat_template import render_chat
from servekit.sandbox.jobs import DoneLong, Outcome, Refused, RenderChat

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
]
EACH = "{% for message in messages %}{% for call in message.tool_calls or [] %}BODY{% endfor %}{% endfor %}"


def render(body: str, messages: list[dict[str, Any]] = MESSAGES, **variables: Any) -> Outcome:
    return render_chat(RenderChat(EACH.replace("BODY", body), True, False, variables, messages))


def text(outcome: Outcome) -> str:
    assert isinstance(outcome, DoneLong), outcome
    return bytes(outcome.utf8).decode()


@pytest.mark.parametrize(
    "body",
    [
        "{{ call.function.arguments | tojson }}",  # as Qwen's templates write them
        "{{ '' + call['function']['arguments'] }}",  # as DeepSeek's do
        "{% if call.function.arguments is mapping %}{{ call.function.arguments | tojson }}{% endif %}",
    ],
)
def test_arguments_are_json_in_any_template(body: str) -> None:
    assert text(render(body)) == '{"a": "é"}'


def test_a_template_that_fails_for_another_reason_is_refused_once() -> None:
    for messages in (MESSAGES, [{"role": "user", "content": "a", "tool_calls": [{}, {"function": "f"}]}]):
        outcome = render("{{ 'a' + 1 }}", messages)
        assert isinstance(outcome, Refused) and "refuses these messages" in outcome.message


def test_templates_get_the_tools() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert text(render("{{ tools[0].function.name }}", tools=tools)) == "add"
    assert text(render("{{ tools is none }}")) == "True"


def test_the_demo_models_template_writes_tools_calls_and_results_as_its_corpus_does() -> None:
    template = find_chat_template(DEMO_MODEL_PATH)
    city = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}}}
    tools = [
        {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": city}},
        {"type": "function", "function": {"name": "roll_dice"}},
    ]
    calls = [
        {"type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
        for city in ("Zürich", "Oslo")
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in Zürich and Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "snowy"},
    ]

    def rendered(messages: list[dict[str, Any]], **variables: Any) -> str:
        variables |= template.special_tokens
        return text(render_chat(RenderChat(template.source, True, False, variables, messages)))

    assert rendered(messages, tools=tools) == (
        "<bos><|system|>Tools:\nget_weather(city, unit)\nroll_dice()<eos><|system|>Be brief.<eos>"
        "<|user|>What is the weather in Zürich and Oslo?<eos>"
        '<|assistant|><tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><eos>'
        "<|user|>The result is sunny.<eos><|user|>The result is snowy.<eos><|assistant|>"
    )
    assert rendered(messages[:2]) == (
        "<bos><|system|>Be brief.<eos><|user|>What is the weather in Zürich and Oslo?<eos><|assistant|>"
    )
