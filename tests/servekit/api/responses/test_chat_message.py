"""A chat's message is the same whether it is streamed or not, and the official client reads it.

The answers are given texts, in pieces. The real formats, builders and types of OpenAI's package read them.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from servekit.api.responses.openai_format import ChatResponseBuilder
from servekit.api.schemas.json_body import decode, encode
from servekit.api.schemas.openai import ChatCompletionRequest
from servekit.engine.client_queue import TokenDelta
from servekit.engine.tokenizer import Tokenizer
from servekit.parsing.chat_format import choose_chat_format
from servekit.scheduler.sequence import FinishReason
from tests.support.chat_answers import split

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "look")]
CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "look"}\n</tool_call>'


class State:
    """What a builder asks of a request's state."""

    num_prompt_tokens, num_cached_tokens = 7, 0
    num_drafted_tokens = num_accepted_tokens = 0

    class request:  # noqa: N801
        prompt_logprobs = None
        explain = False

    @staticmethod
    def num_answer_tokens(num_counted: int) -> int:
        return num_counted


def deltas_of(text: str, reason: FinishReason, seed: int) -> list[TokenDelta]:
    """Return the text in pieces, one token each, and the token that ends it."""
    pieces = [piece for piece in split(text, seed) if piece]
    deltas = [TokenDelta(0, 5, piece, False) for piece in pieces]
    return [*deltas, TokenDelta(0, 2, "", True, reason)]


def builder_of(parser: str = "hermes", **fields: Any) -> ChatResponseBuilder:
    body = {"messages": [{"role": "user"}], "stream": True, "stream_options": {"include_usage": True}, **fields}
    wanted = decode(json.dumps(body).encode(), ChatCompletionRequest)
    answer_format = choose_chat_format("", "qwen3", parser, {}.get, ()).for_answers("", wanted.tool_use(), None, None)
    state: Any = State()
    tokenizer: Any = Tokenizer
    return ChatResponseBuilder(wanted, state, tokenizer, "chatcmpl-1", "demo", answer_format)


def whole(builder: ChatResponseBuilder, deltas: list[TokenDelta]) -> ChatCompletion:
    answer = builder.make_answer(0)
    for delta in deltas:
        answer.add((delta,))
    return ChatCompletion.model_validate_json(encode(builder.response([[answer]], list)))


def streamed(builder: ChatResponseBuilder, deltas: list[TokenDelta], seed: int) -> ChatCompletion:
    """Return what OpenAI's package makes of the chunks of a stream, in events of one token or several."""
    rng, written = random.Random(seed), b""
    while deltas:
        num_tokens = rng.randint(1, 3)
        written += builder.events(deltas[:num_tokens])
        deltas = deltas[num_tokens:]
    written += builder.last_events()
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for line in written.decode().split("\n\n")[:-1]:
        state.handle_chunk(ChatCompletionChunk.model_validate_json(line.removeprefix("data: ")))
    return state.current_completion_snapshot


def said(completion: ChatCompletion) -> dict[str, Any]:
    choice = completion.choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
    reasoning = getattr(choice.message, "reasoning_content", None)
    found = {"content": choice.message.content or None, "reasoning": reasoning, "calls": calls or None}
    assert completion.usage is not None and completion.usage.completion_tokens_details is not None
    tokens = completion.usage.completion_tokens_details.reasoning_tokens
    return {**{key: value for key, value in found.items() if value}, "reason": choice.finish_reason, "tokens": tokens}


ADD, LOOK = ("add", '{"a": 1}'), ("look", "{}")


@pytest.mark.parametrize(
    ("text", "reason", "fields", "expected"),
    [
        ("Hello.", FinishReason.STOP, {}, {"content": "Hello.", "reason": "stop"}),
        (
            f"<think>Hm.</think>\n\nI add.\n{CALLS}",
            FinishReason.STOP,
            {"tools": TOOLS},
            {"reasoning": "Hm.", "content": "I add.", "calls": [ADD, LOOK], "reason": "tool_calls"},
        ),
        (CALLS, FinishReason.STOP, {"tools": TOOLS}, {"calls": [ADD, LOOK], "reason": "tool_calls"}),
        (
            CALLS,
            FinishReason.STOP,
            {"tools": TOOLS, "parallel_tool_calls": False},
            {"calls": [ADD], "reason": "tool_calls"},
        ),
        (CALLS[:48], FinishReason.LENGTH, {"tools": TOOLS}, {"calls": [("add", '{"a": 1')], "reason": "length"}),
        (CALLS, FinishReason.STOP, {"tools": TOOLS, "tool_choice": "none"}, {"content": CALLS, "reason": "stop"}),
        (
            "<think>Hm.</think>Yes",
            FinishReason.STOP,
            {"include_reasoning": False},
            {"content": "Yes", "reason": "stop"},
        ),
    ],
)
def test_a_stream_says_what_one_answer_says(
    text: str, reason: FinishReason, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    for seed in range(30):
        deltas = deltas_of(text, reason, seed)
        one, many = said(whole(builder_of(**fields), deltas)), said(streamed(builder_of(**fields), deltas, seed))
        assert one == many
        one.pop("tokens")
        assert one == expected


def test_the_tokens_of_the_reasoning_are_counted() -> None:
    pieces = ["<think>", "Hm", ", ", "yes.", "</think>", "Yes"]
    deltas = [TokenDelta(0, 5, piece, False) for piece in pieces] + [TokenDelta(0, 2, "", True, FinishReason.STOP)]
    assert said(whole(builder_of(), deltas))["tokens"] == 4, "with the closing tag"


def test_each_call_has_an_id_of_its_own_that_the_template_accepts() -> None:
    text = '[TOOL_CALLS][{"name": "add"}, {"name": "look"}]'
    deltas = deltas_of(text, FinishReason.STOP, 1)
    for completion in (
        whole(builder_of("mistral", tools=TOOLS), deltas),
        streamed(builder_of("mistral", tools=TOOLS), deltas, 1),
    ):
        ids = [call.id for call in completion.choices[0].message.tool_calls or []]
        assert len({*ids}) == 2 and all(len(each) == 9 and each.isalnum() for each in ids)
    hermes = whole(builder_of(tools=TOOLS), deltas_of(CALLS, FinishReason.STOP, 1))
    assert all(call.id.startswith("call_") for call in hermes.choices[0].message.tool_calls or [])
