"""Tools and reasoning with OpenAI's own client. The demo model calls one tool; a grammar makes it call any."""

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


# -- by the model's own choice -----------------------------------------------------------------------------------------


def tool(name: str, *parameters: str) -> Any:
    schema = {"type": "object", "properties": {each: {"type": "string"} for each in parameters}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


SEARCH = tool("search", "query")  # what the demo model was taught
FOUND = '{"query": "weather in Rome"}'


def test_a_streamed_call_by_the_models_own_choice_goes_round(client: OpenAI) -> None:
    messages = list(QUESTION)
    kinds, answers = [], []
    for _ in range(2):
        with client.chat.completions.stream(model="demo", messages=messages, temperature=0, tools=[SEARCH]) as stream:
            kinds.append([event.type for event in stream])
            (choice,) = stream.get_final_completion().choices
        answers.append(choice)
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls or ():
            assert (call.function.name, call.function.arguments) == ("search", FOUND)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"})
    asked, answered = answers
    assert len(asked.message.tool_calls or ()) == 1 and asked.finish_reason == "tool_calls"
    assert kinds[0].count("tool_calls.function.arguments.delta") > 3 and not asked.message.content
    assert answered.message.content == "The weather in Rome is sunny, 21 degrees." and answered.finish_reason == "stop"
    assert kinds[1].count("content.delta") > 3
    whole = ask(client, tools=[SEARCH]).choices[0]
    assert whole.message.tool_calls[0].function.arguments == FOUND and whole.finish_reason == "tool_calls"


def test_the_model_calls_only_where_a_tool_that_is_offered_helps(client: OpenAI) -> None:
    sky: Any = [{"role": "user", "content": "What color is the sky?"}]
    asked: Any = {"model": "demo", "temperature": 0}
    plain = client.chat.completions.create(messages=sky, tools=[SEARCH], **asked).choices[0]
    assert (plain.message.content, plain.message.tool_calls) == ("The sky is blue.", None)
    for offered in ({}, {"tools": [tool("get_time", "zone")]}):
        missing = client.chat.completions.create(messages=QUESTION, **offered, **asked).choices[0]
        assert (missing.message.content, missing.message.tool_calls) == ("I am sorry, I do not know that.", None)
    several: Any = [tool("get_time", "zone"), tool("search", "query", "limit")]
    called = client.chat.completions.create(messages=QUESTION, tools=several, **asked).choices[0].message
    assert [call.model_dump()["function"]["arguments"] for call in called.tool_calls or ()] == [FOUND]


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
