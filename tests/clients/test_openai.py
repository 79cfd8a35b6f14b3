"""OpenAI's own client, unmodified and without retries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import httpx2
import pytest
from openai import (
    AsyncOpenAI,
    BadRequestError,
    InternalServerError,
    LengthFinishReasonError,
    NotFoundError,
    OpenAI,
)
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam
from pydantic import BaseModel

from servekit.api.app import create_app
from servekit.config import ServeConfig
from servekit.engine.llm_engine import LLMEngine
from servekit.errors import RequestCrashesWorker, WorkerLost
from tests.support.server_process import ServerProcess

SKY = "What color is the sky?"
CAT = "How many legs does a cat have?"
STORY = "Tell me a story about a cat."


class Color(BaseModel):
    name: Literal["blue", "green", "red"]
    bright: bool


class World(BaseModel):
    """Nested, so that its schema has `$defs`; finite, so that every answer ends."""

    sky: Color
    weather: Literal["sunny", "rainy"]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def tokenize(server: ServerProcess, text: str, **fields: Any) -> list[int]:
    tokens: list[int] = server.client.post("/tokenize", json={"prompt": text, **fields}).json()["tokens"]
    return tokens


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


# -- completions -------------------------------------------------------------------------------------------------------


def test_a_completion(client: OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=SKY)
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, " The sky is blue.", "stop", None)
    assert answer.object == "text_completion" and answer.model == "demo" and answer.id.startswith("cmpl-")
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 6)
    assert answer.usage.total_tokens == 13


def test_sixteen_tokens_are_the_default(client: OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="Count to 20.")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == 16


def test_a_prompt_seen_before_is_not_computed_again(client: OpenAI) -> None:
    prompt = "the dog sat on the mat and the cat looked at it " * 10
    usages = [client.completions.create(model="demo", prompt=prompt, max_tokens=1).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages if usage and usage.prompt_tokens_details]
    assert usages[1] and cached[0] == 0 and usages[1].prompt_tokens > (cached[1] or 0) > usages[1].prompt_tokens // 2


def test_texts_and_token_ids_in_lists_and_alone(server: ServerProcess, client: OpenAI) -> None:
    """Choices come in the order of the prompts, the answers to one prompt side by side."""
    sky, cat = tokenize(server, SKY), tokenize(server, CAT)
    expected = [" The sky is blue.", " A cat has four legs."]
    lists: list[Any] = [[SKY, CAT], [sky, cat]]
    for prompts in lists:
        answer = client.completions.create(model="demo", prompt=prompts, n=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == [expected[0]] * 2 + [expected[1]] * 2
        assert answer.usage and answer.usage.prompt_tokens == len(sky) + len(cat)
    assert client.completions.create(model="demo", prompt=sky).choices[0].text == expected[0]


def test_best_of_returns_the_likeliest_of_the_n_answers(client: OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 1.5, "seed": 5, "max_tokens": 12, "logprobs": 0}
    fields["extra_body"] = {"ignore_eos": True}
    every = client.completions.create(model="demo", prompt=STORY, n=5, **fields).choices
    best = client.completions.create(model="demo", prompt=STORY, n=2, best_of=5, **fields).choices
    assert len({choice.text for choice in every}) > 2
    assert [choice.text for choice in best] == [choice.text for choice in sorted(every, key=_logprob)[:-3:-1]]


def _logprob(choice: CompletionChoice) -> float:
    assert choice.logprobs and choice.logprobs.token_logprobs
    return sum(choice.logprobs.token_logprobs)


def test_logprobs_have_an_entry_for_each_token(client: OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=STORY, max_tokens=12, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs and logprobs.text_offset
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:index])) for index in range(12)]
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3 and logprob <= 0
        assert max(top, key=top.__getitem__) == token and top[token] == logprob, "greedy takes the likeliest"


def test_no_likeliest_tokens_are_those_of_the_text_alone(client: OpenAI) -> None:
    """Clients read the logprob of a token from `top_logprobs`, as vLLM gives it, where they asked for 0 likeliest."""
    logprobs = client.completions.create(model="demo", prompt=STORY, max_tokens=3, logprobs=0).choices[0].logprobs
    assert logprobs and logprobs.tokens and logprobs.token_logprobs
    pairs = zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
    assert logprobs.top_logprobs == [{token: logprob} for token, logprob in pairs]


def test_the_ids_of_all_tokens_are_returned_if_asked(server: ServerProcess, client: OpenAI) -> None:
    """vLLM's fields for those who train on what a model says: text that is tokenized again may have other tokens."""
    asked: Any = {"model": "demo", "extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True}}
    prompts = [tokenize(server, SKY), tokenize(server, STORY)]
    text: Any = {"prompt": [SKY, STORY], "max_tokens": 4, "logprobs": 1}
    answers: Any = client.completions.create(**text, **asked).choices
    streamed: dict[int, list[int]] = {0: [], 1: []}
    of_prompts: dict[int, list[int]] = {}
    for chunk in client.completions.create(stream=True, **text, **asked):
        choice: Any = chunk.choices[0]
        streamed[choice.index] += choice.token_ids
        of_prompts.setdefault(choice.index, getattr(choice, "prompt_token_ids", []))
    for answer in answers:
        assert answer.prompt_token_ids == of_prompts[answer.index] == prompts[answer.index]
        assert answer.token_ids == streamed[answer.index] and len(answer.token_ids) == 4
        assert answer.logprobs.tokens == [f"token_id:{id_}" for id_ in answer.token_ids]
    chat: Any = {"messages": user(SKY), "logprobs": True, "max_tokens": 3}
    whole: Any = client.chat.completions.create(**chat, **asked)
    first: Any
    first, *rest = client.chat.completions.create(stream=True, **chat, **asked)
    assert first.prompt_token_ids == whole.prompt_token_ids and len(whole.prompt_token_ids) == 10
    assert [id_ for chunk in rest for id_ in chunk.choices[0].token_ids] == whole.choices[0].token_ids
    names = [entry.token for entry in whole.choices[0].logprobs.content]
    assert names == [f"token_id:{id_}" for id_ in whole.choices[0].token_ids]
    plain: Any = client.chat.completions.create(model="demo", **chat)
    assert not hasattr(plain, "prompt_token_ids") and not hasattr(plain.choices[0], "token_ids")


def test_an_empty_answer_has_no_token_ids(client: OpenAI) -> None:
    asked: Any = {"echo": True, "max_tokens": 0, "extra_body": {"return_token_ids": True}}
    answer: Any = client.completions.create(model="demo", prompt=SKY, **asked).choices[0]
    assert answer.token_ids == [] and len(answer.prompt_token_ids) == 7
    chunks: Any = list(client.completions.create(model="demo", prompt=SKY, stream=True, **asked))
    assert not any(chunk.choices[0].token_ids for chunk in chunks)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_texts_as_evaluation_harnesses_ask(server: ServerProcess, client: OpenAI, max_tokens: int) -> None:
    """Score a continuation: its tokens' logprobs are those between the context and what is generated on top."""
    context = tokenize(server, SKY)
    blue, green = (tokenize(server, f" The sky is {color}.", add_special_tokens=False) for color in ("blue", "green"))
    answer = client.completions.create(
        model="demo",
        prompt=[context + blue, context + green],
        echo=True,
        max_tokens=max_tokens,
        logprobs=1,
        temperature=0,
        seed=1234,
    )
    scores: list[float] = []
    greedy: list[bool] = []
    for choice, continuation in zip(answer.choices, (blue, green), strict=True):
        logprobs = choice.logprobs
        assert logprobs and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        assert len(logprobs.tokens) == len(context) + len(continuation) + max_tokens
        scored = slice(len(context), len(context) + len(continuation))
        scores.append(sum(logprobs.token_logprobs[scored]))
        tops = logprobs.top_logprobs[scored]
        greedy.append([max(top, key=top.__getitem__) for top in tops] == logprobs.tokens[scored])
    assert greedy == [True, False] and scores[0] > scores[1] + 1
    said = client.completions.create(model="demo", prompt=SKY, max_tokens=len(blue), logprobs=0)
    assert scores[0] == pytest.approx(_logprob(said.choices[0]), abs=0.05), "the same, computed as prompt or as output"


def test_echo_gives_the_prompt_back(client: OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=SKY, echo=True)
    assert answer.choices[0].text == f"{SKY} The sky is blue."
    alone = client.completions.create(model="demo", prompt=SKY, echo=True, max_tokens=0)
    assert alone.choices[0].text == SKY
    assert alone.usage and alone.usage.completion_tokens == 0


def test_stop_strings_are_cut_and_named(client: OpenAI) -> None:
    (choice,) = client.completions.create(model="demo", prompt=SKY, stop=["zebra", "blue"]).choices
    assert (choice.text, choice.finish_reason) == (" The sky is ", "stop")
    assert choice.model_extra and choice.model_extra["stop_reason"] == "blue"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": SKY},
        {"prompt": [SKY, STORY, CAT], "max_tokens": 24, "stop": ["cat has", "there"]},
        {"prompt": [SKY, STORY], "n": 3, "temperature": 1.5, "seed": 11, "max_tokens": 30},
        {"prompt": STORY, "temperature": 3.0, "seed": 4, "max_tokens": 60, "extra_body": {"ignore_eos": True}},
        {"prompt": [SKY, STORY], "logprobs": 2, "max_tokens": 10},
        {"prompt": [SKY, STORY], "echo": True, "logprobs": 1, "max_tokens": 5},
    ],
)
def test_a_stream_of_completions_adds_up(client: OpenAI, fields: dict[str, Any]) -> None:
    whole = client.completions.create(model="demo", **fields)
    options: Any = {"include_usage": True}
    *chunks, last = client.completions.create(model="demo", stream=True, stream_options=options, **fields)
    assert last.choices == [] and last.usage and whole.usage
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert {chunk.id for chunk in chunks} == {last.id} and last.id.startswith("cmpl-")
    assert last.usage.total_tokens == whole.usage.total_tokens
    for choice in whole.choices:
        assert _added_up(chunks, choice.index) == _fingerprint(choice)


def _fingerprint(choice: CompletionChoice) -> tuple[Any, ...]:
    logprobs = choice.logprobs.model_dump() if choice.logprobs else {}
    return choice.text, choice.finish_reason, (choice.model_extra or {})["stop_reason"], logprobs


def _added_up(chunks: Iterable[Completion], index: int) -> tuple[Any, ...]:
    text, finish_reason, stop_reason = "", None, None
    logprobs: dict[str, list[Any]] = {}
    for part in (chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index):
        assert finish_reason is None, "nothing follows the end"
        text += part.text
        finish_reason, stop_reason = part.finish_reason, (part.model_extra or {}).get("stop_reason")
        for name, values in (part.logprobs.model_dump() if part.logprobs else {}).items():
            logprobs[name] = logprobs.get(name, []) + values
    return text, finish_reason, stop_reason, logprobs


def test_a_stream_has_no_usage_unless_asked(client: OpenAI) -> None:
    chunks = list(client.completions.create(model="demo", prompt=SKY, stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
    assert len(chunks) >= 5, "token by token"


def test_a_stream_that_is_left_frees_its_blocks(server: ServerProcess, client: OpenAI) -> None:
    server.wait_until_at_rest()
    with client.completions.create(
        model="demo", prompt=STORY, stream=True, max_tokens=1900, extra_body={"ignore_eos": True}
    ) as stream:
        next(stream)
        assert server.metric("servekit_num_requests_running") == 1
    server.wait_until_at_rest()


def test_options_beyond_openai(server: ServerProcess, client: OpenAI) -> None:
    def text(**fields: Any) -> str:
        extra = {name: fields.pop(name) for name in list(fields) if name not in ("temperature", "max_tokens")}
        answer: Completion = client.completions.create(model="demo", prompt=SKY, extra_body=extra, **fields)
        return answer.choices[0].text

    greedy = " The sky is blue."
    assert text(temperature=2, top_k=1) == greedy == text(temperature=2, min_p=1.0)
    assert text(allowed_by_nobody=1) == greedy, "unknown fields are ignored, as load tools expect"
    (blue,) = tokenize(server, " blue", add_special_tokens=False)
    assert text(stop_token_ids=[blue]).rstrip() == " The sky is"
    assert "blue" not in text(logit_bias={str(blue): -100})
    assert text(structured_outputs={"choice": ["purple", "green"]}) in ("purple", "green")
    assert text(structured_outputs={"regex": "[0-9]{3}"}).isdigit()
    assert text(structured_outputs={"grammar": 'start: "a" "b"+ "c"'}, max_tokens=64)[:2] == "ab"
    answer = client.completions.create(model="demo", prompt=SKY, extra_body={"min_tokens": 12, "ignore_eos": True})
    assert answer.usage and answer.usage.completion_tokens == 16


# -- chat --------------------------------------------------------------------------------------------------------------


def test_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=user(SKY))
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "The sky is blue.")
    assert not choice.message.tool_calls and not choice.message.refusal
    assert answer.object == "chat.completion" and answer.model == "demo" and answer.id.startswith("chatcmpl-")
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 6)


def test_every_shape_of_a_conversation(client: OpenAI) -> None:
    conversations: list[list[ChatCompletionMessageParam]] = [
        [{"role": "system", "content": "You are terse."}, *user(SKY)],
        [{"role": "user", "content": [{"type": "text", "text": part} for part in ("What color is ", "the sky?")]}],
        [*user(CAT), {"role": "assistant", "content": "A cat has four legs."}, *user(SKY)],
    ]
    for messages in conversations:
        answer = client.chat.completions.create(model="demo", messages=messages)
        assert answer.choices[0].message.content == "The sky is blue."


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_old_and_the_new_name_of_max_tokens(client: OpenAI, name: str) -> None:
    fields: dict[str, Any] = {name: 5}
    answer = client.chat.completions.create(model="demo", messages=user(STORY), **fields)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": user(SKY)},
        {"messages": user(STORY), "n": 3, "temperature": 1.5, "seed": 11, "max_tokens": 30},
        {"messages": user(STORY), "temperature": 3.0, "seed": 4, "max_tokens": 60, "extra_body": {"ignore_eos": True}},
        {"messages": user(SKY), "logprobs": True, "top_logprobs": 2, "stop": "blue"},
    ],
)
def test_a_streamed_chat_adds_up(client: OpenAI, fields: dict[str, Any]) -> None:
    whole = client.chat.completions.create(model="demo", **fields)
    options: Any = {"include_usage": True}
    *chunks, last = client.chat.completions.create(model="demo", stream=True, stream_options=options, **fields)
    assert last.choices == [] and last.usage.total_tokens == whole.usage.total_tokens
    assert {chunk.id for chunk in chunks} == {last.id} and last.id.startswith("chatcmpl-")
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        text, finish_reason, logprobs = _chat_added_up(chunks, choice.index)
        assert (text, finish_reason) == (choice.message.content, choice.finish_reason)
        assert logprobs == (choice.logprobs.content if choice.logprobs else [])


def _chat_added_up(chunks: Iterable[ChatCompletionChunk], index: int) -> tuple[str, str | None, list[Any]]:
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
    assert parts[0].delta.role == "assistant" and all(part.delta.role is None for part in parts[1:])
    assert all(part.finish_reason is None for part in parts[:-1])
    logprobs = [entry for part in parts if part.logprobs for entry in part.logprobs.content or ()]
    return "".join(part.delta.content or "" for part in parts), parts[-1].finish_reason, logprobs


def test_logprobs_of_a_chat(client: OpenAI) -> None:
    (choice,) = client.chat.completions.create(
        model="demo", messages=user(STORY), max_tokens=8, logprobs=True, top_logprobs=4
    ).choices
    assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content) == 8
    assert b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content).decode() == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 4 and entry.logprob <= 0
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert entry.top_logprobs == sorted(entry.top_logprobs, key=lambda top: -top.logprob)


def test_a_seed_decides(client: OpenAI) -> None:
    def text(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model="demo", messages=user(STORY), temperature=1.2, max_tokens=30, seed=seed
        )
        return answer.choices[0].message.content

    assert text(3) == text(3) != text(4)


def test_a_pydantic_model_comes_back_filled(client: OpenAI) -> None:
    message = client.chat.completions.parse(model="demo", messages=user(SKY), response_format=World).choices[0].message
    assert isinstance(message.parsed, World)
    assert message.content and World.model_validate_json(message.content) == message.parsed
    with pytest.raises(LengthFinishReasonError):
        client.chat.completions.parse(model="demo", messages=user(SKY), response_format=World, max_tokens=3)


def test_the_stream_helper_parses_as_it_goes(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=user(SKY), response_format=World, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    (done,) = [event for event in events if event.type == "content.done"]
    assert "".join(deltas) == done.content == final.choices[0].message.content
    assert isinstance(done.parsed, World) and final.choices[0].message.parsed == done.parsed
    assert final.usage and final.usage.completion_tokens >= len(deltas)


def test_an_answer_in_json(client: OpenAI) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"]}
    schema["additionalProperties"] = False
    answer = client.chat.completions.create(
        model="demo",
        messages=user(CAT),
        response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "")["legs"] in (2, 4)
    answer = client.chat.completions.create(
        model="demo", messages=user("Hello"), response_format={"type": "json_object"}, max_tokens=8
    )
    assert (answer.choices[0].message.content or "").lstrip().startswith("{")


# -- models, errors, headers -------------------------------------------------------------------------------------------


def test_the_model_that_is_served(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("demo", "model", "servekit") and model.created > 0
    assert client.models.retrieve("demo") == model
    assert model.model_extra and model.model_extra["max_model_len"] == 2048
    with pytest.raises(NotFoundError) as refusal:
        client.models.retrieve("gpt-5")
    assert refusal.value.code == "model_not_found"
    for name in ("dummy", "tgi", ""):
        assert client.completions.create(model=name, prompt=SKY).model == "demo"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "error", "code", "param"),
    [
        ({"model": "gpt-5"}, NotFoundError, "model_not_found", "model"),
        ({"temperature": -1}, BadRequestError, "invalid_value", "temperature"),
        ({"n": 0}, BadRequestError, "invalid_value", "n"),
        ({"max_tokens": 100_000}, BadRequestError, "context_length_exceeded", None),
    ],
)
def test_errors_are_typed_and_come_before_the_stream(
    client: OpenAI, stream: bool, fields: dict[str, Any], error: type[Any], code: str, param: str | None
) -> None:
    fields = {"model": "demo", "stream": stream, **fields}
    doors: list[tuple[Any, dict[str, Any]]] = [
        (client.completions.create, {"prompt": SKY}),
        (client.chat.completions.create, {"messages": user(SKY)}),
    ]
    for create, prompt in doors:
        with pytest.raises(error) as refusal:
            create(**fields, **prompt)
        assert (refusal.value.code, refusal.value.type) == (code, "invalid_request_error")
        assert param is None or refusal.value.param == param


def test_unsupported_fields_are_refused(client: OpenAI) -> None:
    function: Any = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    with pytest.raises(BadRequestError) as refusal:
        client.chat.completions.create(model="demo", messages=user(SKY), functions=[function])
    assert refusal.value.param == "functions"
    picture: Any = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(BadRequestError):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [picture]}])
    with pytest.raises(BadRequestError) as refusal:
        client.completions.create(model="demo", prompt="word " * 5000)
    assert refusal.value.code == "context_length_exceeded" and "maximum context length" in refusal.value.message


def test_headers_of_the_raw_response(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="demo", prompt=SKY)
    assert raw.status_code == 200 and raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].text == " The sky is blue."
    with client.completions.with_streaming_response.create(model="demo", prompt=SKY, stream=True) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert list(streamed.iter_lines())[-2:] == ["data: [DONE]", ""]


async def test_the_async_client(server: ServerProcess) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = await client.chat.completions.create(model="demo", messages=user(SKY))
        stream = await client.chat.completions.create(model="demo", messages=user(SKY), stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == answer.choices[0].message.content == "The sky is blue."
        with pytest.raises(NotFoundError):
            await client.completions.create(model="gpt-5", prompt=SKY)


async def test_crashing_request_is_not_retried_and_an_outage_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of itself the client repeats whatever is 5xx, and each time would cost three workers."""
    num_asked = 0

    def reserve(*_: Any) -> None:
        nonlocal num_asked
        num_asked += 1
        raise error

    engine = LLMEngine(ServeConfig())
    monkeypatch.setattr(engine, "reserve", reserve)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    transport = httpx2.ASGITransport(create_app(engine))
    http = httpx2.AsyncClient(transport=transport)
    async with AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=2, http_client=http) as client:
        for error, times in ((RequestCrashesWorker("three times"), 1), (WorkerLost("gone"), 3)):
            num_asked = 0
            with pytest.raises(InternalServerError) as refusal:
                await client.completions.create(model="demo", prompt=SKY)
            assert (refusal.value.status_code, num_asked) == (error.status, times)
