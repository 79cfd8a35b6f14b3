"""Tools and reasoning with OpenAI's own client. A grammar makes the demo model call, and write tags of reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from shutil import copytree
from typing import Any, Literal

import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.server_process import ServerProcess, serving


class Weather(BaseModel):
    """Tell the weather in a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


TOOL: Any = pydantic_function_tool(Weather, name="get_weather")
QUESTION: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, **fields)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_goes_round(client: OpenAI, choice: Any) -> None:
    demanded = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    chosen = ask(client, **demanded).choices[0]
    (call,) = chosen.message.tool_calls
    assert (chosen.finish_reason, chosen.message.content, call.type) == ("tool_calls", None, "function")
    weather = Weather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": f"{weather.city}: 21 degrees {weather.unit}"}
    messages = [*QUESTION, chosen.message, result]
    answer = client.chat.completions.create(
        model="demo", messages=messages, tools=[TOOL], tool_choice="none", max_tokens=30
    )
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_a_streamed_call_is_the_call_of_one_answer(client: OpenAI) -> None:
    demanded = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    expected = ask(client, **demanded).choices[0].message.tool_calls[0].function
    with client.chat.completions.stream(model="demo", messages=QUESTION, temperature=0, **demanded) as stream:
        kinds = [event.type for event in stream]
        completion = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.delta") > 3 and "tool_calls.function.arguments.done" in kinds
    choice = completion.choices[0]
    function = choice.message.tool_calls[0].function  # type: ignore[index]
    assert (function.name, function.arguments) == (expected.name, expected.arguments)
    assert function.parsed_arguments == Weather.model_validate_json(expected.arguments)
    assert choice.finish_reason == "tool_calls"


def test_the_model_does_not_call_by_its_own_choice_and_says_so(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as refusal:
        ask(client, tools=[TOOL])
    assert refusal.value.param == "tools" and "required" in refusal.value.message


def test_a_schema_that_cannot_be_enforced_is_refused_with_the_function(client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "odd", "parameters": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(BadRequestError) as refusal:
        ask(client, tools=[tool], tool_choice="required")
    assert refusal.value.param == "tools" and "'odd'" in refusal.value.message


# -- reasoning ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A server whose model has tags of reasoning: two special tokens of the demo model with other names."""
    directory = tmp_path_factory.mktemp("reasoner")
    model = copytree(DEMO_MODEL_PATH, directory / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (model / name).read_text()
        (model / name).write_text(text.replace("<|system|>", "<think>").replace("<pad>", "</think>"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("'<|assistant|>'", "'<|assistant|><think>'")
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with (
        serving("--model", str(model), "--served-model-name", "demo", log=directory / "log") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


@pytest.mark.long
def test_reasoning_has_its_own_field_and_a_budget(reasoner: OpenAI) -> None:
    budget = {"max_tokens": 20, "extra_body": {"thinking_token_budget": 3}}
    answer = ask(reasoner, **budget)
    message = answer.choices[0].message
    assert message.reasoning_content and message.content is not None and "think" not in message.content
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4, "three, and the closing tag"
    pieces = [chunk.choices[0].delta for chunk in ask(reasoner, stream=True, **budget) if chunk.choices]
    assert "".join(getattr(each, "reasoning_content", None) or "" for each in pieces) == message.reasoning_content
    assert "".join(each.content or "" for each in pieces) == message.content
    hidden = ask(reasoner, max_tokens=20, extra_body={"thinking_token_budget": 3, "include_reasoning": False})
    assert not hasattr(hidden.choices[0].message, "reasoning_content")
    assert hidden.choices[0].message.content == message.content


@pytest.mark.long
def test_a_format_and_calls_come_behind_the_reasoning(reasoner: OpenAI) -> None:
    budget = {"thinking_token_budget": 3}
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": Weather.model_json_schema()}}
    message = ask(reasoner, response_format=schema, extra_body=budget).choices[0].message
    assert message.reasoning_content and Weather.model_validate_json(message.content)
    message = ask(reasoner, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, extra_body=budget)
    assert message.choices[0].message.reasoning_content
    assert Weather.model_validate_json(message.choices[0].message.tool_calls[0].function.arguments)
