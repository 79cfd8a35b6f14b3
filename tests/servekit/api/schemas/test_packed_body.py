"""Large bodies: they are decoded with the same result and the same errors as small ones. Here without a process."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from servekit.api.body_decoder import error_of, unpack
from servekit.api.schemas import packed_body
from servekit.api.schemas.anthropic import MessagesRequest
from servekit.api.schemas.native import GenerateRequest
from servekit.api.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest
from servekit.api.schemas.openai import MAX_MESSAGES, ChatCompletionRequest, CompletionRequest
from servekit.api.schemas.packed_body import (
    KINDS,
    MAX_INLINE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_SHORT_BYTES,
    ChatBody,
    DecodeBody,
    PackedBody,
    Refusal,
    choose_kind,
    decode_kind,
    pack,
)
from servekit.api.schemas.predictions import (
    EmbeddingsRequest,
    InferAnswer,
    OllamaEmbedRequest,
    PredictionFields,
    PredictRequest,
    RerankRequest,
    ScoreRequest,
    TeiEmbedRequest,
)
from servekit.api.schemas.responses_api import ResponsesRequest
from servekit.api.schemas.tgi import TgiRequest
from servekit.api.schemas.tokens import DetokenizeRequest, TgiTokenizeRequest, TokenizeRequest
from servekit.errors import RequestError

Kinds = list[type[Struct]]
GENERATE: Kinds = [GenerateRequest, TgiRequest]
TOKENIZE: Kinds = [TokenizeRequest, TgiTokenizeRequest]
COMPLETION: Kinds = [CompletionRequest]
CHAT: Kinds = [ChatCompletionRequest]
OLLAMA_CHAT: Kinds = [OllamaChatRequest]
OLLAMA_GENERATE: Kinds = [OllamaGenerateRequest]
RESPONSES: Kinds = [ResponsesRequest]
ANTHROPIC: Kinds = [MessagesRequest]
EMBEDDINGS: Kinds = [EmbeddingsRequest]
RERANK: Kinds = [RerankRequest]
PREDICT: Kinds = [PredictRequest]
MAX_TOKENS = 2**21
TENSOR = {"name": "a", "shape": [1], "datatype": "INT64", "data": [1]}
TEXT = '漢字, "quoted" and \\ escaped; 😀 ' * 4000


def decoded_here(body: bytes, kinds: Kinds, max_tokens: int) -> PackedBody | Refusal:
    """Return what the body process would send."""
    packed = pack(DecodeBody([kind.__name__ for kind in kinds], max_tokens, memoryview(body)))
    received: PackedBody | Refusal = msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=PackedBody | Refusal)
    return received


def encoded(body: Any, kinds: Kinds) -> bytes:
    text = json.dumps(body).encode()
    return text + b" " * (MAX_INLINE_BYTES + 1 - len(text))


def as_array(content: Any) -> Any:
    return content if isinstance(content, str) else array("i", content)


VALID: list[tuple[Kinds, dict[str, Any]]] = [
    (COMPLETION, {"prompt": TEXT, "max_tokens": 5, "stop": ["a", "b"], "logit_bias": {"5": 1.5}, "seed": -(2**63)}),
    (COMPLETION, {"prompt": [TEXT, "b", "", "ü"], "n": 2, "best_of": 3}),
    (COMPLETION, {"prompt": list(range(100_000)), "echo": True, "max_tokens": 0, "logprobs": 3}),
    (COMPLETION, {"prompt": [[1, 2, 3], [4], list(range(50_000))], "add_special_tokens": False, "anything": {"a": 1}}),
    (COMPLETION, {"prompt": "a", "guided_json": {"type": "object", "properties": {"ü": {"type": "string"}}}}),
    (GENERATE, {"prompt": TEXT, "temperature": 0.0, "ignore_eos": True}),
    (GENERATE, {"prompts": ["a", TEXT, ""], "grammar": {"type": "choice", "value": ["x", "y"]}}),
    (GENERATE, {"inputs": TEXT, "parameters": {"max_new_tokens": 3, "details": True}, "options": {"wait": True}}),
    (TOKENIZE, {"prompt": TEXT, "return_token_strs": True}),
    (TOKENIZE, {"inputs": TEXT}),
    ([DetokenizeRequest], {"tokens": list(range(100_000)), "skip_special_tokens": True}),
]


@pytest.mark.parametrize(("kinds", "body"), VALID)
async def test_large_body_decodes_as_a_small_one_does(kinds: Kinds, body: dict[str, Any]) -> None:
    text = encoded(body, kinds)
    packed = decoded_here(text, kinds, MAX_TOKENS)
    assert isinstance(packed, PackedBody)
    wanted, conversation = await unpack(packed)
    expected = decode_kind(text, choose_kind(text, kinds))
    if isinstance(wanted, DetokenizeRequest):  # this and completions have token ids, as arrays if the body was large
        wanted.tokens = list(wanted.tokens)
    elif isinstance(wanted, CompletionRequest):
        of_prompts = zip(wanted.to_generation_request().prompts, expected.to_generation_request().prompts, strict=True)
        assert all(large == replace(small, content=as_array(small.content)) for large, small in of_prompts)
        wanted.prompt = expected.prompt
    assert wanted == expected and conversation is None


async def test_large_chat_has_the_conversation_that_a_small_one_has() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": TEXT}], "name": "f"},
        *({"role": "user", "content": f"{number}" * 20} for number in range(5000)),
    ]
    text = encoded({"messages": messages, "logprobs": True, "chat_template_kwargs": {"a": [1]}}, CHAT)
    packed = decoded_here(text, CHAT, MAX_TOKENS)
    assert isinstance(packed, PackedBody)
    wanted, conversation = await unpack(packed)
    expected = decode_kind(text, ChatCompletionRequest)
    assert conversation == expected.conversation()
    assert wanted.chat_template_kwargs == {"a": [1]} and wanted.logprobs


@pytest.mark.parametrize(
    ("kinds", "body"),
    [
        (OLLAMA_CHAT, {"messages": [{"role": "user", "content": TEXT}, {"role": "assistant", "thinking": "a"}]}),
        (OLLAMA_CHAT, {"options": {"seed": 3}}),
        (OLLAMA_GENERATE, {"prompt": TEXT, "system": TEXT, "suffix": TEXT, "options": {"stop": ["a"]}}),
        (OLLAMA_GENERATE, {"raw": True}),
    ],
)
async def test_ollamas_large_bodies_have_the_conversation_that_small_ones_have(
    kinds: Kinds, body: dict[str, Any]
) -> None:
    text = encoded({"model": "m", **body}, kinds)
    packed = decoded_here(text, kinds, MAX_TOKENS)
    assert isinstance(packed, PackedBody) and len(packed.short) < MAX_INLINE_BYTES
    wanted, conversation = await unpack(packed)
    expected = decode_kind(text, kinds[0])
    assert conversation == expected.conversation()
    expected.drop_conversation()
    assert wanted == expected


async def test_a_large_body_of_anthropics_is_the_chat_of_a_small_one() -> None:
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": [{"type": "text", "text": TEXT}]}]
    text = encoded({"messages": messages, "system": TEXT, "max_tokens": 5, "tools": [{"name": "look"}]}, ANTHROPIC)
    packed = decoded_here(text, ANTHROPIC, MAX_TOKENS)
    assert isinstance(packed, PackedBody) and len(packed.short) < 2000
    wanted, conversation = await unpack(packed)
    expected = decode_kind(text, MessagesRequest)
    assert conversation == expected.conversation() and len(conversation) == 3
    assert wanted.to_chat() == expected.to_chat() and wanted.to_chat().continue_final_message


async def test_a_large_response_is_the_chat_of_a_small_one() -> None:
    for asked in (TEXT, [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]):
        text = encoded({"input": asked, "instructions": TEXT, "metadata": {"a": "b"}}, RESPONSES)
        packed = decoded_here(text, RESPONSES, MAX_TOKENS)
        assert isinstance(packed, PackedBody) and len(packed.short) < 2000
        wanted, conversation = await unpack(packed)
        expected = decode_kind(text, ResponsesRequest)
        assert conversation == expected.conversation() and wanted.to_chat() == expected.to_chat()
        assert wanted.metadata == {"a": "b"}


@pytest.mark.parametrize(
    ("kinds", "body"),
    [
        (EMBEDDINGS, {"input": TEXT}),
        (EMBEDDINGS, {"input": ["a", TEXT]}),
        (EMBEDDINGS, {"input": list(range(100_000))}),
        (EMBEDDINGS, {"input": [[1, 2, 3], [4], list(range(50_000))], "dimensions": 3}),
        ([TeiEmbedRequest], {"inputs": [TEXT, ""], "truncate": True}),
        ([OllamaEmbedRequest], {"model": "m", "input": TEXT}),
        (RERANK, {"query": TEXT, "documents": ["a", {"text": TEXT}], "top_n": 1}),
        (RERANK, {"query": "a", "texts": [TEXT]}),
        ([ScoreRequest], {"text_1": TEXT, "text_2": ["a", TEXT]}),
        (PREDICT, {"input": [TEXT, "b"]}),
        (PREDICT, {"image": "aGk="}),
        (PREDICT, {"image": ["aGk=", "", "\u00e4\u6f22" * 30_000, "aGk="]}),
        (PREDICT, {"image": ["aGk="] * 5_000}),
    ],
)
async def test_large_inputs_of_a_prediction_are_those_of_a_small_body(kinds: Kinds, body: dict[str, Any]) -> None:
    text = encoded(body, kinds)
    packed = decoded_here(text, kinds, MAX_TOKENS)
    assert isinstance(packed, PackedBody)
    wanted, conversation = await unpack(packed)
    found, expected = wanted.to_prediction_request(), decode_kind(text, kinds[0]).to_prediction_request()
    assert conversation is None
    assert [list(each) if isinstance(each, array) else each for each in found.inputs] == expected.inputs
    assert replace(found, inputs=[]) == replace(expected, inputs=[])


@pytest.mark.parametrize("outputs", [[], [TENSOR, {**TENSOR, "name": "b", "data": list(range(50_000))}]])
async def test_a_large_answer_of_tensors_decodes_as_a_small_one_does(outputs: list[dict[str, Any]]) -> None:
    text = encoded({"outputs": outputs}, [InferAnswer])
    packed = decoded_here(text, [InferAnswer], 0)
    assert isinstance(packed, PackedBody)
    wanted, _ = await unpack(packed)
    assert wanted == decode_kind(text, InferAnswer) and len(wanted.outputs) == len(outputs)


def test_of_the_token_ids_of_an_input_only_so_many_are_sent_that_the_engine_sees_there_are_too_many() -> None:
    for given in ([5] * 100_000, [[5] * 100_000, [6]]):
        packed = decoded_here(encoded({"input": given}, EMBEDDINGS), EMBEDDINGS, 1000)
        assert isinstance(packed, PackedBody)
        sent = asyncio.run(unpack(packed))[0].input
        assert sent == (array("i", [5] * 1001) if given[0] == 5 else [array("i", [5] * 1001), array("i", [6])])


INVALID: list[tuple[Kinds, dict[str, Any]]] = [
    (COMPLETION, {"prompt": [[1]] * 100_000}),
    (COMPLETION, {"prompt": ["a", 1]}),
    (COMPLETION, {"prompt": []}),
    (COMPLETION, {"prompt": "a", "stop": ["a"] * 100_000}),
    (COMPLETION, {"prompt": "a", "temperature": "hot"}),
    (COMPLETION, {"prompt": "a", "x": json.loads("[" * 100 + "]" * 100)}),
    (CHAT, {"messages": [{"role": "u"}] * (MAX_MESSAGES + 1)}),
    (CHAT, {"messages": [{"role": "u"}], "tools": [[]] * 10_000}),
    (CHAT, {"messages": [{"role": "u", "content": [{"type": "image_url"}]}]}),
    (OLLAMA_CHAT, {"model": "m", "messages": [{"role": "u", "images": [""]}]}),
    (OLLAMA_GENERATE, {"model": "m", "prompt": TEXT, "template": "x"}),
    (GENERATE, {"prompts": [""] * 100_000}),
    (GENERATE, {"prompt": "a", "promt": "b"}),
    (GENERATE, {"inputs": ["a"] * 100_000}),
    (TOKENIZE, {"inputs": [1]}),
    ([DetokenizeRequest], {"tokens": [-1]}),
    (EMBEDDINGS, {"input": ["a", 1]}),
    (EMBEDDINGS, {"input": [1, "a"]}),
    (EMBEDDINGS, {"input": [1, [1]]}),
    (EMBEDDINGS, {"input": [[1], "a"]}),
    (EMBEDDINGS, {"input": [[1], []]}),
    (EMBEDDINGS, {"input": []}),
    (EMBEDDINGS, {"input": [[1]] * 100_000}),
    ([TeiEmbedRequest], {"inputs": ["a"] * 100_000}),
    ([OllamaEmbedRequest], {"model": "m", "input": []}),
    (RERANK, {"query": "a", "documents": [{"text": "b"}] * 100_000}),
    (RERANK, {"query": "a", "texts": []}),
    ([ScoreRequest], {"text_1": ["a", "b"], "text_2": ["c"]}),
    (PREDICT, {"input": ["a"], "image": ["b"]}),
    (PREDICT, {"image": ["b"] * 100_000}),
    (PREDICT, {"tensors": [TENSOR], "image": ["b"]}),
    (PREDICT, {"tensors": [TENSOR], "input": ["a"] * 100_000}),
]


@pytest.mark.parametrize(("kinds", "body"), INVALID)
async def test_large_body_is_refused_as_a_small_one_is(kinds: Kinds, body: dict[str, Any]) -> None:
    text = encoded(body, kinds)
    try:
        wanted = decode_kind(text, choose_kind(text, kinds))
        if isinstance(wanted, PredictionFields):
            wanted.check()
        elif isinstance(wanted, ChatBody):
            wanted.check()
            wanted.conversation()
        else:
            wanted.to_generation_request()
        raise AssertionError("the body is valid")
    except RequestError as error:
        expected = error
    refusal = decoded_here(text, kinds, MAX_TOKENS)
    assert isinstance(refusal, Refusal)
    assert KINDS[refusal.kind] is choose_kind(text, kinds), "errors are written in the format of the body"
    actual = error_of(refusal)
    assert type(actual) is type(expected)
    assert (actual.message, actual.param, actual.answer_code) == (
        expected.message,
        expected.param,
        expected.answer_code,
    )


def refused(body: dict[str, Any], kinds: Kinds, max_tokens: int = MAX_TOKENS) -> str:
    refusal = decoded_here(encoded(body, kinds), kinds, max_tokens)
    assert isinstance(refusal, Refusal)
    return f"{refusal.code}: {refusal.message}"


async def test_what_the_event_loop_would_decode_in_one_piece_is_bounded() -> None:
    schema = {f"{number}": 1 for number in range(100_000)}
    message = refused({"prompt": "a", "guided_json": schema}, COMPLETION)
    assert "besides prompt" in message and str(MAX_SHORT_BYTES) in message
    message = refused({"messages": [{"role": "u", "tool_calls": [{}] * 100_000}]}, CHAT)
    assert "messages[0]" in message and str(MAX_MESSAGE_BYTES) in message


def test_integers_that_no_message_to_the_template_can_have_are_refused() -> None:
    message = refused({"messages": [{"role": "u", "content": TEXT, "tool_calls": [{"x": 10**30}]}]}, CHAT)
    assert "64 bits" in message


async def test_token_ids_beyond_the_context_are_refused_before_the_event_loop_sees_them() -> None:
    for prompt, param in ((list(range(30_000)), "prompt"), ([[1], list(range(30_000))], "prompt[1]")):
        refusal = decoded_here(encoded({"prompt": prompt}, COMPLETION), COMPLETION, 1000)
        assert isinstance(refusal, Refusal) and refusal.param == param
        assert refusal.code == "context_length_exceeded" and "30000" in refusal.message and "1000" in refusal.message
    packed = decoded_here(
        encoded({"prompt": list(range(30_000)), "truncate_prompt_tokens": 3}, COMPLETION), COMPLETION, 1000
    )
    assert isinstance(packed, PackedBody)
    assert (await unpack(packed))[0].prompt == array("i", [29_997, 29_998, 29_999])


async def test_loop_runs_between_the_slices_of_a_large_prompt() -> None:
    packed = decoded_here(encoded({"prompt": "ü" * 2**20}, COMPLETION), COMPLETION, MAX_TOKENS)
    assert isinstance(packed, PackedBody)
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    wanted, _ = await unpack(packed)
    counting.cancel()
    assert wanted.prompt == "ü" * 2**20 and num_turns >= 2**21 // 2**16


async def test_body_that_takes_too_much_memory_is_refused_as_the_clients_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(body: bytes, kind: type[Struct]) -> None:
        raise MemoryError

    monkeypatch.setattr(packed_body, "decode_kind", fail)
    message = refused({"prompt": "a"}, COMPLETION)
    assert "takes more memory than a body may take" in message
