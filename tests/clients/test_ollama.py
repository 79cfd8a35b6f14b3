"""Ollama's own client, unmodified, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from ollama import AsyncClient, Client, ResponseError
from pydantic import BaseModel

from servekit.api.schemas.packed_body import MAX_INLINE_BYTES
from tests.support.server_process import ServerProcess

SKY = "What color is the sky?"
CAT = "How many legs does a cat have?"


class Animal(BaseModel):
    """An animal."""

    legs: Literal[2, 4]
    tame: bool


PROPERTIES = {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "unit": {"type": "string", "enum": ["C", "F"]}}
GET_WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather in a city.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city", "unit"]},
    },
}


SEARCH: Any = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.url, timeout=60) as client:
        yield client


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# -- chats -------------------------------------------------------------------------------------------------------------


def test_a_chat(client: Client) -> None:
    answer = client.chat("demo", user(SKY))
    assert (answer.message.role, answer.message.content) == ("assistant", "The sky is blue.")
    assert (answer.done, answer.done_reason, answer.model) == (True, "stop", "demo")
    assert (answer.prompt_eval_count, answer.eval_count, answer.load_duration) == (10, 6, 0)
    assert answer.total_duration and answer.prompt_eval_duration and answer.eval_duration
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 1000, "nanoseconds"
    assert answer.message.thinking is None and answer.message.tool_calls is None


def test_a_streamed_chat_adds_up(client: Client) -> None:
    parts = list(client.chat("demo:latest", user(SKY), stream=True))
    assert "".join(part.message.content or "" for part in parts) == "The sky is blue."
    assert len(parts) > 5 and [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last.message.content, last.done_reason, last.prompt_eval_count, last.eval_count) == ("", "stop", 10, 6)


def test_a_conversation_goes_on(client: Client) -> None:
    messages = [{"role": "system", "content": "You are terse."}, *user(SKY)]
    messages.append(client.chat("demo", messages).message.model_dump(exclude_none=True))
    assert client.chat("demo", [*messages, *user(CAT)]).message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [{"num_predict": 3}, {"stop": [" blue"]}])
def test_what_ends_an_answer(client: Client, stream: bool, options: dict[str, Any]) -> None:
    answer: Any = client.chat("demo", user(SKY), stream=stream, options=options)
    parts = list(answer) if stream else [answer]
    assert "".join(part.message.content for part in parts) == "The sky is"
    assert parts[-1].done_reason == ("length" if "num_predict" in options else "stop")


def test_sampling_is_decided_by_the_seed(client: Client) -> None:
    def text(seed: int) -> str:
        options = {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "seed": seed, "num_predict": 20, "num_ctx": 8192}
        return client.generate("demo", "Tell me a story.", options=options).response or ""

    assert text(1) == text(1) != text(2)
    assert text(-1) != text(-1), "a random one"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_in_json(client: Client, stream: bool) -> None:
    def text(wanted: Any, **fields: Any) -> str:
        answer: Any = client.chat("demo", user(CAT), format=wanted, stream=stream, **fields)
        return "".join(part.message.content for part in answer) if stream else answer.message.content

    assert Animal.model_validate_json(text(Animal.model_json_schema()))
    assert text("json", options={"num_predict": 8}).lstrip().startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: Client, stream: bool) -> None:
    """The call is demanded by servekit's own option."""
    options = {"tool_choice": "required"}
    answer: Any = client.chat("demo", user("Weather?"), tools=[GET_WEATHER], options=options, stream=stream)
    parts = list(answer) if stream else [answer]
    (call,) = [call for part in parts for call in part.message.tool_calls or ()][:1]
    assert call.function.name == "get_weather" and isinstance(call.function.arguments, dict)
    assert call.function.arguments["city"] in ("Paris", "Rome") and call.function.arguments["unit"] in ("C", "F")
    assert parts[-1].done_reason == "stop" and not "".join(part.message.content for part in parts)
    messages = [
        *user("Weather?"),
        {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_name": "get_weather", "content": "21 degrees"},
    ]
    assert client.chat("demo", messages, options={"num_predict": 10}).message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_by_the_models_own_choice_goes_round(client: Client, stream: bool) -> None:
    def chat(messages: list[Any]) -> tuple[str, list[Any]]:
        answer: Any = client.chat("demo", messages, tools=[SEARCH], options={"temperature": 0}, stream=stream)
        parts = [part.message for part in (answer if stream else [answer])]
        return "".join(part.content or "" for part in parts), [call for part in parts for call in part.tool_calls or ()]

    messages: list[Any] = user("What is the weather in Rome?")
    content, (call,) = chat(messages)
    assert (call.function.name, call.function.arguments, content) == ("search", {"query": "weather in Rome"}, "")
    messages.append({"role": "assistant", "content": "", "tool_calls": [call.model_dump()]})
    messages.append({"role": "tool", "tool_name": "search", "content": "sunny, 21 degrees"})
    assert chat(messages) == ("The weather in Rome is sunny, 21 degrees.", [])


def test_a_call_that_is_cut_short_is_text(client: Client) -> None:
    options = {"tool_choice": "required", "num_predict": 22}
    answer = client.chat("demo", user("Weather?"), tools=[GET_WEATHER], options=options)
    assert answer.done_reason == "length" and not answer.message.tool_calls
    assert json.dumps(answer.message.content)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: Client, stream: bool) -> None:
    answer: Any = client.chat("demo", user(SKY), logprobs=True, top_logprobs=2, stream=stream)
    found = [each for part in (answer if stream else [answer]) for each in part.logprobs or ()]
    assert "".join(each.token for each in found[:5]) == "The sky is blue."
    assert len(found) == 6 and all(each.logprob <= 0 and len(each.top_logprobs) == 2 for each in found)


def test_a_large_chat_is_decoded_elsewhere_with_the_same_answer(client: Client) -> None:
    padding = {"unknown": "x" * MAX_INLINE_BYTES}
    assert client.chat("demo", user(SKY), options=padding).message.content == "The sky is blue."
    assert client.generate("demo", SKY, options=padding).response == "The sky is blue."
    with pytest.raises(ResponseError, match="images"):
        client.chat("demo", [{"role": "user", "content": SKY, "images": [b"picture"]}], options=padding)


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_a_message_unless_it_is_raw(client: Client) -> None:
    answer = client.generate("demo", SKY)
    assert (answer.response, answer.done_reason, answer.eval_count) == ("The sky is blue.", "stop", 6)
    assert answer.prompt_eval_count == 10
    raw = client.generate("demo", SKY, raw=True)
    assert (raw.response, raw.prompt_eval_count) == (" The sky is blue.", 7)
    assert "".join(part.response or "" for part in client.generate("demo", SKY, stream=True)) == "The sky is blue."
    assert client.generate("demo", SKY, system="You are terse.").response


@pytest.mark.parametrize("call", [Client.generate, Client.chat])
def test_a_request_without_a_prompt_loads_the_model(client: Client, call: Any) -> None:
    answer = call(client, "demo", keep_alive=-1)
    assert (answer.done, answer.done_reason) == (True, "load")


# -- models ------------------------------------------------------------------------------------------------------------


def test_the_model_that_is_served(client: Client) -> None:
    (model,) = client.list().models
    assert model.model == "demo" and model.size and model.size > 10**6 and model.digest and len(model.digest) == 64
    assert model.details and (model.details.family, model.details.parameter_size) == ("llama", "3.5M")
    (loaded,) = client.ps().models
    assert (loaded.name, loaded.context_length, loaded.digest) == ("demo", 2048, model.digest) and loaded.expires_at
    shown = client.show("demo")
    assert shown.capabilities == ["completion", "tools"] and shown.details == model.details
    assert shown.modelinfo and shown.modelinfo["llama.context_length"] == 2048


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"model": "llama3.2"}, 404, "'llama3.2' does not exist"),
        ({"options": {"temperature": -1}}, 400, "options.temperature"),
        ({"options": {"num_predict": 100_000}}, 400, "maximum context length"),
        ({"options": {"mirostat": 2}}, 400, "mirostat"),
        ({"format": {"type": "array", "uniqueItems": True}}, 400, "uniqueItems"),
        ({"think": True}, 400, "thinking"),
        ({"messages": [{"role": "user", "content": "a", "images": [b"picture"]}]}, 400, "text only"),
    ],
)
def test_errors_have_a_status_and_words(
    client: Client, stream: bool, fields: dict[str, Any], status: int, words: str
) -> None:
    with pytest.raises(ResponseError) as refusal:
        list(client.chat(**{"model": "demo", "messages": user(SKY), "stream": stream, **fields}))
    assert refusal.value.status_code == status and words in refusal.value.error


@pytest.mark.parametrize("fields", [{"suffix": "b"}, {"template": "x"}, {"context": [1]}, {"images": [b"x"]}])
def test_what_generate_cannot_do_is_refused_by_name(client: Client, fields: dict[str, Any]) -> None:
    with pytest.raises(ResponseError, match=next(iter(fields))):
        client.generate("demo", SKY, **fields)


def test_models_are_not_managed_over_the_api(client: Client) -> None:
    calls: list[Any] = [
        lambda: client.pull("demo"),
        lambda: client.push("demo"),
        lambda: client.create("other", from_="demo"),
        lambda: client.copy("demo", "other"),
        lambda: client.delete("demo"),
    ]
    for call in calls:
        with pytest.raises(ResponseError, match="the operator names them with --model or --models"):
            call()
    for embed in (lambda: client.embed("demo", SKY), lambda: client.embeddings("demo", SKY)):
        with pytest.raises(ResponseError, match="no embeddings"):
            embed()


async def test_the_async_client(server: ServerProcess) -> None:
    async with AsyncClient(server.url, timeout=60) as client:
        assert (await client.chat("demo", user(SKY))).message.content == "The sky is blue."
        parts = [part.message.content or "" async for part in await client.chat("demo", user(SKY), stream=True)]
        assert "".join(parts) == "The sky is blue."
