"""Test request bodies of each API, against servekit's own schemas."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from loadtest.running.api_formats import body_of
from loadtest.target import ApiFormat, Target
from servekit.api.schemas import native, openai, tgi


def asked(api: ApiFormat, *histories: list[str], model: str | None = None, **fields: Any) -> dict[str, Any]:
    target = Target(["http://127.0.0.1:1"], api, fields=fields)
    reported: dict[str, Any] = json.loads(body_of(target, model, histories or [["hi"]], 7))
    return reported


def test_each_api_gets_its_own_request_body() -> None:
    assert asked(ApiFormat.GENERATE_STREAM) == {"prompt": "hi", "max_tokens": 7, "ignore_eos": True}
    assert asked(ApiFormat.GENERATE, ["a"], ["b"]) == {"prompts": ["a", "b"], "max_tokens": 7, "ignore_eos": True}
    assert asked(ApiFormat.TGI) == {
        "inputs": "hi",
        "parameters": {"max_new_tokens": 7, "details": True, "ignore_eos": True},
    }
    openai_fields = {"max_tokens": 7, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    assert asked(ApiFormat.COMPLETIONS, model="m") == {"model": "m", "prompt": "hi"} | openai_fields
    assert asked(ApiFormat.CHAT) == {"messages": [{"role": "user", "content": "hi"}]} | openai_fields


def test_request_bodies_match_servekits_schemas() -> None:
    for api, schema in (
        (ApiFormat.GENERATE_STREAM, native.GenerateRequest),
        (ApiFormat.GENERATE, native.GenerateRequest),
        (ApiFormat.TGI, tgi.TgiRequest),
        (ApiFormat.COMPLETIONS, openai.CompletionRequest),
        (ApiFormat.CHAT, openai.ChatCompletionRequest),
    ):
        msgspec.convert(asked(api, temperature=0, stop=["x"]), schema)


def test_a_conversation_is_messages_in_a_chat_and_one_text_elsewhere() -> None:
    history = ["Hello", " there", ", you"]
    assert asked(ApiFormat.COMPLETIONS, history)["prompt"] == "Hello there, you"
    assert [(each["role"], each["content"]) for each in asked(ApiFormat.CHAT, history)["messages"]] == [
        ("user", "Hello"),
        ("assistant", " there"),
        ("user", ", you"),
    ]


def test_user_fields_override_the_defaults() -> None:
    assert asked(ApiFormat.COMPLETIONS, ignore_eos=False, temperature=0)["ignore_eos"] is False
    reported = asked(ApiFormat.TGI, temperature=0.5, details=False, stream=True, parameters={"top_k": 3})
    assert reported["parameters"] == {
        "max_new_tokens": 7,
        "details": False,
        "ignore_eos": True,
        "temperature": 0.5,
        "top_k": 3,
    }
    assert reported["stream"] is True
