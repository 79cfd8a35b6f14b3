"""Ollama's bodies mean what they mean in OpenAI's format; what they say beyond that, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from servekit.api.schemas.json_body import decode
from servekit.api.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest
from servekit.errors import InvalidRequest
from servekit.requests.generation import Grammar, GrammarKind

SCHEMA = {"type": "object", "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


def chat(**fields: Any) -> OllamaChatRequest:
    messages = [{"role": "user", "content": "a"}]
    return decode(json.dumps({"model": "m", "messages": messages, **fields}).encode(), OllamaChatRequest)


def generate(**fields: Any) -> OllamaGenerateRequest:
    return decode(json.dumps({"model": "m", "prompt": "a", **fields}).encode(), OllamaGenerateRequest)


def test_a_conversation_becomes_what_templates_expect() -> None:
    call = {"function": {"name": "look", "arguments": {"a": 1}}}
    wanted = chat(
        messages=[
            {"role": "assistant", "thinking": "hm", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "look", "content": "7", "tool_call_id": "c"},
        ]
    )
    first, second = wanted.conversation()
    assert first["tool_calls"] == [call] and first["reasoning_content"] == "hm"
    assert second == {"role": "tool", "content": "7", "name": "look", "tool_call_id": "c"}


def test_a_prompt_becomes_a_conversation() -> None:
    assert generate().conversation() == [{"role": "user", "content": "a"}]
    system = {"role": "system", "content": "Be brief."}
    assert generate(system="Be brief.", prompt=None).conversation() == [system, {"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("think", "variables", "is_shown"),
    [
        (None, {}, True),
        (True, {"enable_thinking": True, "thinking": True}, True),
        (False, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}, False),
        ("high", {"reasoning_effort": "high"}, True),
    ],
)
def test_think_becomes_variables_of_the_template(think: Any, variables: dict[str, Any], is_shown: bool) -> None:
    wanted = chat(think=think)
    assert wanted.chat().template_variables() == variables and wanted.shows_thinking is is_shown


@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        (None, None),
        ("", None),
        ("json", Grammar(GrammarKind.JSON, "", "format")),
        (SCHEMA, Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","required":["a"]}', "format")),
    ],
)
def test_the_format_becomes_a_grammar(wanted: Any, grammar: Grammar | None) -> None:
    assert chat(format=wanted).chat().to_generation_request("").grammar == grammar


@pytest.mark.parametrize(("num_predict", "max_tokens"), [(None, None), (-1, None), (-2, None), (0, None), (7, 7)])
def test_answers_without_a_positive_bound_may_fill_the_context(num_predict: Any, max_tokens: int | None) -> None:
    assert chat(options={"num_predict": num_predict}).chat().to_generation_request("").max_tokens == max_tokens


def test_the_seed_minus_one_is_random() -> None:
    seeds = [chat(options={"seed": seed}).chat().to_generation_request("").sampling.seed for seed in (-1, 0, 5)]
    assert seeds == [None, 0, 5]


def test_streams_are_the_default() -> None:
    assert chat().streams and chat(stream=True).streams and not chat(stream=False).streams


def test_tools_may_be_demanded_by_an_option() -> None:
    assert chat().chat().tool_use() is None
    use = chat(tools=[TOOL], options={"tool_choice": "required"}).chat().tool_use()
    assert use is not None and use.is_demanded and use.functions[0].name == "look"
    chosen = chat(tools=[TOOL]).chat().tool_use()
    assert chosen is not None and not chosen.is_demanded


def test_a_call_has_the_parameters_that_are_named_only() -> None:
    def parameters(**function: Any) -> Any:
        tool = {"type": "function", "function": {"name": "look", **function}}
        use = chat(tools=[tool]).chat().tool_use()
        assert use is not None
        return json.loads(use.functions[0].parameters)

    assert parameters(parameters=SCHEMA) == {**SCHEMA, "additionalProperties": False}
    assert parameters(parameters={**SCHEMA, "additionalProperties": True})["additionalProperties"] is True
    assert parameters()["properties"] == {}


def test_what_cannot_be_done_is_refused_by_field() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chat(messages=[{"role": "user", "content": "a", "images": ["aGk="]}]).conversation()
    assert refusal.value.param == "messages[0].images"
    with pytest.raises(InvalidRequest) as refusal:
        chat(tools=[TOOL, TOOL]).check()
    assert refusal.value.param == "tools[1]"
    chat(tools=[TOOL]).check()
