"""Send the requests of the terminal clients, and parse the server's streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import httpx2
from msgspec import Struct

from servekit.client.http_client import CONNECT_TIMEOUT_S, HttpClient, Refusal, RequestFailed, decoded
from servekit.observability.live_frames import LiveState
from servekit.terminal.event_parser import MAX_EVENT_BYTES, EventParser, EventTooLong

_DONE = b"[DONE]"  # the last event of a stream in OpenAI's format


class AnswerChunk(Struct):
    """A part of an answer."""

    text: str
    num_tokens: int  # of the answer up to this chunk
    finish_reason: str | None = None
    reasoning: str = ""  # what the model writes before its answer


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Usage(Struct):
    completion_tokens: int = 0


class _Error(Struct):
    message: str = ""


class _StreamChunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(Struct):
    id: str
    kind: str = "generate"  # servers of others do not tell


class _Models(Struct):
    data: list[_Model]


class Client(HttpClient):
    """The requests of `servekit chat` and `servekit top`. The methods raise RequestFailed."""

    model: str | None = None  # which one to show, or to talk to; by default the server's default model

    def _live_path(self, path: str) -> str:
        return path if self.model is None else f"{path}?model={quote(self.model, safe='')}"

    async def model_name(self) -> str:
        """Return the name of the model to talk to: the first one that generates text."""
        if self.model is not None:
            return self.model
        models = await self.get("/v1/models", _Models, MAX_EVENT_BYTES)
        named = [each.id for each in models.data if each.kind == "generate"] or [each.id for each in models.data]
        return named[0] if named else ""

    async def live_state(self) -> LiveState:
        """Return one frame of the live view."""
        return await self.get(self._live_path("/ui/state"), LiveState, MAX_EVENT_BYTES)

    async def live_states(self, silence_timeout_s: float) -> AsyncGenerator[LiveState]:
        """Yield frames of the live view until the server closes the stream or sends nothing for `silence_timeout_s`."""
        timeout = httpx2.Timeout(silence_timeout_s, connect=CONNECT_TIMEOUT_S)
        async with aclosing(self._events("GET", self._live_path("/ui/events"), timeout=timeout)) as events:
            async for data in events:
                yield decoded(data, LiveState)

    async def chat(self, messages: list[dict[str, str]], sampling: Mapping[str, Any]) -> AsyncGenerator[AnswerChunk]:
        """Yield the answer in chunks. Closing the generator closes the connection, which aborts the request."""
        body = {
            "messages": [{name: _encodable(text) for name, text in message.items()} for message in messages],
            **({} if self.model is None else {"model": self.model}),
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **sampling,
        }
        num_tokens, is_complete = 0, False
        async with aclosing(self._events("POST", "/v1/chat/completions", json=body)) as events:
            async for data in events:
                if data == _DONE:
                    break
                chunk = decoded(data, _StreamChunk)
                if chunk.error is not None:
                    raise RequestFailed(f"the answer failed: {chunk.error.message}")
                for choice in chunk.choices:
                    text, reasoning = choice.delta.content or "", choice.delta.reasoning_content or ""
                    # Servers that send no usage usually send one token per chunk.
                    num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens + bool(text or reasoning)
                    is_complete = is_complete or choice.finish_reason is not None
                    yield AnswerChunk(text, num_tokens, choice.finish_reason, reasoning)
        if not is_complete:
            raise RequestFailed("the answer is incomplete: the server closed the connection")

    async def _events(self, method: str, path: str, **options: Any) -> AsyncGenerator[bytes]:
        parser = EventParser()
        async with self.open_answer(method, path, **options) as response:
            async for chunk in response.aiter_raw():
                try:
                    events = parser.feed(chunk)
                except EventTooLong as error:
                    raise RequestFailed(f"{self.url} sent an invalid answer: {error}") from None
                for data in events:
                    yield data

    def explain(self, refusal: Refusal) -> RequestFailed:
        """Return the error for a refusal, with what the user of a terminal client can do."""
        if refusal.code == "chat_template_missing":
            return RequestFailed(
                "this model has no chat template, so it cannot chat; start the server with --chat-template FILE, "
                "or send plain prompts to /v1/completions or in the web console",
                is_permanent=True,
            )
        if refusal.code == "context_length_exceeded":
            return RequestFailed(f"{refusal.message} (/new starts a new conversation)", is_permanent=True)
        if refusal.status == 404 and "/ui/" in refusal.path and refusal.code != "model_not_found":
            return RequestFailed(
                f"{self.url} has no live view: the server was started with --no-ui, or it is not servekit",
                is_permanent=True,
            )
        return super().explain(refusal)


def _encodable(text: str) -> str:
    """Replace surrogates, which stand for bytes of the terminal's input that are not UTF-8."""
    return text.encode(errors="replace").decode()
