"""Claims that hold in every API: the events of a stream add up to the whole answer, with any options."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servekit.api.schemas import native, openai, tgi
from tests.support.server_process import ServerProcess, events

PROMPTS = ["What color is the sky?", "Tell me a story about a cat.", "naïve 🦊 日本", "Count from 3 to 9."]
Json = dict[str, Any]

OPTIONS = st.fixed_dictionaries(
    {"seed": st.integers(0, 5), "temperature": st.sampled_from([0.0, 0.7, 1.5, 3.0])},
    optional={
        "top_k": st.sampled_from([-1, 0, 1, 5]),
        "top_p": st.sampled_from([0.3, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "typical_p": st.sampled_from([0.4, 1.0]),
        "repetition_penalty": st.sampled_from([0.9, 1.3]),
        "presence_penalty": st.sampled_from([-0.5, 1.0]),
        "frequency_penalty": st.sampled_from([-0.5, 1.0]),
        "logit_bias": st.sampled_from([{}, {"293": -100.0}, {"309": 3.0, "19": -1.5}]),
        "allowed_token_ids": st.sampled_from([[293, 278, 511, 19, 2], list(range(3, 260))]),
        "bad_words": st.sampled_from([["sky"], ["The sky", "a cat"]]),
        "min_tokens": st.sampled_from([0, 3, 6]),
        "stop": st.sampled_from(["e", [" s", "cat"], ["blue."], ["zebra", "a"]]),
        "stop_token_ids": st.sampled_from([[511], [19, 278]]),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "stream_interval": st.sampled_from([1, 2, 5]),
    },
)
# Options with different names in the APIs, or missing in some.
SOME_LOGPROBS = st.sampled_from([None, 0, 2])
GRAMMARS = st.sampled_from(
    [
        None,
        None,
        {"type": "regex", "value": "[a-z]{3,9}( [a-z]{2,5}){2}"},
        {"type": "choice", "value": ["red", "green and blue", "été"]},
        {
            "type": "json_schema",
            "value": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        },
        {"type": "ebnf", "value": 'start: "a" ("b" | "c")+ "d"'},
    ]
)


class Case(NamedTuple):
    """One request, in terms of no API."""

    options: Json
    prompt: str
    max_tokens: int
    grammar: Json | None
    logprobs: int | None
    prompt_logprobs: int | None
    truncate: int | None


CASES = st.builds(
    Case,
    OPTIONS,
    st.sampled_from(PROMPTS),
    st.integers(6, 14),
    GRAMMARS,
    SOME_LOGPROBS,
    SOME_LOGPROBS,
    st.sampled_from([None, 3]),
)


def every_option(test: Any) -> Any:
    """Run a test with requests from hypothesis, the same ones every time."""
    return settings(
        max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )(given(case=CASES)(test))


def ask(server: ServerProcess, route: str, body: Json) -> Any:
    response = server.client.post(route, json=body)
    assert response.status_code == 200, f"{body}: {response.text}"
    return response.json()


def follow(server: ServerProcess, route: str, body: Json) -> list[Json]:
    """Return a stream's events, without OpenAI's `[DONE]`."""
    with server.client.stream("POST", route, json=body) as response:
        assert response.status_code == 200, f"{body}: {response.read().decode()}"
        lines = list(response.iter_lines())
    if route.startswith("/v1"):
        assert [line for line in lines if line][-1] == "data: [DONE]"
    return list(events(line for line in lines if line != "data: [DONE]"))


def follow_by_get(server: ServerProcess, body: Json) -> list[Json]:
    """Request a stream as a browser's EventSource does: lists repeat their name, objects are JSON."""
    query = [
        (name, json.dumps(value) if isinstance(value, dict | bool) else each)
        for name, value in body.items()
        if value is not None
        for each in (value if isinstance(value, list) else [value])
    ]
    response = server.client.get("/generate_stream", params=query)
    assert response.status_code == 200, response.text
    return list(events(iter(response.text.splitlines())))


def close(one: Any, other: Any) -> bool:
    """Return whether two values are equal up to rounding, which differs between batches."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    return bool(one == other)


def without_cached(usage: Json) -> Json:
    """Drop the cached tokens, which depend on earlier requests."""
    return {name: value for name, value in usage.items() if name.endswith("_tokens") and name != "cached_tokens"}


@every_option
def test_native_stream_adds_up(server: ServerProcess, case: Case) -> None:
    options, prompt, max_tokens, grammar, logprobs, prompt_logprobs, truncate = case
    asked = {"prompt": prompt, "max_tokens": max_tokens, "grammar": grammar, "prompt_logprobs": prompt_logprobs}
    body = {**asked, "logprobs": logprobs, **options}
    whole = ask(server, "/generate", body)
    match truncate, max_tokens % 2:
        case None, 0:
            stream = follow(server, "/generate_stream", body)
        case None, _:
            stream = follow(server, "/generate", {**body, "stream": True})
        case _:
            stream = follow_by_get(server, body)
    last = stream[-1]
    assert close(stream[0].get("prompt_tokens"), whole.get("prompt_tokens"))
    assert ("prompt_tokens" in whole) == (prompt_logprobs is not None)
    assert "".join(event["token"]["text"] for event in stream) == whole["generated_text"] == last["generated_text"]
    assert (last["finish_reason"], last["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
    assert without_cached(last["usage"]) == without_cached(whole["usage"])
    assert last["index"] == whole["usage"]["completion_tokens"]
    assert ("tokens" in whole) == (logprobs is not None)
    for event in stream if logprobs is not None else ():
        token = whole["tokens"][event["index"] - 1]
        assert close({**event["token"], "text": ""}, {**token, "text": ""})


@every_option
def test_tgi_stream_adds_up(server: ServerProcess, case: Case) -> None:
    options, prompt, max_tokens, grammar, logprobs, prompt_logprobs, truncate = case
    asked = {"max_new_tokens": max_tokens, "grammar": grammar, "details": True, "top_n_tokens": 2, **options}
    asked |= {"truncate": truncate, "decoder_input_details": prompt_logprobs is not None}
    body = {"inputs": prompt, "parameters": {**asked, "return_full_text": max_tokens % 2 == 0}}
    (whole,) = ask(server, "/", body)
    assert (len(whole["details"]["prefill"]) > 0) == (prompt_logprobs is not None)
    route = "/generate_stream" if logprobs else "/"
    stream = follow(server, route, {**body, "stream": True})
    last, details = stream[-1], whole["details"]
    before = prompt if max_tokens % 2 == 0 else ""
    assert before + "".join(event["token"]["text"] for event in stream) == whole["generated_text"]
    assert last["generated_text"] == whole["generated_text"]
    for key in ("finish_reason", "generated_tokens", "seed"):
        assert last["details"][key] == details[key]
    assert last["index"] == details["generated_tokens"] == len(details["tokens"])
    for event in stream:
        token, top = details["tokens"][event["index"] - 1], details["top_tokens"][event["index"] - 1]
        assert close({**event["token"], "text": ""}, {**token, "text": ""})
        assert close(event["top_tokens"], top)


@every_option
def test_completion_chunks_add_up(server: ServerProcess, case: Case) -> None:
    options, prompt, max_tokens, grammar, logprobs, prompt_logprobs, truncate = case
    prompts = [prompt, "Hello"][: 1 + max_tokens % 2]
    body = {
        "prompt": prompts,
        "max_tokens": max_tokens,
        "n": 1 + max_tokens % 3,
        "echo": max_tokens % 4 == 0,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "truncate_prompt_tokens": truncate,
        "structured_outputs": _for_openai(grammar),
        **options,
    }
    whole = ask(server, "/v1/completions", body)
    chunks = follow(server, "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    streamed: defaultdict[int, Json] = defaultdict(lambda: {"text": "", "logprobs": defaultdict(list)})
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        so_far = streamed[choice["index"]]
        so_far["text"] += choice["text"]
        for key, values in (choice["logprobs"] or {}).items():
            so_far["logprobs"][key] += values or []
        if "prompt_logprobs" in choice:
            assert "prompt_logprobs" not in so_far, "once, at the beginning"
            so_far["prompt_logprobs"] = choice["prompt_logprobs"]
        assert "finish_reason" not in so_far, "nothing comes after the end"
        if choice["finish_reason"] is not None:
            so_far |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(prompts) * body["n"])) == sorted(streamed)
    for choice in whole["choices"]:
        so_far = streamed[choice["index"]]
        for key in ("text", "finish_reason", "stop_reason"):
            assert so_far[key] == choice[key]
        if logprobs is not None:
            whole_logprobs = {key: values or [] for key, values in choice["logprobs"].items()}
            assert close(dict(so_far["logprobs"]), whole_logprobs)
            offsets_agree(choice["text"], choice["logprobs"], options.get("skip_special_tokens", True))
        assert close(so_far.get("prompt_logprobs"), choice.get("prompt_logprobs"))
    assert chunks[-1]["choices"] == [] and without_cached(chunks[-1]["usage"]) == without_cached(whole["usage"])


@every_option
def test_chat_chunks_add_up(server: ServerProcess, case: Case) -> None:
    options, prompt, max_tokens, grammar, logprobs, prompt_logprobs, truncate = case
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_completion_tokens": max_tokens,
        "n": 1 + max_tokens % 3,
        "logprobs": logprobs is not None,
        "top_logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "truncate_prompt_tokens": truncate,
        "structured_outputs": _for_openai(grammar),
        **options,
    }
    whole = ask(server, "/v1/chat/completions", body)
    chunks = follow(server, "/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    streamed: defaultdict[int, Json] = defaultdict(lambda: {"content": "", "logprobs": []})
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        so_far = streamed[choice["index"]]
        if "role" in choice["delta"]:
            assert so_far == {"content": "", "logprobs": []}, "the role comes first"
            so_far["role"] = choice["delta"]["role"]
        so_far["content"] += choice["delta"].get("content", "")
        so_far["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        if choice["finish_reason"] is not None:
            so_far |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    for choice in whole["choices"]:
        so_far = streamed[choice["index"]]
        assert (so_far["role"], so_far["content"]) == ("assistant", choice["message"]["content"])
        assert (so_far["finish_reason"], so_far["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
        assert close(so_far["logprobs"], (choice["logprobs"] or {"content": []})["content"])
    assert close(chunks[0].get("prompt_logprobs"), whole.get("prompt_logprobs"))
    assert without_cached(chunks[-1]["usage"]) == without_cached(whole["usage"])


def offsets_agree(text: str, logprobs: Json, skips_special: bool) -> None:
    """Check that each token's text is at its offset, up to the end of the text: a stop string is cut off.

    What was put around an echoed prompt is in no text, and moves nothing.
    """
    offsets, tokens = logprobs["text_offset"], logprobs["tokens"]
    if tokens[0] == "<bos>" and not text.startswith("<bos>"):
        assert offsets[:2] == [0, 0]
        offsets, tokens = offsets[1:], tokens[1:]
    for begins, token in zip(offsets, tokens, strict=True):
        is_hidden = token.startswith("bytes:") or (token.startswith("<") and token.endswith(">") and skips_special)
        if not is_hidden and begins + len(token) <= len(text):
            assert text[begins : begins + len(token)] == token


def _for_openai(grammar: Json | None) -> Json | None:
    names = {"regex": "regex", "choice": "choice", "json_schema": "json", "ebnf": "grammar"}
    return None if grammar is None else {names[grammar["type"]]: grammar["value"]}


# -- one model behind all of them --------------------------------------------------------------------------------------


def test_all_apis_return_the_same_text(server: ServerProcess) -> None:
    options = {"temperature": 1.3, "seed": 11, "stop": ["zebra"]}
    prompt = "Tell me a story about a cat."
    native = ask(server, "/generate", {"prompt": prompt, "max_tokens": 30, **options})["generated_text"]
    parameters = {"max_new_tokens": 30, **options}
    for route in ("/generate", "/generate_stream"):
        body = {"inputs": prompt, "parameters": parameters}
        text = follow(server, route, {**body, "stream": True})[-1]["generated_text"]
        assert text == native
    assert ask(server, "/", {"inputs": prompt, "parameters": parameters})[0]["generated_text"] == native
    completion = ask(server, "/v1/completions", {"prompt": prompt, "max_tokens": 30, **options})
    assert completion["choices"][0]["text"] == native
    token_ids = ask(server, "/tokenize", {"prompt": prompt})["tokens"]
    completion = ask(server, "/v1/completions", {"prompt": token_ids, "max_tokens": 30, **options})
    assert completion["choices"][0]["text"] == native
    query = {"prompt": prompt, "max_tokens": 30, **options}
    lines = server.client.get("/generate_stream", params=query).text.splitlines()
    assert list(events(iter(lines)))[-1]["generated_text"] == native
    chat = ask(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], **options})
    rendered = ask(server, "/generate", {"prompt": f"<bos><|user|>{prompt}<eos><|assistant|>", **options})
    assert chat["choices"][0]["message"]["content"] == rendered["generated_text"]


def test_best_of_returns_the_likeliest(server: ServerProcess) -> None:
    body = {"prompt": "Tell me a story", "temperature": 1.5, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    every = ask(server, "/v1/completions", {**body, "n": 8, "logprobs": 0})["choices"]
    mean = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / 12 for choice in every}
    ranking = sorted(mean, key=lambda text: mean[text], reverse=True)
    best = ask(server, "/v1/completions", {**body, "n": 2, "best_of": 8})
    assert [choice["text"] for choice in best["choices"]] == ranking[:2]
    assert best["choices"][0]["logprobs"] is None and best["usage"]["completion_tokens"] == 8 * 12
    assert ask(server, "/generate", {**body, "best_of": 8})["generated_text"] == ranking[0]
    tgi = ask(
        server, "/generate", {"inputs": body["prompt"], "parameters": {**_tgi(body), "best_of": 8, "details": True}}
    )
    assert [tgi["generated_text"], *(one["generated_text"] for one in tgi["details"]["best_of_sequences"])] == ranking
    refusal = server.client.post("/v1/completions", json={**body, "n": 2, "best_of": 8, "stream": True})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "best_of")


def test_sixty_four_answers_share_the_blocks_of_their_prompt(server: ServerProcess) -> None:
    """Counted while all of them run: each has one or two blocks of its own, and the prompt's blocks exist once."""
    server.wait_until_at_rest()
    prompt = "the cat sat on the mat and the dog looked at it " * 12
    num_tokens = ask(server, "/tokenize", {"prompt": prompt})["count"]
    body = {"prompt": prompt, "n": 64, "max_tokens": 14, "ignore_eos": True, "temperature": 1, "stream": True}
    most = 0.0
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number % 40 == 0 and server.metric("servekit_num_requests_running") == 64:
                free = server.metric("servekit_kv_blocks_free")
                most = max(most, server.metric("servekit_kv_blocks_total") - free)
    assert num_tokens > 8 * 16, "else there is little to share"
    assert 64 < most <= num_tokens // 16 + 64 * 2
    server.wait_until_at_rest()


def _tgi(body: Json) -> Json:
    return {{"max_tokens": "max_new_tokens"}.get(key, key): value for key, value in body.items() if key != "prompt"}


def test_echo_with_no_new_tokens_scores_the_prompt(server: ServerProcess) -> None:
    """Evaluation harnesses send this."""
    prompt = "The sky is blue."
    (choice,) = ask(server, "/v1/completions", {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1})[
        "choices"
    ]
    logprobs = choice["logprobs"]
    token_ids = ask(server, "/tokenize", {"prompt": prompt})["tokens"]
    assert choice["text"] == prompt and len(logprobs["tokens"]) == len(token_ids)
    assert logprobs["token_logprobs"][0] is None and all(value < 0 for value in logprobs["token_logprobs"][1:])
    for begins, text in zip(logprobs["text_offset"][1:], logprobs["tokens"][1:], strict=True):
        assert prompt[begins:].startswith(text)
    scored = ask(server, "/generate", {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0})["prompt_tokens"]
    assert close([token["logprob"] for token in scored], logprobs["token_logprobs"])


def test_offsets_count_the_special_tokens_that_are_in_the_text(server: ServerProcess) -> None:
    for fields in (
        {"prompt": "<|user|>one<eos>two", "echo": True},
        {"prompt": "<|user|>one<eos>two", "echo": True, "truncate_prompt_tokens": 2},
        {"prompt": ask(server, "/tokenize", {"prompt": "one<eos>two"})["tokens"], "echo": True},
        {"prompt": "one", "skip_special_tokens": False, "ignore_eos": True, "echo": True},
        {"prompt": "naïve 🦊", "echo": True},
    ):
        body = {"max_tokens": 12, "logprobs": 1, "skip_special_tokens": False, **fields}
        (choice,) = ask(server, "/v1/completions", body)["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
        for begins, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            is_told = not token.startswith(("bytes:", "<bos")) and begins < len(text)  # the one that ends it is not
            assert not is_told or text[begins : begins + len(token)] == token, (fields, logprobs)
            assert begins <= len(text)


def test_do_sample_chooses_between_sampled_and_greedy_answers(server: ServerProcess) -> None:
    """The demo model's generation_config is greedy."""
    body = {"inputs": "Tell me a story", "parameters": {"do_sample": True, "best_of": 4, "details": True}}
    answer = ask(server, "/generate", body)
    texts = {answer["generated_text"], *(one["generated_text"] for one in answer["details"]["best_of_sequences"])}
    assert len(texts) > 1
    greedy = {"inputs": "Tell me a story", "parameters": {"do_sample": False, "temperature": 2.0}}
    assert ask(server, "/generate", greedy) == ask(server, "/generate", {"inputs": "Tell me a story"})


def test_results_of_many_megabytes_do_not_stall_other_requests(server: ServerProcess) -> None:
    """The result of such a step is larger than the pipe between worker and server."""
    prompts = [f"{number} " + "a b " * 300 for number in range(16)]
    body = {"prompts": prompts, "max_tokens": 1, "prompt_logprobs": 20}
    answer = ask(server, "/generate", body)
    assert [len(tokens) for tokens in answer["prompt_tokens"]] == [
        ask(server, "/tokenize", {"prompt": prompt})["count"] for prompt in prompts
    ]
    assert all(len(token["top_logprobs"]) == 20 for tokens in answer["prompt_tokens"] for token in tokens[1:])
    many = {"prompt": "Hi", "max_tokens": 20, "n": 64, "logprobs": 20, "ignore_eos": True, "temperature": 1}
    for _ in range(3):
        assert len(ask(server, "/generate", many)["tokens"]) == 64
    server.wait_until_at_rest()


def test_reconnecting_event_source_gets_204(server: ServerProcess) -> None:
    """EventSource connects again after each end, with the last event's id. 204 stops it."""
    first = server.client.get("/generate_stream", params={"prompt": "Hello", "max_tokens": 2})
    assert [line for line in first.text.splitlines() if line.startswith("id:")] == ["id: 1", "id: 2"]
    again = server.client.get("/generate_stream", params={"prompt": "Hello"}, headers={"last-event-id": "2"})
    assert (again.status_code, again.content) == (204, b"")
    refusal = server.client.get("/generate_stream", params={"prompt": "Hello", "max_tokens": "many"})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "max_tokens")
    listed = server.client.get("/generate_stream?prompt=What+color+is+the+sky%3F&stop=blue&stop=green")
    assert list(events(iter(listed.text.splitlines())))[-1]["stop_reason"] == "blue"


def test_head_request_leaves_nothing_running(server: ServerProcess) -> None:
    """A client that asks for the headers never reads the stream."""
    server.wait_until_at_rest()
    query = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True}
    assert server.client.head("/generate_stream", params=query).headers["content-type"].startswith("text/event-stream")
    computed = server.metric("servekit_generation_tokens_total")
    server.wait_until_at_rest()
    assert server.metric("servekit_generation_tokens_total") - computed < 1000, "it ends long before 1900 tokens"


def test_detokenize_inverts_tokenize(server: ServerProcess) -> None:
    text = "The café is naïve 🦊."
    tokens = ask(server, "/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True})
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) and tokens["max_model_len"] == 2048
    assert ask(server, "/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": text}
    spans = ask(server, "/tokenize", {"inputs": text})
    assert [span["id"] for span in spans][1:] == tokens["tokens"]
    assert all(text[span["start"] : span["stop"]] == span["text"] for span in spans)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "body", "status", "code", "param"),
    [
        ("/generate", {"inputs": "a", "temprature": 1}, 400, "unknown_field", "temprature"),
        ("/generate", {"inputs": "a", "parameters": {"top_p": 2}}, 400, "invalid_value", "parameters.top_p"),
        ("/", {"inputs": "a", "parameters": {"watermark": True}}, 400, "invalid_value", "parameters.watermark"),
        ("/", {"inputs": "a", "parameters": {"adapter_id": "x"}}, 400, "invalid_value", "parameters.adapter_id"),
        ("/", {"prompt": "a"}, 400, "unknown_field", "prompt"),
        ("/v1/completions", {"prompt": "a", "model": "gpt-9"}, 404, "model_not_found", "model"),
        ("/v1/completions", {"prompt": ["a", [1]]}, 400, "invalid_value", "prompt"),
        ("/v1/completions", {"prompt": []}, 400, "invalid_value", "prompt"),
        ("/v1/completions", {"prompt": [-1]}, 400, "invalid_value", "prompt[0]"),
        ("/v1/completions", {"prompt": [[1], []]}, 400, "invalid_value", "prompt[1]"),
        ("/v1/completions", {"prompt": [999999]}, 400, "invalid_value", "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "invalid_value", "suffix"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ("/v1/completions", {"prompt": "a", "n": 3, "best_of": 2}, 400, "invalid_value", "best_of"),
        ("/v1/completions", {"prompt": "a", "stream_options": {}}, 400, "invalid_value", "stream_options"),
        ("/v1/completions", {"prompt": [1] * 3000}, 400, "context_length_exceeded", "prompt"),
        ("/v1/chat/completions", {"messages": []}, 400, "invalid_value", "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}], "tools": [{}]},
            400,
            "invalid_value",
            "tools[0].type",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "invalid_value",
            "messages[0].content",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
            400,
            "invalid_value",
            "top_logprobs",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"},
            400,
            "invalid_value",
            "chat_template",
        ),
        ("/generate", {"prompt": "a", "allowed_token_ids": [9999]}, 400, "invalid_value", "allowed_token_ids"),
        ("/generate", {"prompt": "a", "grammar": {"type": "regex", "value": "a["}}, 400, "invalid_value", "grammar"),
        ("/generate", {"prompt": "a", "grammar": {"type": "regex"}}, 400, "invalid_value", "grammar.value"),
        ("/generate", {"prompt": "a", "grammar": {"x": 1}}, 400, "unknown_field", "grammar.x"),
        (
            "/",
            {"inputs": "a", "parameters": {"max_new_tokens": 99999}},
            400,
            "context_length_exceeded",
            "parameters.max_new_tokens",
        ),
        ("/v1/completions", {"prompt": ["a"] * 64, "n": 64}, 400, "invalid_value", "n"),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"regexp": "a"}},
            400,
            "unknown_field",
            "structured_outputs.regexp",
        ),
        ("/detokenize", {"tokens": [-1]}, 400, "invalid_value", "tokens[0]"),
        ("/detokenize", {"tokens": [99999]}, 400, "invalid_value", "tokens"),
        ("/tokenize", {"prompt": "x" * 1_000_000}, 400, "context_length_exceeded", "prompt"),
    ],
)
def test_error_names_the_field(
    server: ServerProcess, route: str, body: Json, status: int, code: str, param: str
) -> None:
    response = server.client.post(route, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error
    assert ("error_type" in response.json()) == ("inputs" in body or route == "/")


def test_v1_ignores_unknown_fields_and_treats_null_as_absent(server: ServerProcess) -> None:
    schemas = server.client.get("/openapi.json").json()["components"]["schemas"]
    for route, body, kind in (
        ("/v1/completions", {"prompt": "Hello", "temprature": 1, "max_tokens": 2}, "CompletionRequest"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "x": {}}, "ChatCompletionRequest"),
    ):
        nulls = dict.fromkeys(schemas[kind]["properties"])
        answers = [ask(server, route, asked)["choices"] for asked in (body, {**nulls, **body})]
        assert answers[0] == answers[1]


# -- what it says of itself --------------------------------------------------------------------------------------------


# What this server's model, which generates text and has no adapters, does not do.
REFUSED_PATHS = {
    "/v1/embeddings",
    "/embed",
    "/api/embed",
    "/api/embeddings",
    "/v1/rerank",
    "/rerank",
    "/score",
    "/predict",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}


def test_the_document_has_every_route_and_its_examples_are_answered(server: ServerProcess) -> None:
    api = server.client.get("/openapi.json").json()
    body = {"prompt": "Hello", "max_tokens": 2}
    assert server.client.post("/v1/completions", json=body, headers={"X-Request-Id": "seen"}).status_code == 200
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], f"{method} {path}"
            if path.startswith(("/v1/files", "/v1/batches")):  # this server has no --batch-dir
                assert server.client.request(method.upper(), path, files={"file": b""}).status_code in (200, 400, 404)
            elif method != "get" and path.startswith(("/v1/models", "/v1/aliases")):  # this server has one model
                weights = {"models": {"demo": 1}}
                assert server.client.request(method.upper(), path, json=weights).status_code == 400
            elif method == "get":
                target = path.replace("{model}", "demo").replace("{id}", "seen")
                query = {"prompt": "Hello", "max_tokens": 2} if path == "/generate_stream" else {}
                with server.client.stream("GET", target, params=query) as response:  # one of them never ends
                    assert response.status_code == 200
            elif "requestBody" in operation:
                example = operation["requestBody"]["content"]["application/json"]["example"]
                # There is no request that could be aborted.
                expected = 404 if path == "/abort_request" else 400 if path in REFUSED_PATHS else 200
                assert server.client.post(path, json=example).status_code == expected, path
            else:  # a switch that this server does not have, or what it does not do for Ollama's clients
                expected = 400 if path.startswith("/api/") else 409
                assert server.client.request(method.upper(), path).status_code == expected
    text = json.dumps(api)
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= api["components"]["schemas"].keys()
    page = server.client.get("/docs").text
    assert all(path in page for path in api["paths"])
    assert "src=" not in page and "https://" not in page, "it works without a network"


def test_answers_match_their_documented_schemas(server: ServerProcess) -> None:
    def fits(route: str, body: Json, kind: Any) -> None:
        msgspec.json.decode(server.client.post(route, json=body).content, type=kind)

    body = {"prompt": "Hello", "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 2}
    fits("/generate", body, native.GenerateResponse)
    fits("/generate", {"prompts": ["Hello", "there"], "prompt_logprobs": 0}, native.BatchGenerateResponse)
    fits("/v1/completions", {**body, "n": 2}, openai.CompletionResponse)
    chat = {"messages": [{"role": "user", "content": "Hello"}], "prompt_logprobs": 1, "logprobs": True}
    fits("/v1/chat/completions", chat, openai.ChatCompletionResponse)
    details = {"details": True, "decoder_input_details": True, "top_n_tokens": 2}
    fits("/generate", {"inputs": "Hello", "parameters": details}, tgi.TgiResponse)
