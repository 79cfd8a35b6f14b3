"""What a remote server is sent, and what is refused."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.errors import InvalidRequest
from servekit.remote.openai_request import (
    Dialect,
    RemoteRequest,
    as_openai_writes,
    check_supported,
    is_long,
    write_requests,
)
from servekit.requests.generation import Chat, GenerationRequest, Grammar, GrammarKind, Prompt, Sampling

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def of_text(
    *prompts: Any, sampling: Sampling | None = None, max_tokens: int | None = 5, **fields: Any
) -> GenerationRequest:
    return GenerationRequest(
        prompts=[Prompt(each, "prompt") for each in prompts or ("x",)],
        sampling=sampling or Sampling(),
        max_tokens=max_tokens,
        **fields,
    )


def of_chat(sampling: Sampling | None = None, grammar: Grammar | None = None, **chat: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "hi"}]
    return GenerationRequest(
        prompts=[Prompt("hi", "messages")],
        sampling=sampling or Sampling(),
        max_tokens=5,
        grammar=grammar,
        chat=Chat(messages=messages, **chat),
    )


def sent(request: GenerationRequest, dialect: Dialect = "vllm") -> RemoteRequest:
    check_supported(request, "m", dialect)
    (written,) = write_requests(request, "there", dialect)
    return written


HEAD = {"model": "there", "stream": True, "stream_options": {"include_usage": True}}


def test_text_is_sent_as_it_is() -> None:
    assert sent(of_text("x"), "openai") == RemoteRequest("/completions", {**HEAD, "max_tokens": 5, "prompt": "x"})
    request = of_text("x", "y", n=2, max_tokens=7)
    assert [each.fields for each in write_requests(request, "there", "openai")] == [
        {**HEAD, "n": 2, "max_tokens": 7, "prompt": prompt} for prompt in "xy"
    ]


def test_chat_is_sent_with_its_messages_and_tools() -> None:
    written = sent(of_chat(tools=[TOOL], tool_choice="required", is_parallel=False, reasoning_effort="low"), "openai")
    assert written.path == "/chat/completions" and written.messages == [{"role": "user", "content": "hi"}]
    assert written.fields == {
        **HEAD,
        "max_completion_tokens": 5,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
    }
    assert "tools" in sent(of_chat(tools=[TOOL])).fields and "tool_choice" not in sent(of_chat(tools=[TOOL])).fields


def test_vllm_gets_its_own_parameters() -> None:
    sampling = Sampling(top_k=5, min_p=0.1, stop_token_ids=[3], ignore_eos=True, temperature=0.5, seed=1)
    request = of_chat(sampling, template_variables={"a": 1}, continues_final_message=True, max_reasoning_tokens=9)
    fields = sent(request).fields
    expected = {"top_k": 5, "min_p": 0.1, "stop_token_ids": [3], "ignore_eos": True, "temperature": 0.5, "seed": 1}
    assert fields.items() >= expected.items()
    assert fields["chat_template_kwargs"] == {"a": 1} and fields["thinking_token_budget"] == 9
    assert fields["continue_final_message"] and not fields["add_generation_prompt"] and fields["max_tokens"] == 5
    assert sent(of_chat(adds_generation_prompt=False)).fields["add_generation_prompt"] is False
    request = GenerationRequest(
        prompts=[Prompt("", "messages")], sampling=Sampling(), chat=Chat(messages=[{"role": "user", "content": ""}])
    )
    assert "max_tokens" not in sent(request).fields


def test_logprobs_are_asked_for_as_each_route_has_them() -> None:
    assert sent(of_text("x", logprobs=0)).fields["logprobs"] == 0
    assert sent(of_text("x", logprobs=3)).fields["logprobs"] == 3
    fields = sent(replace(of_chat(), logprobs=0)).fields
    assert fields["logprobs"] is True and "top_logprobs" not in fields
    fields = sent(replace(of_chat(), logprobs=2)).fields
    assert fields["logprobs"] is True and fields["top_logprobs"] == 2


def test_values_that_mean_nothing_are_left_out() -> None:
    neutral = Sampling(
        top_k=-1, min_p=0.0, repetition_penalty=1.0, min_tokens=0, skip_special_tokens=True, bad_words=[]
    )
    assert sent(of_text("x", sampling=neutral), "openai").fields == {**HEAD, "max_tokens": 5, "prompt": "x"}
    greedy = sent(of_text("x", sampling=Sampling(do_sample=False, temperature=0.9)), "openai")
    assert greedy.fields["temperature"] == 0.0


SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}', "response_format")


def test_grammars_are_sent_as_the_server_knows_them() -> None:
    schema = sent(of_chat(grammar=SCHEMA), "openai").fields["response_format"]
    assert schema["json_schema"]["schema"] == {"type": "object"} and schema["json_schema"]["strict"]
    any_json = Grammar(GrammarKind.JSON, "", "response_format")
    assert sent(of_chat(grammar=any_json), "openai").fields["response_format"] == {"type": "json_object"}
    for kind, text, written in (
        (GrammarKind.REGEX, "a+", {"regex": "a+"}),
        (GrammarKind.EBNF, "root ::= x", {"grammar": "root ::= x"}),
        (GrammarKind.CHOICE, '["a","b"]', {"choice": ["a", "b"]}),
    ):
        request = of_text("x", grammar=Grammar(kind, text, "structured_outputs"))
        assert sent(request).fields["structured_outputs"] == written
        with pytest.raises(InvalidRequest, match="structured_outputs"):
            check_supported(request, "m", "openai")
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        write_requests(of_chat(grammar=Grammar(GrammarKind.JSON_SCHEMA, "{", "response_format")), "m", "openai")


@pytest.mark.parametrize(
    "request_",
    [
        of_text("x", prompt_logprobs=0),
        of_text("x", truncate=1),
        of_text("x", returns_token_ids=True),
        of_text("x", suffix="y"),
        of_text("x", best_of=2),
        of_text("x", sampling=Sampling(typical_p=0.5)),
        of_text([1, 2]),
        of_text(array("i", [1])),
        of_text(""),
        of_text("x", max_tokens=None),
    ],
)
@pytest.mark.parametrize("dialect", ["openai", "vllm", "tgi"])
def test_what_no_remote_server_can_do_is_refused(request_: GenerationRequest, dialect: Dialect) -> None:
    with pytest.raises(InvalidRequest):
        check_supported(request_, "m", dialect)


@pytest.mark.parametrize(
    "request_",
    [
        of_text("x", logprobs=0),
        of_text("x", sampling=Sampling(top_k=4)),
        of_text("x", sampling=Sampling(min_tokens=4)),
        of_text("x", grammar=SCHEMA),
        of_chat(template_variables={"a": 1}),
        of_chat(continues_final_message=True),
        of_chat(adds_generation_prompt=False),
        of_chat(max_reasoning_tokens=4),
    ],
)
def test_what_only_vllm_knows_is_refused_for_others(request_: GenerationRequest) -> None:
    check_supported(request_, "m", "vllm")
    with pytest.raises(InvalidRequest, match="not known to support") as caught:
        check_supported(request_, "m", "openai")
    assert caught.value.param


def test_calls_and_results_are_written_as_openai_does() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    conversation = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call, call], "reasoning_content": "hm", "thinking": "hm"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [{"id": "mine", "function": {"name": "g", "arguments": "{"}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "mine"},
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": "5", "tool_call_id": "other"},
    ]
    written = as_openai_writes(conversation, "openai")
    assert written[0] == {"role": "user", "content": "go"}
    function = {"name": "f", "arguments": '{"a":1}'}
    assert written[1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{i}", "type": "function", "function": function} for i in range(2)],
    }
    assert [message["tool_call_id"] for message in written if message["role"] == "tool"] == [
        "call_0",
        "call_1",
        "mine",
        "call_0",
        "other",
    ]
    assert written[4]["tool_calls"][0]["function"] == {"name": "g", "arguments": "{"} and written[4]["content"] == "so"
    assert as_openai_writes(conversation, "vllm")[1]["reasoning_content"] == "hm"
    twice = [{"role": "assistant", "tool_calls": [{"id": "a", **call}] * 2}, *({"role": "tool"} for _ in range(3))]
    assert [message["tool_call_id"] for message in as_openai_writes(twice, "openai")[1:]] == ["a", "a", "call_0"]
    with pytest.raises(InvalidRequest, match="tool_call_id that is not a string"):
        as_openai_writes([{"role": "tool", "tool_call_id": ["a"]}], "openai")
    for bad in ({}, {"function": "f"}, {"function": {"name": 1}}, {"id": ["a"], **call}, {"id": {"b": 1}, **call}):
        with pytest.raises(InvalidRequest):
            as_openai_writes([{"role": "assistant", "content": "", "tool_calls": [bad]}], "openai")


def test_conversations_of_many_messages_and_calls_are_written_in_a_thread() -> None:
    calls = [{"id": str(index), "function": {"name": "f"}} for index in range(999)]
    short = [{"role": "assistant", "tool_calls": calls}]
    for messages, expected in ((short, False), ([*short, {"role": "tool", "content": ""}], True)):
        assert is_long(GenerationRequest(prompts=[], sampling=Sampling(), chat=Chat(messages=messages))) is expected
    assert not is_long(GenerationRequest(prompts=[], sampling=Sampling()))


class CountedId(str):
    """An id that counts with how many others it is compared."""

    num_comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedId.num_comparisons += 1
        return super().__eq__(other)


def test_results_of_many_calls_are_matched_in_linear_time() -> None:
    calls = [{"id": CountedId(index), "function": {"name": "f"}} for index in range(500)]
    results = [{"role": "tool", "content": "", "tool_call_id": CountedId(index)} for index in reversed(range(1000))]
    written = as_openai_writes([{"role": "assistant", "content": "", "tool_calls": calls}, *results], "openai")
    assert len(written) == 1001
    assert CountedId.num_comparisons < 10 * 1000  # each with each: some hundred thousand


@pytest.mark.parametrize(
    ("dialect", "field"), [("openai", "max_completion_tokens"), ("vllm", "max_tokens"), ("tgi", "max_tokens")]
)
def test_limit_of_a_chat_has_the_name_that_the_server_knows(dialect: Dialect, field: str) -> None:
    limits = {name: value for name, value in sent(of_chat(), dialect).fields.items() if name.startswith("max_")}
    assert limits == {field: 5}


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (of_text(n=2), "n"),
        (of_text(sampling=Sampling(logit_bias={5: 1.0})), "logit_bias"),
        (of_text(logprobs=1), "logprobs"),
        (of_text(sampling=Sampling(top_k=3)), "top_k"),
    ],
)
def test_what_tgi_ignores_is_refused(request_: GenerationRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_supported(request_, "m", "tgi")
    assert refused.value.param == param
