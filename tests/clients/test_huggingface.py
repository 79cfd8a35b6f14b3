"""Hugging Face's own client, given only the server's address."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import BadRequestError, ValidationError

from tests.support.server_process import ServerProcess

SKY = "What color is the sky?"
STORY = "Tell me a story about a cat."
SCHEMA = {
    "type": "object",
    "properties": {"legs": {"enum": [2, 4]}, "tame": {"type": "boolean"}},
    "required": ["legs", "tame"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["", "/generate"])
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[InferenceClient]:
    """A client that sends requests to the URL as given, with `stream` in the body."""
    with InferenceClient(server.url + request.param, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def chat(server: ServerProcess) -> Iterator[InferenceClient]:
    """A client that adds /v1/chat/completions to the URL, and names the model "dummy"."""
    with InferenceClient(server.url, timeout=60) as client:
        yield client


def test_text_in_text_out(client: InferenceClient) -> None:
    assert client.text_generation(SKY) == " The sky is blue."
    assert client.text_generation(SKY, return_full_text=True) == f"{SKY} The sky is blue."


def test_details_say_how_it_ended_and_have_each_token(server: ServerProcess, client: InferenceClient) -> None:
    answer = client.text_generation(SKY, details=True, decoder_input_details=True)
    details = answer.details
    assert answer.generated_text == " The sky is blue." and details
    assert (details.finish_reason, details.generated_tokens, len(details.tokens)) == ("eos_token", 6, 6)
    assert "".join(token.text for token in details.tokens if not token.special) == answer.generated_text
    assert [token.special for token in details.tokens] == [False] * 5 + [True]
    assert all(token.logprob <= 0 for token in details.tokens)
    prompt = server.client.post("/tokenize", json={"prompt": SKY}).json()["tokens"]
    assert [token.id for token in details.prefill] == prompt
    assert details.prefill[0].logprob is None and all(token.logprob <= 0 for token in details.prefill[1:])
    plain = client.text_generation(STORY, details=True, max_new_tokens=5)
    assert plain.details and plain.details.prefill == []
    assert (plain.details.finish_reason, plain.details.generated_tokens) == ("length", 5)


def test_the_likeliest_beside_each_token(client: InferenceClient) -> None:
    details = client.text_generation(SKY, details=True, top_n_tokens=3).details
    assert details and details.top_tokens and len(details.top_tokens) == details.generated_tokens
    for token, top in zip(details.tokens, details.top_tokens, strict=True):
        assert len(top) == 3, "which the client leaves as dictionaries"
        assert (top[0]["id"], top[0]["logprob"]) == (token.id, token.logprob)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_new_tokens": 1},
        {"stop": ["zebra", "blue"]},
        {"do_sample": True, "temperature": 1.5, "seed": 3, "max_new_tokens": 30},
        {"temperature": 3.0, "seed": 4, "max_new_tokens": 60},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_k": 20, "top_p": 0.9, "typical_p": 0.9, "seed": 1},
    ],
)
def test_a_stream_adds_up_to_the_answer(client: InferenceClient, fields: dict[str, Any]) -> None:
    fields = {"max_new_tokens": 60, **fields}
    whole = client.text_generation(SKY, details=True, **fields)
    assert "".join(client.text_generation(SKY, stream=True, **fields)) == whole.generated_text
    events = list(client.text_generation(SKY, stream=True, details=True, **fields))
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    assert all(event.generated_text is None and event.details is None for event in events[:-1])
    last = events[-1]
    assert last.generated_text == whole.generated_text and last.details and whole.details
    assert (last.details.finish_reason, last.details.generated_tokens) == (whole.details.finish_reason, len(events))
    assert last.details.input_length == 7 and last.details.seed == whole.details.seed
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]
    assert all(event.token.logprob <= 0 for event in events)


def test_what_ends_an_answer(client: InferenceClient) -> None:
    answer = client.text_generation(SKY, details=True, stop=["blue"])
    assert answer.details and answer.details.finish_reason == "stop_sequence"
    assert answer.generated_text == " The sky is "


def test_sampling_is_decided_by_the_seed(client: InferenceClient) -> None:
    def text(seed: int) -> str:
        return client.text_generation(STORY, do_sample=True, temperature=1.2, seed=seed, max_new_tokens=30)

    assert text(1) == text(1) != text(2)
    greedy = client.text_generation(STORY, do_sample=False, temperature=1.2, seed=1, max_new_tokens=30)
    assert greedy == client.text_generation(STORY, max_new_tokens=30)


def test_best_of_gives_the_others_too(client: InferenceClient) -> None:
    answer = client.text_generation(
        STORY, best_of=3, do_sample=True, temperature=1.5, seed=5, max_new_tokens=12, details=True
    )
    assert answer.details and answer.details.best_of_sequences and len(answer.details.best_of_sequences) == 2
    scores = [sum(token.logprob for token in answer.details.tokens) / len(answer.details.tokens)]
    scores += [sum(token.logprob for token in s.tokens) / len(s.tokens) for s in answer.details.best_of_sequences]
    assert max(scores) == scores[0]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_its_grammar(client: InferenceClient, stream: bool) -> None:
    def text(kind: str, value: Any) -> str:
        grammar: Any = {"type": kind, "value": value}
        answer: Any = client.text_generation(SKY, grammar=grammar, stream=stream)
        return "".join(answer)

    assert json.loads(text("json", SCHEMA))["legs"] in (2, 4)
    assert json.loads(text("json_schema", {"name": "animal", "schema": SCHEMA}))["legs"] in (2, 4)
    assert text("regex", "[0-9]{3}").isdigit()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 100_000}, "maximum context length"),
        ({"temperature": -1}, "temperature"),
        ({"grammar": {"type": "regex", "value": "("}}, "grammar"),
        ({"adapter_id": "mine"}, "adapter"),
    ],
)
def test_errors_are_typed(client: InferenceClient, stream: bool, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        client.text_generation(SKY, stream=stream, **fields)


def test_a_chat(chat: InferenceClient) -> None:
    answer = chat.chat_completion([{"role": "user", "content": SKY}])
    assert answer.choices[0].message.content == "The sky is blue." and answer.choices[0].finish_reason == "stop"
    assert answer.model == "demo" and answer.usage.completion_tokens == 6
    same = chat.chat.completions.create([{"role": "user", "content": SKY}], model="demo", logprobs=True, top_logprobs=2)
    assert same.choices[0].message == answer.choices[0].message
    assert same.choices[0].logprobs and len(same.choices[0].logprobs.content[0].top_logprobs) == 2


def test_a_streamed_chat_adds_up(chat: InferenceClient) -> None:
    messages: list[Any] = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": STORY}]
    whole = chat.chat_completion(messages, max_tokens=40)
    options: Any = {"include_usage": True}
    *chunks, last = chat.chat_completion(messages, max_tokens=40, stream=True, stream_options=options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage and last.usage.completion_tokens == 40


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_follows_its_schema(chat: InferenceClient, stream: bool) -> None:
    """This client rewrites `json_schema` to `{"type": "json_object", "value": <the schema>}` when given an address."""
    schema: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    answer: Any = chat.chat_completion(
        [{"role": "user", "content": SKY}], response_format=schema, max_tokens=64, stream=stream
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    assert json.loads(text)["legs"] in (2, 4) and json.loads(text).keys() == {"legs", "tame"}


def test_a_refused_chat_says_why(chat: InferenceClient) -> None:
    with pytest.raises(BadRequestError, match="maximum context length"):
        chat.chat_completion([{"role": "user", "content": SKY}], max_tokens=100_000)


async def test_the_async_client(server: ServerProcess) -> None:
    async with AsyncInferenceClient(server.url, timeout=60) as client:
        text = "".join([text async for text in await client.text_generation(SKY, stream=True)])
        assert text == await client.text_generation(SKY) == " The sky is blue."
        answer = await client.chat_completion([{"role": "user", "content": SKY}])
        assert answer.choices[0].message.content == "The sky is blue."
        with pytest.raises(ValidationError):
            await client.text_generation(SKY, max_new_tokens=100_000)


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        ("feature_extraction", {"text": SKY}),
        ("feature_extraction", {"text": [SKY], "normalize": True}),
        ("sentence_similarity", {"sentence": SKY, "other_sentences": [STORY]}),
        ("question_answering", {"question": SKY, "context": STORY}),
        ("zero_shot_classification", {"text": SKY, "candidate_labels": ["a", "b"]}),
        ("table_question_answering", {"table": {"a": ["1"]}, "query": SKY}),
        ("translation", {"text": SKY, "src_lang": "en", "tgt_lang": "fr"}),
        ("text_classification", {"text": SKY, "function_to_apply": "softmax"}),
        ("fill_mask", {"text": SKY, "targets": ["blue"]}),
        ("token_classification", {"text": SKY, "aggregation_strategy": "simple"}),
        ("text_to_image", {"prompt": SKY}),
    ],
)
def test_other_task_is_refused_by_its_name(client: InferenceClient, task: str, fields: dict[str, Any]) -> None:
    with pytest.raises((BadRequestError, ValidationError), match=f"for the task .*{task}.*text_generation"):
        getattr(client, task)(**fields)


@pytest.mark.parametrize("task", ["text_classification", "token_classification", "summarization", "translation"])
def test_other_task_with_the_same_request_does_not_succeed(client: InferenceClient, task: str) -> None:
    """Without options these send the very request of text_generation. The client then refuses the answer."""
    with pytest.raises((TypeError, ValueError, KeyError)):
        getattr(client, task)(SKY)
