"""Claims about the door: what is refused before anything is computed for a request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.applications import Starlette

from servekit.api.app import create_app
from servekit.api.auth.keys import parse_keys_file
from servekit.config import ServeConfig
from servekit.engine.llm_engine import LLMEngine
from servekit.errors import InvalidRequest, QueueFull
from servekit.parsing.chat_format import ChatFormat
from servekit.parsing.reasoning import NoReasoning
from tests.support.asgi import Answer, ask, bearer

KEYS = b"""
[[key]]
key = "limited"
tenant = "a"
max_concurrent_sequences = 4
tokens_per_minute = 1000
"""
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def make_app() -> Starlette:
    return create_app(LLMEngine(ServeConfig(api_keys_file="keys.toml")), parse_keys_file(KEYS, "keys.toml"))


async def post(app: Starlette, path: str, **fields: Any) -> Answer:
    return await ask(app, "POST", path, bearer("limited"), body=json.dumps(fields).encode())


class Places:
    """Counts how many requests have places in the queue, and how often a prompt was made or prepared."""

    chat_format = ChatFormat(NoReasoning(), None, lambda _: None, ())

    def __init__(self, app: Starlette, is_full: bool = False) -> None:
        self.num_held = self.num_rendered = self.num_prepared = 0
        self.is_full = is_full
        engine = app.state.models
        engine.reserve = self.reserve
        engine.submit = self.submit
        engine._input_processor, engine._main_loop = self, self  # as if it served

    def reserve(self, *_: Any) -> Places:
        if self.is_full:
            raise QueueFull("the queue is full", retry_after_s=1)
        self.num_held += 1
        return self

    def release(self) -> None:
        self.num_held -= 1

    def done(self) -> bool:
        return False

    async def render_chat(self, *_: Any) -> str:
        assert self.num_held == 1, "it has its place before"
        self.num_rendered += 1
        return "x" * 10_000

    async def submit(self, *_: Any) -> None:
        self.num_prepared += 1
        raise InvalidRequest("enough was seen", code="seen")


@pytest.mark.parametrize(("path", "fields"), [("/v1/chat/completions", CHAT), ("/generate", {"prompt": "a"})])
async def test_a_request_without_a_place_in_the_queue_is_not_prepared(path: str, fields: dict[str, Any]) -> None:
    places = Places(app := make_app(), is_full=True)
    answer = await post(app, path, **fields)
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "overloaded", "1")
    assert places.num_rendered == places.num_prepared == 0


@pytest.mark.parametrize(("path", "fields"), [("/v1/chat/completions", CHAT), ("/generate", {"prompt": "a"})])
async def test_a_request_over_the_limits_of_its_key_is_not_prepared(path: str, fields: dict[str, Any]) -> None:
    places = Places(app := make_app())
    many = await post(app, path, **fields, n=5)
    assert many.status == 400 and "at the same time (max_concurrent_sequences)" in many.error["message"]
    long = await post(app, path, **fields, n=4, max_tokens=251)
    assert long.status == 400 and long.error["param"] == "max_tokens"
    assert places.num_held == places.num_rendered == places.num_prepared == 0


async def test_a_conversation_counts_when_it_is_rendered() -> None:
    """Its 10,000 characters are estimated as 2,500 tokens, and with two answers that is over the limit."""
    places = Places(app := make_app())
    answer = await post(app, "/v1/chat/completions", **CHAT, n=2, max_tokens=10)
    assert answer.status == 400 and "up to 2520 tokens" in answer.error["message"]
    assert (places.num_held, places.num_rendered, places.num_prepared) == (0, 1, 0)


async def test_places_are_given_back_when_a_request_is_refused_later() -> None:
    places = Places(app := make_app())
    for _ in range(3):
        assert (await post(app, "/v1/chat/completions", **CHAT)).error["code"] == "seen"
    assert (places.num_held, places.num_prepared) == (0, 3)
