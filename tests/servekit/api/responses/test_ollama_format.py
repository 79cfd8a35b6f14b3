"""An answer for Ollama's clients is the same whether it is streamed or not, and the official package reads it.

The answers are given texts, in pieces. The real formats, builders and types of Ollama's package read them.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from ollama import ChatResponse, GenerateResponse

from servekit.api.responses.ollama_format import AnswerKind, OllamaResponseBuilder, _Part, timestamp
from servekit.api.schemas.json_body import encode
from servekit.api.schemas.ollama import OllamaChatResponse, OllamaGenerateResponse
from servekit.engine.client_queue import TokenDelta
from servekit.engine.tokenizer import Tokenizer
from servekit.parsing.chat_format import Function, ToolUse, choose_chat_format
from servekit.scheduler.sequence import FinishReason
from tests.support.chat_answers import split

USE = ToolUse((Function("add"), Function("look")))
CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "look"}\n</tool_call>'
ADD, LOOK = ("add", {"a": 1}), ("look", {})


def state() -> Any:
    """Return what a builder asks of a request's state. Its times are 1, 1.5, 3 and 7 s."""
    sequence = SimpleNamespace(arrival_s=1.0, first_scheduled_s=1.5)
    output = SimpleNamespace(sequence=sequence, first_token_s=3.0, last_token_s=7.0)
    request = SimpleNamespace(logprobs=None)
    return SimpleNamespace(
        outputs=[output], num_prompt_tokens=7, request=request, num_answer_tokens=lambda num_counted: num_counted
    )


def builder_of(kind: AnswerKind, use: ToolUse | None, shows_thinking: bool = True) -> OllamaResponseBuilder:
    answer_format = choose_chat_format("", "qwen3", "hermes", {}.get, ()).for_answers("", use, None, None)
    tokenizer: Any = Tokenizer
    return OllamaResponseBuilder(kind, state(), tokenizer, "demo", answer_format, shows_thinking)


def deltas_of(text: str, reason: FinishReason, seed: int) -> list[TokenDelta]:
    """Return the text in pieces, one token each, and the token that ends it."""
    pieces = [piece for piece in split(text, seed) if piece]
    return [*(TokenDelta(0, 5, piece, False) for piece in pieces), TokenDelta(0, 2, "", True, reason)]


def whole(builder: OllamaResponseBuilder, deltas: list[TokenDelta]) -> list[bytes]:
    answer = builder.make_answer(0)
    for delta in deltas:
        answer.add((delta,))
    return [encode(builder.response([[answer]], list))]


def streamed(builder: OllamaResponseBuilder, deltas: list[TokenDelta], seed: int) -> list[bytes]:
    """Return the lines of a stream, in events of one token or several, with keep-alives between them."""
    rng, written = random.Random(seed), b""
    while deltas:
        num_tokens = rng.randint(1, 3)
        written += builder.framing.keep_alive + builder.events(deltas[:num_tokens])
        deltas = deltas[num_tokens:]
    return (written + builder.last_events()).splitlines()


def said(lines: list[bytes]) -> dict[str, Any]:
    """Return what Ollama's package makes of the lines, added up."""
    parts = [ChatResponse.model_validate_json(line) for line in lines]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    found: dict[str, Any] = {
        "content": "".join(part.message.content or "" for part in parts),
        "thinking": "".join(part.message.thinking or "" for part in parts),
        "calls": [
            (call.function.name, call.function.arguments) for part in parts for call in part.message.tool_calls or ()
        ],
    }
    return {name: value for name, value in found.items() if value} | {"reason": parts[-1].done_reason}


@pytest.mark.parametrize(
    ("text", "reason", "use", "shows_thinking", "expected"),
    [
        ("Hello.", FinishReason.STOP, None, True, {"content": "Hello.", "reason": "stop"}),
        (
            f"<think>Hm.</think>\n\nI add.\n{CALLS}",
            FinishReason.STOP,
            USE,
            True,
            {"thinking": "Hm.", "content": "I add.", "calls": [ADD, LOOK], "reason": "stop"},
        ),
        (CALLS, FinishReason.STOP, USE, True, {"calls": [ADD, LOOK], "reason": "stop"}),
        (CALLS[:48], FinishReason.LENGTH, USE, True, {"content": '{"a": 1', "reason": "length"}),
        ("<think>Hm.</think>Yes", FinishReason.STOP, None, False, {"content": "Yes", "reason": "stop"}),
        ("Well", FinishReason.DEADLINE, None, True, {"content": "Well", "reason": "deadline"}),
    ],
)
def test_a_stream_says_what_one_answer_says(
    text: str, reason: FinishReason, use: ToolUse | None, shows_thinking: bool, expected: dict[str, Any]
) -> None:
    for seed in range(30):
        deltas = deltas_of(text, reason, seed)
        one = said(whole(builder_of(OllamaChatResponse, use, shows_thinking), deltas))
        assert one == said(streamed(builder_of(OllamaChatResponse, use, shows_thinking), deltas, seed)) == expected


def test_the_reasoning_of_a_prompts_answer_stands_beside_it() -> None:
    deltas = deltas_of("<think>Hm.</think>Yes", FinishReason.STOP, 1)
    (line,) = whole(builder_of(OllamaGenerateResponse, None), deltas)
    answer = GenerateResponse.model_validate_json(line)
    assert (answer.thinking, answer.response) == ("Hm.", "Yes")
    parts = [
        GenerateResponse.model_validate_json(each)
        for each in streamed(builder_of(OllamaGenerateResponse, None), deltas, 1)
    ]
    assert "".join(part.thinking or "" for part in parts) == "Hm."
    assert "".join(part.response or "" for part in parts) == "Yes"


def test_the_end_has_the_times_in_nanoseconds_and_the_numbers_of_tokens() -> None:
    deltas = deltas_of("Hello.", FinishReason.STOP, 2)
    for lines in (
        whole(builder_of(OllamaChatResponse, None), deltas),
        streamed(builder_of(OllamaChatResponse, None), deltas, 2),
    ):
        end = ChatResponse.model_validate_json(lines[-1])
        assert (end.total_duration, end.load_duration) == (6 * 10**9, 0)
        assert (end.prompt_eval_duration, end.eval_duration) == (15 * 10**8, 4 * 10**9)
        assert (end.prompt_eval_count, end.eval_count) == (7, len(deltas))


def test_arguments_that_are_nested_too_deeply_become_content() -> None:
    part, arguments = _Part(), '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    part.add_call("add", arguments)
    assert part.calls == [] and part.content == [arguments]


def test_times_of_the_day_are_utc() -> None:
    assert timestamp(0) == "1970-01-01T00:00:00Z" and timestamp(1.5) == "1970-01-01T00:00:01.500000Z"
