"""Tests of request bodies: strict, bounded, and every refusal names its field."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts import tables as documented
from servekit.api.schemas import openai, tgi
from servekit.api.schemas.anthropic import CountTokensRequest, MessagesRequest
from servekit.api.schemas.json_body import MAX_JSON_DEPTH, decode, decode_query, encode, is_shallow, is_tgi_body
from servekit.api.schemas.native import AbortRequest, GenerateRequest
from servekit.api.schemas.ollama import OllamaGenerateRequest, OllamaOptions
from servekit.api.schemas.openai import ChatCompletionRequest, CompletionRequest
from servekit.api.schemas.packed_body import ChatBody
from servekit.api.schemas.responses_api import ResponsesRequest
from servekit.api.schemas.tgi import TgiParameters, TgiRequest, tgi_param
from servekit.api.schemas.tokens import DetokenizeRequest, TgiTokenizeRequest, TokenizeRequest
from servekit.errors import InvalidRequest
from servekit.requests.generation import GenerationRequest, Grammar, GrammarKind, Prompt
from servekit.scheduler.sequence import FinishReason

Json = dict[str, Any]


def read(body: bytes) -> GenerationRequest:
    return decode(body, GenerateRequest).to_generation_request()


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b'{"prompt": NaN}', "invalid_json", None),
        (b"[" * 100_000, "invalid_value", None),
        (b'{"logit_bias": {"1": 1}, "seed": 1e400, "prompt": "a"}', "invalid_value", "seed"),
        (b'{"prompt": "\xff"}', "invalid_json", None),
        (b'{"prompt": ' + b"[" * 100_000, "invalid_value", "prompt"),
        (b'{"x": ' + b"[" * 100_000, "unknown_field", "x"),
        (b"[]", "invalid_value", None),
        (b"{}", "invalid_value", "prompt"),
        (b'{"prompt": "a", "prompts": ["b"]}', "invalid_value", "prompt"),
        (b'{"prompt": 3}', "invalid_value", "prompt"),
        (b'{"prompts": []}', "invalid_value", "prompts"),
        (b'{"prompts": ["a", 1]}', "invalid_value", "prompts[1]"),
        (b'{"prompt": "a", "temprature": 1}', "unknown_field", "temprature"),
        (b'{"prompt": "a", "temperature": "hot"}', "invalid_value", "temperature"),
        (b'{"prompt": "a", "temperature": -0.1}', "invalid_value", "temperature"),
        (b'{"prompt": "a", "temperature": 1e400}', "invalid_value", "temperature"),
        (b'{"prompt": "a", "max_tokens": 0}', "invalid_value", "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 99999999999999999999999}', "invalid_value", "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 1.5}', "invalid_value", "max_tokens"),
        (b'{"prompt": "a", "max_tokens": true}', "invalid_value", "max_tokens"),
        (b'{"prompt": "a", "top_p": 0}', "invalid_value", "top_p"),
        (b'{"prompt": "a", "top_p": 1.01}', "invalid_value", "top_p"),
        (b'{"prompt": "a", "top_k": -2}', "invalid_value", "top_k"),
        (b'{"prompt": "a", "seed": 9223372036854775808}', "invalid_value", "seed"),
        (b'{"prompt": "a", "stop": ""}', "invalid_value", "stop"),
        (b'{"prompt": "a", "stop": [1]}', "invalid_value", "stop[0]"),
        (b'{"prompt": "a", "stop": ' + str(["x"] * 17).replace("'", '"').encode() + b"}", "invalid_value", "stop"),
        (b'{"prompt": "a", "ignore_eos": 1}', "invalid_value", "ignore_eos"),
    ],
)
def test_bad_body_is_refused_by_field(body: bytes, code: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read(body)
    assert (refusal.value.answer_code, refusal.value.param) == (code, param)
    assert refusal.value.status == 400


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH, MAX_JSON_DEPTH + 1, 990, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (CompletionRequest, b'{"prompt": "a", "unknown": ', b"}"),
        (ChatCompletionRequest, b'{"messages": [{"role": "a"}], "chat_template_kwargs": {"a": ', b"}}"),
        (GenerateRequest, b'{"prompt": "a", "grammar": {"type": "json", "value": {"a": ', b"}}}"),
        (TgiRequest, b'{"inputs": "a", "options": {"a": ', b"}}"),
    ],
)
def test_body_is_nested_at_most_64_levels(
    depth: int, opening: bytes, closing: bytes, kind: Any, before: bytes, after: bytes
) -> None:
    within = depth - after.count(b"}")
    body = before + opening * within + b"0" + closing * within + after
    if depth <= MAX_JSON_DEPTH:
        decode(body, kind)
        return
    with pytest.raises(InvalidRequest, match="nested too deeply; the limit is 64 levels") as refusal:
        decode(body, kind)
    assert refusal.value.answer_code == "invalid_json"


@pytest.mark.parametrize("text", ["[" * 100, "\\" * 99 + "[{" * 99, '"' * 3 + "]" * 200, '\\"[' * 100, "[\u001f\\"])
def test_brackets_in_texts_do_not_count_as_levels(text: str) -> None:
    assert is_shallow(encode({text: [text] * 100}))
    value: Any = text
    for _ in range(MAX_JSON_DEPTH):
        value = {text: value}
    assert is_shallow(encode(value)) and not is_shallow(encode([value]))


def test_prompts_are_named_as_the_client_names_them() -> None:
    one, many = read(b'{"prompt": "a", "n": 3}'), read(b'{"prompts": ["a", "b"]}')
    assert [(prompt.content, prompt.param) for prompt in one.prompts] == [("a", "prompt")]
    assert [(prompt.content, prompt.param) for prompt in many.prompts] == [("a", "prompts[0]"), ("b", "prompts[1]")]
    assert (one.num_sequences, many.num_sequences) == (3, 2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "a", "priority": 2000}', "priority = 2000: expected int <= 1000"),
        (b'{"prompt": "a", "ttft_ms": "soon"}', "ttft_ms = 'soon': expected int, got str"),
        (b'{"prompt": "a", "seed": "' + b"x" * 100 + b'"}', "seed: expected int, got str"),
        (b'{"prompts": ["a", 1]}', "prompts[1]: expected str, got int"),
        (b"[]", "the request body: expected object, got array"),
    ],
)
def test_error_has_the_value_and_what_is_expected(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert caught.value.message == message


# -- every field of every api arrives ---------------------------------------------------------------------------------


class Api(NamedTuple):
    """One wire format: a minimal body, and for each field a value and what it changes."""

    kind: Any
    minimum: Json
    fields: dict[str, tuple[Json, Json]]
    refused: tuple[str, ...] = ()  # fields that are known in order to be refused
    inner: str = ""  # the field of the body, of type `outer`, in which the fields stand
    outer: Any = None


SAMPLING: Json = {
    "temperature": 0.3,
    "top_k": 7,
    "top_p": 0.4,
    "min_p": 0.1,
    "typical_p": 0.6,
    "repetition_penalty": 1.2,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.7,
    "logit_bias": {"5": -2.5, "6": 1},
    "allowed_token_ids": [4, 5],
    "bad_words": ["bad", "worse"],
    "min_tokens": 2,
    "seed": -9,
    "stop": ["x", "y"],
    "stop_token_ids": [8],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
}
TIMING: Json = {"priority": -3, "ttft_ms": 50, "deadline_ms": 70, "stream_interval": 4, "max_drafts": 0}
COMMON: dict[str, tuple[Json, Json]] = {
    **{name: ({name: value}, {f"sampling.{name}": value}) for name, value in SAMPLING.items()},
    "logit_bias": ({"logit_bias": {"5": -2.5, "6": 1}}, {"sampling.logit_bias": {5: -2.5, 6: 1.0}}),
    **{name: ({name: value}, {name: value}) for name, value in TIMING.items()},
}
REGEX = {"type": "regex", "value": "a+"}
OPENAI: dict[str, tuple[Json, Json]] = {
    **COMMON,
    "model": ({"model": "m"}, {}),
    "n": ({"n": 3}, {"n": 3, "best_of": 3}),
    "stream": ({"stream": True}, {}),
    "stream_options": ({"stream": True, "stream_options": {"include_usage": True}}, {}),
    "prompt_logprobs": ({"prompt_logprobs": 3}, {"prompt_logprobs": 3}),
    "return_token_ids": ({"return_token_ids": True}, {"returns_token_ids": True}),
    "explain": ({"explain": True}, {"explain": True}),
    "return_tokens_as_token_ids": ({"return_tokens_as_token_ids": True}, {}),
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 9}, {"truncate": 9}),
    "truncation_side": ({"truncation_side": "left"}, {}),
    "response_format": (
        {"response_format": {"type": "json_object"}},
        {"grammar": Grammar(GrammarKind.JSON, "", "response_format")},
    ),
    "structured_outputs": (
        {"structured_outputs": {"regex": "a+"}},
        {"grammar": Grammar(GrammarKind.REGEX, "a+", "structured_outputs.regex")},
    ),
    "prediction": (
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}},
        {"prediction": "ab"},
    ),
    "guided_json": ({"guided_json": {}}, {"grammar": Grammar(GrammarKind.JSON_SCHEMA, "{}", "guided_json")}),
    "guided_regex": ({"guided_regex": "a"}, {"grammar": Grammar(GrammarKind.REGEX, "a", "guided_regex")}),
    "guided_choice": ({"guided_choice": ["a"]}, {"grammar": Grammar(GrammarKind.CHOICE, '["a"]', "guided_choice")}),
    "guided_grammar": ({"guided_grammar": "a"}, {"grammar": Grammar(GrammarKind.EBNF, "a", "guided_grammar")}),
}
TOOL: Json = {"type": "function", "function": {"name": "look"}}
REFUSED_BY_OPENAIS = (
    *("use_beam_search", "prompt_embeds", "logits_processors", "logprob_token_ids", "repetition_detection"),
)
OUTPUT_FORMAT: Json = {"type": "json_schema", "schema": {"type": "object"}}
MATCHES: Json = {"grammar": Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}', "response_format.json_schema.schema")}
CHAT_OF_ANTHROPIC: dict[str, tuple[Json, Json]] = {
    "messages": ({"messages": [{"role": "assistant", "content": []}]}, {}),
    "model": ({"model": "m"}, {}),
    "system": ({"system": "s"}, {}),
    "tools": ({"tools": [{"name": "look"}]}, {}),
    "tool_choice": ({"tools": [{"name": "look"}], "tool_choice": {"type": "any"}}, {}),
    "thinking": ({"thinking": {"type": "enabled", "budget_tokens": 5}}, {}),
    "output_config": ({"output_config": {"effort": "low", "format": OUTPUT_FORMAT}}, MATCHES),
    "output_format": ({"output_format": OUTPUT_FORMAT}, MATCHES),
    "chat_template_kwargs": ({"chat_template_kwargs": {"x": 1}}, {}),
}
APIS = {
    "`/generate`": Api(
        GenerateRequest,
        {"prompt": "a"},
        {
            **COMMON,
            "prompt": ({"prompt": "b"}, {"prompts": [Prompt("b", "prompt")]}),
            "max_tokens": ({"max_tokens": 5}, {"max_tokens": 5}),
            "max_new_tokens": ({"max_new_tokens": 5}, {"max_tokens": 5}),
            "n": ({"n": 3}, {"n": 3, "best_of": 3}),
            "best_of": ({"best_of": 4}, {"best_of": 4}),
            "logprobs": ({"logprobs": 2}, {"logprobs": 2}),
            "prompt_logprobs": ({"prompt_logprobs": 3}, {"prompt_logprobs": 3}),
            "grammar": ({"grammar": REGEX}, {"grammar": Grammar(GrammarKind.REGEX, "a+", "grammar")}),
            "stream": ({"stream": True}, {}),
            "model": ({"model": "m"}, {}),
            "explain": ({"explain": True}, {"explain": True}),
            "adapter_id": ({"adapter_id": "a"}, {}),
        },
        refused=("prompts",),  # beside `prompt`
    ),
    "TGI's `parameters`": Api(
        TgiParameters,
        {"inputs": "a"},
        {
            **COMMON,
            "max_new_tokens": ({"max_new_tokens": 5}, {"max_tokens": 5}),
            "do_sample": ({"do_sample": False}, {"sampling.do_sample": False}),
            "best_of": ({"best_of": 4}, {"best_of": 4}),
            "details": ({"details": True}, {"logprobs": 0}),
            "decoder_input_details": (
                {"details": True, "decoder_input_details": True},
                {"prompt_logprobs": 0, "logprobs": 0},
            ),
            "top_n_tokens": ({"top_n_tokens": 2}, {"logprobs": 2}),
            "return_full_text": ({"return_full_text": True}, {}),
            "truncate": ({"truncate": 9}, {"truncate": 9}),
            "grammar": ({"grammar": REGEX}, {"grammar": Grammar(GrammarKind.REGEX, "a+", "parameters.grammar")}),
            "adapter_id": ({"adapter_id": "a"}, {}),
        },
        refused=("watermark",),
        inner="parameters",
        outer=TgiRequest,
    ),
    "Ollama's `options`": Api(
        OllamaOptions,
        {"model": "m", "prompt": "a"},
        {
            **COMMON,
            "num_predict": ({"num_predict": 5}, {"max_tokens": 5}),
            "repeat_penalty": ({"repeat_penalty": 1.4}, {"sampling.repetition_penalty": 1.4}),
            "num_ctx": ({"num_ctx": 4096}, {}),
            "tool_choice": ({"tool_choice": "none"}, {}),
        },
        refused=("mirostat",),
        inner="options",
        outer=OllamaGenerateRequest,
    ),
    "Ollama": Api(
        OllamaGenerateRequest,
        {"model": "m", "prompt": "a"},
        {
            "model": ({"model": "n"}, {}),
            "prompt": ({"prompt": "b"}, {"prompts": [Prompt("b", "prompt")]}),
            "suffix": ({"suffix": "b"}, {"suffix": "b"}),
            "system": ({"system": "b"}, {}),  # what it says is rendered elsewhere
            "options": ({"options": {"seed": 1}}, {"sampling.seed": 1}),
            "format": ({"format": "json"}, {"grammar": Grammar(GrammarKind.JSON, "", "format")}),
            "think": ({"think": "low"}, {}),
            "stream": ({"stream": False}, {}),
            "raw": ({"raw": True}, {}),
            "logprobs": ({"logprobs": True}, {"logprobs": 0}),
            "top_logprobs": ({"top_logprobs": 2}, {"logprobs": 2}),
            "keep_alive": ({"keep_alive": "5m"}, {}),
        },
        refused=("images", "template", "context"),
    ),
    "TGI": Api(
        TgiRequest,
        {"inputs": "a"},
        {
            "inputs": ({"inputs": "b"}, {"prompts": [Prompt("b", "inputs")]}),
            "parameters": ({"parameters": {"seed": 1}}, {"sampling.seed": 1}),
            "stream": ({"stream": True}, {}),
            "model": ({"model": "m"}, {}),
            "options": ({"options": {"use_cache": False}}, {}),
        },
    ),
    "`/v1/completions`": Api(
        CompletionRequest,
        {"prompt": "a"},
        {
            **OPENAI,
            "prompt": ({"prompt": [1, 2]}, {"prompts": [Prompt([1, 2], "prompt")]}),
            "max_tokens": ({"max_tokens": 5}, {"max_tokens": 5}),
            "best_of": ({"best_of": 4}, {"best_of": 4}),
            "logprobs": ({"logprobs": 2}, {"logprobs": 2}),
            "echo": ({"echo": True, "logprobs": 2}, {"logprobs": 2, "prompt_logprobs": 2}),
            "add_special_tokens": ({"add_special_tokens": False}, {"prompts": [Prompt("a", "prompt", False)]}),
            "suffix": ({"suffix": "b"}, {"suffix": "b"}),
        },
        refused=REFUSED_BY_OPENAIS,
    ),
    "`/v1/chat/completions`": Api(
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": "a"}]},
        {
            **OPENAI,
            "messages": ({"messages": [{"role": "user"}]}, {}),  # what they say is rendered elsewhere
            "max_completion_tokens": ({"max_completion_tokens": 5, "max_tokens": 6}, {"max_tokens": 5}),
            "max_tokens": ({"max_tokens": 6}, {"max_tokens": 6}),
            "logprobs": ({"logprobs": True}, {"logprobs": 0}),
            "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
            "add_generation_prompt": ({"add_generation_prompt": False}, {}),
            "continue_final_message": ({"continue_final_message": True}, {}),
            "chat_template": ({"chat_template": "x"}, {}),
            "chat_template_kwargs": ({"chat_template_kwargs": {"x": 1}}, {}),
            "modalities": ({"modalities": ["text"]}, {}),
            # What these change is decided with the model's format, which a body does not know.
            "tools": ({"tools": [TOOL]}, {}),
            "tool_choice": ({"tools": [TOOL], "tool_choice": "required"}, {}),
            "parallel_tool_calls": ({"parallel_tool_calls": False}, {}),
            "reasoning_effort": ({"reasoning_effort": "low"}, {}),
            "thinking_token_budget": ({"thinking_token_budget": 5}, {}),
            "thinking_budget": ({"thinking_budget": 5}, {}),
            "include_reasoning": ({"include_reasoning": False}, {}),
        },
        refused=("functions", "function_call", "echo", "documents", "web_search_options", *REFUSED_BY_OPENAIS),
    ),
    "`/v1/responses`": Api(
        ResponsesRequest,
        {"input": "a"},
        {
            **COMMON,
            "input": ({"input": [{"role": "user"}]}, {}),
            "model": ({"model": "m"}, {}),
            "instructions": ({"instructions": "s"}, {}),
            "max_output_tokens": ({"max_output_tokens": 5}, {"max_tokens": 5}),
            "stream": ({"stream": True}, {}),
            "text": ({"text": {"format": OUTPUT_FORMAT}}, MATCHES),
            "tools": ({"tools": [{"type": "function", "name": "look"}]}, {}),
            "tool_choice": ({"tools": [{"type": "function", "name": "look"}], "tool_choice": "required"}, {}),
            "parallel_tool_calls": ({"parallel_tool_calls": False}, {}),
            "reasoning": ({"reasoning": {"effort": "low"}}, {}),
            "thinking_token_budget": ({"thinking_token_budget": 5}, {}),
            "chat_template_kwargs": ({"chat_template_kwargs": {"x": 1}}, {}),
            "metadata": ({"metadata": {"a": "b"}}, {}),
            "store": ({"store": True}, {}),
            "truncation": ({"truncation": "disabled"}, {}),
        },
        refused=("top_logprobs", "previous_response_id", "conversation", "background", "prompt"),
    ),
    "`/v1/messages`": Api(
        MessagesRequest,
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
        {
            **COMMON,
            **CHAT_OF_ANTHROPIC,
            "max_tokens": ({"max_tokens": 6}, {"max_tokens": 6}),
            "stream": ({"stream": True}, {}),
            "stop_sequences": ({"stop_sequences": ["x"]}, {"sampling.stop": ["x"]}),
        },
        refused=("mcp_servers", "container"),
    ),
    "`/v1/messages/count_tokens`": Api(
        CountTokensRequest,
        {"messages": [{"role": "user", "content": "a"}]},
        {**COMMON, **CHAT_OF_ANTHROPIC},
        refused=("mcp_servers", "container"),
    ),
}
EVERY_FIELD = [(api, name) for api, case in APIS.items() for name in case.fields]


def ask(api: str, body: bytes) -> GenerationRequest:
    """Convert a body as the API's handler does, but without rendering its conversation."""
    asked: Any = decode(body, APIS[api].outer or APIS[api].kind)
    if isinstance(asked, OllamaGenerateRequest):
        asked.check()
        return asked.to_generation_request(asked.conversation()[-1]["content"])
    if isinstance(asked, ChatBody):
        asked.check()
        asked.conversation()
    if isinstance(asked, CountTokensRequest | ResponsesRequest):
        asked = asked.to_chat()
    request: GenerationRequest = (
        asked.to_generation_request("rendered")
        if isinstance(asked, ChatCompletionRequest)
        else asked.to_generation_request()
    )
    return request


def body_of(api: str, fields: Json) -> bytes:
    minimum = APIS[api].minimum
    return json.dumps({**minimum, APIS[api].inner: fields} if APIS[api].inner else {**minimum, **fields}).encode()


def wrapped(api: str, fields: bytes) -> bytes:
    """Put the fields into the body that they belong to."""
    case = APIS[api]
    if not case.inner:
        return fields
    return json.dumps(case.minimum).encode()[:-1] + b', "' + case.inner.encode() + b'": ' + fields + b"}"


def flat(request: GenerationRequest) -> Json:
    values = msgspec.structs.asdict(request)
    sampling = msgspec.structs.asdict(values.pop("sampling"))
    return values | {f"sampling.{name}": value for name, value in sampling.items()}


@pytest.mark.parametrize(("api", "name"), EVERY_FIELD)
def test_each_field_changes_its_own_meaning_only(api: str, name: str) -> None:
    fields, changes = APIS[api].fields[name]
    assert name in fields
    assert flat(ask(api, body_of(api, fields))) == flat(ask(api, body_of(api, {}))) | changes


@pytest.mark.parametrize("api", APIS)
def test_table_above_has_every_field_and_alias_of_the_docs(api: str) -> None:
    case = APIS[api]
    assert documented.APIS.keys() <= APIS.keys()
    assert {*case.fields, *case.refused} == {field.encode_name for field in msgspec.structs.fields(case.kind)}
    if api in documented.APIS:
        kind, aliases = documented.APIS[api]
        assert kind is case.kind
        for name, own in aliases.items():
            for other in APIS.values():
                # TGI's `details`, with which alone its `decoder_input_details` is case, brings logprobs along.
                assert name not in other.fields or case.fields[own][1].keys() <= {*other.fields[name][1], "logprobs"}


@pytest.mark.parametrize("api", APIS)
def test_null_means_absent(api: str) -> None:
    optional = [name for name in APIS[api].fields if name not in APIS[api].minimum]
    assert ask(api, body_of(api, dict.fromkeys(optional))) == ask(api, body_of(api, {}))
    refused = [name for name in APIS[api].refused if name != "prompts"]
    assert ask(api, body_of(api, dict.fromkeys(refused))) == ask(api, body_of(api, {}))


def test_null_prompt_is_refused() -> None:
    assert read(b'{"prompt": "a", "prompts": null}') == read(b'{"prompt": "a"}')
    assert read(b'{"prompts": ["a"], "prompt": null}') == read(b'{"prompts": ["a"]}')


@pytest.mark.parametrize("api", APIS)
def test_unknown_fields_are_refused_by_native_and_tgi_and_ignored_by_others(api: str) -> None:
    body = body_of(api, {"temprature": [1]})
    if api.startswith(("`/v1", "Ollama")):
        assert ask(api, body) == ask(api, body_of(api, {}))
    else:
        with pytest.raises(InvalidRequest, match="unknown field 'temprature'") as refusal:
            ask(api, body)
        param = "parameters.temprature" if APIS[api].inner else "temprature"
        assert (refusal.value.param, refusal.value.answer_code) == (param, "unknown_field")


@pytest.mark.parametrize(("api", "where"), [("`/generate`", "grammar"), ("TGI's `parameters`", "parameters.grammar")])
def test_unknown_inner_field_error_lists_the_known_fields(api: str, where: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ask(api, body_of(api, {"grammar": {**REGEX, "vaule": 1}}))
    assert (
        refusal.value.message == f"unknown field 'vaule' in {where}; did you mean 'value'? The fields are type, value"
    )
    assert (refusal.value.param, refusal.value.answer_code) == (f"{where}.vaule", "unknown_field")


# -- what no type can express ------------------------------------------------------------------------------------------

CHAT = "`/v1/chat/completions`"
PARAMETERS = "TGI's `parameters`"
OLLAMA = "Ollama"
COMPLETIONS = "`/v1/completions`"


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        ("`/generate`", {"n": 3, "best_of": 2}, "best_of"),
        ("`/generate`", {"max_tokens": 5, "max_new_tokens": 5}, "max_new_tokens"),
        ("`/generate`", {"stop": ["x"] * 17}, "stop"),
        (PARAMETERS, {"watermark": True}, "parameters.watermark"),
        (PARAMETERS, {"best_of": 0}, "parameters.best_of"),
        (PARAMETERS, {"grammar": {"type": "choice"}}, "parameters.grammar.value"),
        ("TGI", {"inputs": 3}, "inputs"),
        ("TGI", {"options": 3}, "options"),
        (COMPLETIONS, {"suffix": "b", "echo": True}, "suffix"),
        (OLLAMA, {"images": ["x"]}, "images"),
        (OLLAMA, {"template": "x"}, "template"),
        (OLLAMA, {"context": [1]}, "context"),
        (OLLAMA, {"raw": True, "system": "x"}, "system"),
        (OLLAMA, {"format": "xml"}, "format"),
        (OLLAMA, {"options": {"mirostat": 1}}, "options.mirostat"),
        (OLLAMA, {"options": {"num_predict": -3}}, "options.num_predict"),
        (COMPLETIONS, {"suffix": "b", "truncate_prompt_tokens": 5}, "suffix"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"stream_options": {}}, "stream_options"),
        (COMPLETIONS, {"stream": True, "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": [1, -1]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [[1], [2**31]]}, "prompt[1][0]"),
        (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            COMPLETIONS,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (COMPLETIONS, {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        (
            CHAT,
            {"structured_outputs": {"grammar": "start: A"}, "response_format": {"type": "json_object"}},
            "structured_outputs.grammar",
        ),
        (COMPLETIONS, {"truncation_side": "right"}, "truncation_side"),
        (COMPLETIONS, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (COMPLETIONS, {"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"documents": [{"text": "a"}]}, "documents"),
        (CHAT, {"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        (CHAT, {"tools": [{}]}, "tools[0].type"),
        (CHAT, {"tools": [TOOL, TOOL]}, "tools[1]"),
        (CHAT, {"tools": [TOOL] * 129}, "tools"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        (CHAT, {"top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}, {"role": ""}]}, "messages[1].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ],
)
def test_unsupported_request_is_refused_by_field(api: str, fields: Json, param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ask(api, body_of(api, fields))
    assert (refusal.value.param, refusal.value.answer_code) == (param, "invalid_value")
    assert param.split("[")[0].removeprefix("parameters.").split(".")[0] in refusal.value.message


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", [Prompt("a", "prompt")]),
        (["a", ""], [Prompt("a", "prompt[0]"), Prompt("", "prompt[1]")]),
        ([0, 2**31 - 1], [Prompt([0, 2**31 - 1], "prompt")]),
        ([[1], []], [Prompt([1], "prompt[0]"), Prompt([], "prompt[1]")]),
    ],
)
def test_a_completion_takes_texts_and_token_ids(prompt: Any, prompts: list[Prompt]) -> None:
    asked = ask(COMPLETIONS, body_of(COMPLETIONS, {"prompt": prompt, "n": 2}))
    assert asked.prompts == prompts
    assert asked.num_sequences == 2 * len(prompts)


def test_completion_defaults_to_16_tokens_and_allows_0_with_echo_only() -> None:
    assert ask(COMPLETIONS, body_of(COMPLETIONS, {})).max_tokens == 16
    assert ask(COMPLETIONS, body_of(COMPLETIONS, {"max_tokens": 0, "echo": True})).max_tokens == 1
    echoed = ask(COMPLETIONS, body_of(COMPLETIONS, {"echo": True, "logprobs": 1, "prompt_logprobs": 4}))
    assert (echoed.logprobs, echoed.prompt_logprobs) == (1, 4)


def test_best_of_computes_logprobs() -> None:
    for fields, wanted in (
        ({}, None),
        ({"n": 3}, None),
        ({"best_of": 2}, 0),
        ({"n": 2, "best_of": 2}, None),
        ({"best_of": 2, "logprobs": 5}, 5),
    ):
        assert ask("`/generate`", body_of("`/generate`", fields)).wanted_logprobs == wanted


def test_message_is_converted_for_templates() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "refusal", "text": "c"}]
    for message, taken in (
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a"}),
        ({"role": "tool", "content": None}, {"role": "tool", "content": ""}),
        ({"role": "user", "content": parts, "name": "Ann"}, {"role": "user", "content": "abc", "name": "Ann"}),
        ({"role": "user", "content": [], "unknown": 1}, {"role": "user", "content": ""}),
    ):
        assert msgspec.convert(message, openai.ChatMessage).for_template(0) == taken


def test_stream_options_choose_where_usage_is_sent() -> None:
    for options, at_the_end, always in (
        (None, False, False),
        ({}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"continuous_usage_stats": True}, False, False),
    ):
        asked = decode(body_of(COMPLETIONS, {"stream": True, "stream_options": options}), CompletionRequest)
        assert (asked.sends_usage, asked.sends_usage_always) == (at_the_end, always)


def test_single_answer_is_one_text() -> None:
    for fields, is_one in (({}, True), ({"best_of": 3}, True), ({"n": 1}, True), ({"n": 2}, False)):
        assert decode(body_of("`/generate`", fields), GenerateRequest).gives_one_text == is_one
    assert not decode(b'{"prompts": ["a"]}', GenerateRequest).gives_one_text


def test_each_api_has_its_own_finish_reasons() -> None:
    for reason, stop_reason, for_tgi, for_openai in (
        (FinishReason.STOP, None, "eos_token", ("stop", None)),
        (FinishReason.STOP, "end", "stop_sequence", ("stop", "end")),
        (FinishReason.STOP, 7, "stop_sequence", ("stop", 7)),
        (FinishReason.LENGTH, None, "length", ("length", None)),
        (FinishReason.DEADLINE, None, "deadline", ("abort", "deadline")),
    ):
        assert tgi.finish_reason(reason, stop_reason) == for_tgi
        assert openai.finish_reason(reason, stop_reason) == for_openai


# -- grammars ----------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"schema": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("said", "kind", "meant"),
    [
        ({"type": "json"}, GrammarKind.JSON, None),
        ({"type": "json", "value": None}, GrammarKind.JSON, None),
        ({"type": "json", "value": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"type": "json", "value": {}}, GrammarKind.JSON_SCHEMA, {}),
        ({"type": "json", "value": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"type": "json_schema", "value": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"type": "json_schema", "value": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"type": "json_schema", "value": {"schema": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA),
        (
            {"type": "json_schema", "value": {"schema": SCHEMA, "type": "object"}},
            GrammarKind.JSON_SCHEMA,
            {"schema": SCHEMA, "type": "object"},
        ),
        ({"type": "regex", "value": "[a-z]"}, GrammarKind.REGEX, "[a-z]"),
        ({"type": "regex", "value": ""}, GrammarKind.REGEX, ""),
        ({"type": "ebnf", "value": 'start: "a"'}, GrammarKind.EBNF, 'start: "a"'),
        ({"type": "choice", "value": ["a", 'é "b"']}, GrammarKind.CHOICE, ["a", 'é "b"']),
        ({"type": "json_schema"}, None, None),
        ({"type": "json", "value": ["a"]}, None, None),
        ({"type": "regex"}, None, None),
        ({"type": "regex", "value": {}}, None, None),
        ({"type": "ebnf", "value": ["a"]}, None, None),
        ({"type": "choice", "value": []}, None, None),
        ({"type": "choice", "value": "a"}, None, None),
    ],
)
def test_grammar_field_is_parsed_or_refused(said: Json, kind: GrammarKind | None, meant: Any) -> None:
    for api, param in (("`/generate`", "grammar"), (PARAMETERS, "parameters.grammar")):
        if kind is None:
            with pytest.raises(InvalidRequest, match=f"{said['type']}' needs") as refusal:
                ask(api, body_of(api, {"grammar": said}))
            assert refusal.value.param == f"{param}.value"
        else:
            grammar = ask(api, body_of(api, {"grammar": said})).grammar
            assert grammar is not None and (grammar.kind, grammar.param) == (kind, param)
            assert meaning(grammar) == meant


@pytest.mark.parametrize(
    ("fields", "kind", "meant", "param"),
    [
        ({"response_format": {"type": "text"}}, None, None, None),
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON, None, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            GrammarKind.JSON_SCHEMA,
            SCHEMA,
            "response_format.json_schema.schema",
        ),
        (  # huggingface_hub's
            {"response_format": {"type": "json_schema", "value": SCHEMA}},
            GrammarKind.JSON_SCHEMA,
            SCHEMA,
            "response_format.value",
        ),
        (
            {"response_format": {"type": "regex", "value": "a+"}},
            GrammarKind.REGEX,
            "a+",
            "response_format.value",
        ),
        ({"response_format": {"type": "json"}}, GrammarKind.JSON, None, "response_format"),
        (
            {"structured_outputs": {"json_object": True}},
            GrammarKind.JSON,
            None,
            "structured_outputs.json_object",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA, "structured_outputs.json"),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            GrammarKind.JSON_SCHEMA,
            SCHEMA,
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarKind.CHOICE, ["a"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: A"}}, GrammarKind.EBNF, "start: A", "structured_outputs.grammar"),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
            GrammarKind.REGEX,
            "a",
            "structured_outputs.regex",
        ),
    ],
)
def test_openais_and_vllms_grammar_fields_are_equivalent(
    fields: Json, kind: GrammarKind | None, meant: Any, param: str | None
) -> None:
    for api in (COMPLETIONS, CHAT):
        grammar = ask(api, body_of(api, fields)).grammar
        if kind is None:
            assert grammar is None
        else:
            assert grammar is not None and (grammar.kind, grammar.param) == (kind, param)
            assert meaning(grammar) == meant


@pytest.mark.parametrize("api", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("field", "values", "harmless"),
    [
        ("use_beam_search", [True], [False, None]),
        ("logits_processors", [["x"]], [[], None]),
        ("prompt_embeds", ["x"], ["", None]),
    ],
)
def test_unsupported_fields_are_refused_unless_empty(
    api: str, field: str, values: list[Any], harmless: list[Any]
) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as refusal:
            ask(api, body_of(api, {field: value}))
        assert refusal.value.param == field
    for value in harmless:
        assert ask(api, body_of(api, {field: value})) == ask(api, body_of(api, {}))


def test_fields_in_place_of_tools_are_refused_unless_empty() -> None:
    for fields in ({"functions": [{}]}, {"function_call": {"name": "a"}}, {"modalities": ["audio"]}):
        with pytest.raises(InvalidRequest) as refusal:
            ask(CHAT, body_of(CHAT, fields))
        assert refusal.value.param == next(iter(fields))
    harmless = (
        {"function_call": "none"},
        {"tools": []},
        {"tools": None},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"functions": None},
    )
    assert all(ask(CHAT, body_of(CHAT, fields)) == ask(CHAT, body_of(CHAT, {})) for fields in harmless)
    message = {"role": "tool", "content": "42", "tool_call_id": "1", "tool_calls": [{"id": "1"}]}
    assert decode(body_of(CHAT, {"messages": [message]}), ChatCompletionRequest).messages[0].for_template(0) == message


def test_empty_structured_outputs_are_refused() -> None:
    for asked in ({}, {"json_object": False}, {"regexp": "a"}):
        with pytest.raises(InvalidRequest) as refusal:
            ask(COMPLETIONS, body_of(COMPLETIONS, {"structured_outputs": asked}))
        assert (refusal.value.param or "").startswith("structured_outputs")
    with pytest.raises(InvalidRequest):
        ask(CHAT, body_of(CHAT, {"response_format": {"type": "regex"}}))


def test_errors_use_tgis_parameter_names() -> None:
    assert [tgi_param(param) for param in ("max_tokens", "logprobs", "stop", "inputs", "parameters.stop", None)] == [
        "parameters.max_new_tokens",
        "parameters.top_n_tokens",
        "parameters.stop",
        "inputs",
        "parameters.stop",
        None,
    ]


def test_missing_field_is_named_and_a_misspelt_one_gets_a_suggestion() -> None:
    for body, message in (
        (b'{"prompt": "a", "temprature": 1}', "unknown field 'temprature'; did you mean 'temperature'? The fields are"),
        (b'{"prompt": "a", "zzz": 1}', "unknown field 'zzz'; the fields are"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            read(body)
        assert refusal.value.message.startswith(message)
    with pytest.raises(InvalidRequest) as refusal:
        ask(CHAT, b'{"messages": [{"content": "a"}]}')
    assert (refusal.value.param, refusal.value.message) == (
        "messages[0].role",
        "messages[0].role is missing; it is required",
    )
    with pytest.raises(InvalidRequest) as refusal:
        ask(CHAT, b"{}")
    assert refusal.value.param == "messages"


def test_very_long_list_of_prompts_is_refused() -> None:
    for api, body in (
        ("`/generate`", b'{"prompts": [' + b'"a",' * 70_000 + b'"a"]}'),
        (COMPLETIONS, b'{"prompt": [' + b"[1]," * 70_000 + b"[1]]}"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            ask(api, body)
        assert refusal.value.param in ("prompts", "prompt")


def test_large_body_is_not_decoded_twice_for_an_error() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read(b'{"seed": "x", "prompt": "' + b"x" * 100_000 + b'"}')
    assert refusal.value.message == "seed: expected int, got str"


def test_empty_list_of_choices_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ask(COMPLETIONS, body_of(COMPLETIONS, {"structured_outputs": {"choice": []}}))
    assert refusal.value.param == "structured_outputs.choice"


def meaning(grammar: Grammar) -> Any:
    """Return a grammar's text, decoded if it is JSON."""
    if grammar.kind is GrammarKind.JSON:
        assert grammar.text == ""
        return None
    return grammar.text if grammar.kind in (GrammarKind.REGEX, GrammarKind.EBNF) else json.loads(grammar.text)


# -- query strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in APIS["`/generate`"].fields if name not in ("grammar", "logit_bias")])
def test_query_string_means_the_same_as_a_body(name: str) -> None:
    fields = {"prompt": "a", **APIS["`/generate`"].fields[name][0]}
    query = {
        key: [str(item) for item in value] if isinstance(value, list) else [str(value)] for key, value in fields.items()
    }
    assert decode_query(query, GenerateRequest) == decode(json.dumps(fields).encode(), GenerateRequest)


def test_single_list_item_in_a_query_string_is_a_list() -> None:
    query = {"prompts": ["a"], "stop": ["x"], "stop_token_ids": ["7"], "ignore_eos": ["1"], "stream": ["false"]}
    body = {"prompts": ["a"], "stop": ["x"], "stop_token_ids": [7], "ignore_eos": True, "stream": False}
    assert decode_query(query, GenerateRequest) == decode(json.dumps(body).encode(), GenerateRequest)


@pytest.mark.parametrize(
    ("query", "code", "param", "message"),
    [
        ({"prompt": ["a", "b"]}, "invalid_value", "prompt", "prompt = ['a', 'b']: expected str, got array"),
        ({"prompt": ["a"], "temperature": ["nan"]}, "invalid_value", "temperature", "= 'nan': expected float >= 0.0"),
        ({"prompt": ["a"], "temperature": ["inf"]}, "invalid_value", "temperature", "= 'inf': expected float <= 100.0"),
        ({"prompt": ["a"], "max_tokens": ["5.5"]}, "invalid_value", "max_tokens", "= '5.5': expected int"),
        ({"prompt": ["a"], "seed": ["9" * 5000]}, "invalid_value", "seed", "out of range"),
        ({"prompt": ["a"], "stop": [""]}, "invalid_value", "stop[0]", "stop[0]: expected str of length >= 1"),
        ({"prompt": ["a"], "logit_bias": ["[" * 60_000]}, "invalid_value", "logit_bias", "expected object"),
        ({"prompt": ["a"], "logit_bias": ["[]"]}, "invalid_value", "logit_bias", "expected object"),
        ({"prompt": ["a"], "grammar": ["json"]}, "invalid_value", "grammar", "expected object"),
        ({"prompt": ["a"], "tempo": ["1"]}, "unknown_field", "tempo", "unknown field 'tempo'; the fields are"),
    ],
)
def test_a_bad_query_is_refused_by_field(query: dict[str, list[str]], code: str, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        decode_query(query, GenerateRequest)
    assert (refusal.value.answer_code, refusal.value.param) == (code, param)
    assert message in refusal.value.message


# -- anything at all ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "is_tgis"),
    [
        (b'{"inputs": "a"}', True),
        (b'{"parameters": {}, "inputs": 3}', True),
        (b'{"prompt": "inputs"}', False),
        (b'{"parameters": {"inputs": "a"}}', False),
        (b"[]", False),
        (b"", False),
        (b'{"inputs": "a"', False),
        (b'{"inputs": "\xff"}', True),
        (b'{"\xff": "a"}', False),
        (b'{"a": ' + b"[" * 100_000, False),
    ],
)
def test_tgi_bodies_are_recognized_by_inputs(body: bytes, is_tgis: bool) -> None:
    assert is_tgi_body(body) is is_tgis


Text = st.text(st.characters(codec=None), max_size=8)  # with lone surrogates
Scalar = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([2**31, 2**63, 10**30, 10**4200]),
    st.floats(),
    Text,
    st.sampled_from(["unknown field", " - at `$.grammar`", "`", "x" * 5000]),
)
Value = st.recursive(Scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(Text, inner, max_size=3))
Deep = st.builds(
    lambda depth, opening: opening * depth, st.sampled_from([10, 900, 5000, 100_000]), st.sampled_from([b"[", b'{"a":'])
)


@st.composite
def bodies(draw: st.DrawFn, api: str) -> bytes:
    """Bodies with mostly the API's own fields and mostly wrong values. Keys may repeat, and bytes may be any."""
    case = APIS[api]
    names = (
        st.sampled_from([*case.fields, *case.refused])
        | Text
        | st.sampled_from(["x" * 5000, "inputs", "a - at `$.grammar"])
    )
    pairs = [(name, json.dumps(value).encode()) for name, value in case.minimum.items() if draw(st.booleans())]
    for name in draw(st.lists(names, max_size=5)):
        value = draw(Value | st.just(case.fields[name][0][name]) if name in case.fields else Value)
        if isinstance(value, dict):
            value = value | draw(st.dictionaries(Text | st.just("unknown field"), Value, max_size=1))
        pairs.append((name, draw(Deep) if draw(st.integers(0, 15)) == 0 else json.dumps(value).encode()))
    inner = b"{" + b", ".join(json.dumps(name).encode() + b": " + value for name, value in pairs) + b"}"
    body = wrapped(api, inner)
    if draw(st.integers(0, 3)) == 0:
        place = draw(st.integers(0, len(body)))
        body = body[:place] + draw(st.binary(max_size=3) | st.just(b"\xff")) + body[place + draw(st.integers(0, 3)) :]
    return body


def refusal_of(api: str, body: bytes) -> InvalidRequest | None:
    is_tgi_body(body)
    try:
        ask(api, body)
    except InvalidRequest as error:
        refusal = error
    else:
        return None
    assert len(refusal.message) <= 1000 and len(refusal.param or "") <= 300, refusal.message
    return refusal


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(list(APIS)))
def test_random_body_is_parsed_or_refused_with_a_short_message(data: st.DataObject, api: str) -> None:
    refusal_of(api, data.draw(bodies(api)))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40) | Value.map(lambda value: json.dumps(value).encode()))
def test_random_bytes_are_refused_by_every_schema(body: bytes) -> None:
    for kind in (TokenizeRequest, TgiTokenizeRequest, DetokenizeRequest):
        with suppress(InvalidRequest):
            decode(body, kind)
    for api in APIS:
        assert refusal_of(api, body) is not None


@pytest.mark.parametrize("api", ["`/generate`", PARAMETERS])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grammar", b'{"type": "unknown field"}'),
        ("grammar", b'{"type": "a - at `$.grammar`"}'),
        ("grammar", b'{"type": "' + b"x" * 5000 + b'"}'),
        ("grammar", b'{"type": "json", "value": {"a": "\xff"}}'),
        ("x" * 5000, b"1"),
        ("a - at `$.grammar", b"1"),
    ],
)
def test_client_text_in_errors_is_not_parsed_as_msgspecs(api: str, name: str, value: bytes) -> None:
    body = json.dumps({name: 0}).encode().replace(b"0}", value + b"}")
    refusal = refusal_of(
        api,
        wrapped(api, body) if APIS[api].inner else b'{"prompt": "a", ' + body[1:],
    )
    assert refusal is not None


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (COMPLETIONS, b'{"prompt": [' + b"9" * 4000 + b"]}"),
        (PARAMETERS, b'{"inputs": "a", "parameters": {"grammar": {"type": "' + b"x" * 5000 + b'"}}}'),
        (CHAT, b'{"messages": [{"role": "a", "content": [{"type": "' + b"x" * 5000 + b'"}]}]}'),
    ],
)
def test_error_does_not_repeat_long_values(api: str, body: bytes) -> None:
    assert refusal_of(api, body) is not None


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("`/generate`", b'{"max_tokens": "a", "prompt": "\xff"}'),
        (COMPLETIONS, b'{"prompt": "a", "structured_outputs": {"json": {"a": "\xff"}}}'),
        (
            CHAT,
            b'{"messages": [{"role": "a"}], "response_format":'
            b' {"type": "json_schema", "json_schema": {"schema": {"a": "\xff"}}}}',
        ),
        (CHAT, b'{"messages": [{"role": "a"}], "response_format": {"type": "json_schema", "value": {"a": "\xff"}}}'),
    ],
)
def test_invalid_utf8_is_refused_anywhere_in_the_body(api: str, body: bytes) -> None:
    assert refusal_of(api, body) is not None


@pytest.mark.parametrize("biases", [b'{"x": 1}', b'{"-1": 1}', b'{"1": 1, "01": 2}'])
def test_invalid_token_id_key_is_refused_by_field(biases: bytes) -> None:
    refusal = refusal_of("`/generate`", b'{"prompt": "a", "logit_bias": ' + biases + b"}")
    assert refusal is not None and refusal.param == "logit_bias"
    assert refusal.message.startswith("logit_bias") and "`" not in refusal.message


def test_last_of_duplicate_fields_counts() -> None:
    assert read(b'{"prompt": "a", "seed": 1, "seed": 2}').sampling.seed == 2


def test_answers_are_compact_json() -> None:
    assert encode({"a": ["é", None]}) == '{"a":["é",null]}'.encode()


@pytest.mark.parametrize(
    ("body", "task"),
    [
        (b'{"inputs": ["a", "b"]}', "feature_extraction"),
        (b'{"inputs": {"question": "who", "context": "he"}}', "question_answering"),
        (b'{"inputs": "a", "parameters": {"candidate_labels": ["b"]}}', "zero_shot_classification"),
        (b'{"inputs": "a", "parameters": {"max_new_tokens": 4}}', None),
        (b'{"inputs": "a"', None),
        (b"[1]", None),
    ],
)
def test_bodies_of_other_huggingface_tasks_are_recognized(body: bytes, task: str | None) -> None:
    assert tgi.other_task(body) == task


@pytest.mark.parametrize(
    ("body", "task"),
    [
        (b'{"inputs": {"context": "a", "question": "b"}}', "question_answering"),
        (b'{"inputs": "a", "parameters": {"candidate_labels": ["b"]}}', "zero_shot_classification"),
        (b'{"inputs": ["a"]}', "feature_extraction"),
    ],
)
def test_bodies_of_other_tasks_are_refused_by_the_name_of_the_task(body: bytes, task: str) -> None:
    with pytest.raises(InvalidRequest, match=f"for the task {task};"):
        tgi.decode_tgi(body)


def test_an_invalid_body_of_no_other_task_is_refused_for_what_is_wrong_with_it() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        tgi.decode_tgi(b'{"inputs": "a", "parameters": {"max_new_tokens": "four"}}')
    assert refusal.value.param == "parameters.max_new_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"rid": "a", "abort_all": True}, "abort_all"), ({"rid": "a", "request_id": "a"}, "request_id"), ({}, "rid")],
)
def test_one_request_is_aborted_by_one_of_two_names(fields: dict[str, Any], param: str) -> None:
    assert AbortRequest(rid="mine", abort_all=False).wanted_id() == "mine"
    assert AbortRequest(request_id="mine").wanted_id() == "mine"
    with pytest.raises(InvalidRequest) as raised:
        AbortRequest(**fields).wanted_id()
    assert raised.value.param == param
