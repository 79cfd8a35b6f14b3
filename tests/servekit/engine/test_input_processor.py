"""Tests of what is refused before a process renders it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from servekit.config import ServeConfig
from servekit.engine.input_processor import InputProcessor
from servekit.engine.model_files import DEMO_MODEL_PATH, find_chat_template
from servekit.engine.tokenizer import load_tokenizer
from servekit.errors import ContextTooLong
from servekit.sandbox.jobs import RenderChat

MAX_TOTAL_TOKENS = 100


class RecordingSandbox:
    """Takes the place of the sandbox, and renders nothing."""

    def __init__(self) -> None:
        self.jobs: list[RenderChat] = []

    async def run(self, job: RenderChat, param: str, tenant: str) -> str:
        self.jobs.append(job)
        return "rendered"


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> InputProcessor:
    model: Any = SimpleNamespace(eos_token_ids=[2], vocab_size=2048)
    limits: Any = SimpleNamespace(max_total_tokens=MAX_TOTAL_TOKENS)
    tokenizer, template = load_tokenizer(DEMO_MODEL_PATH), find_chat_template(DEMO_MODEL_PATH)
    config = ServeConfig(trust_request_chat_template=True)
    made = InputProcessor(config, DEMO_MODEL_PATH, tokenizer, template, model, limits)
    monkeypatch.setattr(made, "_sandbox", RecordingSandbox())
    return made


def turns(role: str, num_characters: int) -> list[dict[str, Any]]:
    return [{"role": role, "content": "x" * (num_characters // 10)} for _ in range(10)]


async def test_a_conversation_that_cannot_fit_is_refused_before_it_is_rendered(processor: InputProcessor) -> None:
    fits = MAX_TOTAL_TOKENS * processor._tokenizer.max_token_bytes
    with pytest.raises(ContextTooLong) as refusal:
        await processor.render_chat("", turns("user", 2 * fits))
    assert refusal.value.param == "messages"
    assert await processor.render_chat("", turns("user", fits)) == "rendered"
    # A template may leave out what the assistant thought, and one of the request's may leave out anything.
    assert await processor.render_chat("", turns("assistant", 2 * fits)) == "rendered"
    assert await processor.render_chat("", turns("user", 2 * fits), "{{ 1 }}") == "rendered"
