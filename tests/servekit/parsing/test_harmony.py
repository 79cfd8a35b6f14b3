"""Messages in harmony's channels are recognized by their headers."""

from __future__ import annotations

import pytest

from servekit.parsing.chat_format import ToolUse
from tests.support.chat_answers import TOOLS, answer_format, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>Hello.", {"content": "Hello."}),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", {"content": "{}"}),
        ("<|channel|>analysis<|message|>It was cut ", {"reasoning": "It was cut "}),
        ("<|channel|>analysis<|mess", {}),
        ("No channel.", {"content": "No channel."}),
        (
            "<|start|>assistant to=functions.add<|channel|>commentary<|message|>{}<|call|>",
            {"calls": [("add", "{}")]},
        ),
        ("<|channel|>commentary to=python<|message|>1<|call|>", {"calls": [("python", "1")]}),
    ],
)
def test_messages(text: str, expected: dict[str, object]) -> None:
    assert parse(answer_format("openai_gptoss", "openai", use=TOOLS), text) == expected


def test_without_tools_a_call_is_content() -> None:
    no_tools: ToolUse | None = None
    text = "<|channel|>commentary to=functions.add<|message|>{}"
    assert parse(answer_format("openai_gptoss", "openai", use=no_tools), text) == {"content": "{}"}
