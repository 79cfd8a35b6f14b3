"""Parse the answers of chat models in pieces, and show what was found in short."""

from __future__ import annotations

import random
from typing import Any

from servekit.parsing.answer_events import AnswerEvent, CallArguments, CallBegins, Content, Reasoning
from servekit.parsing.chat_format import (
    AnswerFormat,
    ChatFormat,
    Function,
    ToolUse,
    choose_chat_format,
)

NAMES = ("get_weather", "add")
TOOLS = ToolUse(tuple(map(Function, NAMES)))


def chat_format(reasoning: str = "none", tools: str = "none", token_ids: dict[str, int] | None = None) -> ChatFormat:
    """Return the formats with these names, of a model with these added tokens."""
    return choose_chat_format("", reasoning, tools, (token_ids or {}).get, (2,))


def answer_format(
    reasoning: str = "none", tools: str = "none", prompt: str = "", use: ToolUse | None = TOOLS
) -> AnswerFormat:
    """Return the format of answers to a prompt."""
    return chat_format(reasoning, tools).for_answers(prompt, use if tools != "none" else None, None, None)


def events_of(wanted: AnswerFormat, pieces: list[str]) -> list[AnswerEvent]:
    """Return all events of an answer that arrives in these pieces."""
    parser = wanted.make_parser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def message(events: list[AnswerEvent]) -> dict[str, Any]:
    """Return what the events say: `content`, `reasoning`, and `calls` as pairs of name and arguments."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for event in events:
        match event:
            case Content():
                found["content"] += event.text
            case Reasoning():
                found["reasoning"] += event.text
            case CallBegins():
                assert event.index == len(found["calls"])
                found["calls"].append((event.name, ""))
            case CallArguments():
                name, arguments = found["calls"][event.index]
                found["calls"][event.index] = (name, arguments + event.text)
    return {key: value for key, value in found.items() if value}


def parse(wanted: AnswerFormat, text: str) -> dict[str, Any]:
    """Return what a whole answer says."""
    return message(events_of(wanted, [text]))


def split(text: str, seed: int) -> list[str]:
    """Cut a text at random places."""
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
    return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
