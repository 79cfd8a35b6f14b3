"""Templates get earlier tool calls with their arguments in the form that they can use, and the tools."""

from __future__ import annotations

from typing import Any

import pytest

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
