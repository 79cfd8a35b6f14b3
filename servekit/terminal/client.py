"""The server as a terminal sees it: what it answers, and in words what keeps it from answering."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import httpx2
import msgspec
from msgspec import Struct

from servekit.errors import ConfigError, ServekitError
from servekit.live_view import LiveState
from servekit.terminal.event_parser import EventParser, EventTooLong
from servekit.terminal.safe_text import safe_line

T = TypeVar("T")
_CONNECT_TIMEOUT_S = 10
# A server that has nothing to say sends a comment every 15 s, unless it was told otherwise.
_SILENCE_TIMEOUT_S = 300
_MOST_ERROR_BYTES = 1 << 16
_DONE = b"[DONE]"  # the last event of a stream of OpenAI's


class ServerTrouble(ServekitError):
    """The server does not answer, or does not answer what was asked; the message is fit for a terminal."""

    def __init__(self, message: str, is_lasting: bool = False) -> None:
        super().__init__(safe_line(message))
        self.is_lasting = is_lasting  # asking again will not help


class Piece(Struct):
    """A part of an answer."""

    text: str
    num_tokens: int  # so far
    finish_reason: str | None = None


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Usage(Struct):
    completion_tokens: int = 0


class _Error(Struct):
    message: str = ""
    code: str | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Refusal(Struct):
    error: _Error


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


class Client:
    """A server at a URL. Every method raises ServerTrouble."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url if "://" in url else f"http://{url}"
        self._has_key = bool(api_key)
        try:
            self._http = httpx2.AsyncClient(
                base_url=self.url,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx2.Timeout(_SILENCE_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
            )
            address = self._http.base_url
            usable = address.scheme in ("http", "https") and bool(address.host) and (address.port or 0) < 1 << 16
            usable = usable and not any(character.isspace() for character in url)
        except UnicodeEncodeError:
            raise ConfigError("the API key has characters that no server's key has; it takes ASCII") from None
        except httpx2.InvalidURL:
            usable = False
        if not usable:
            raise ConfigError(f"{url!r} is no address of a server; it takes http://HOST:PORT")

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def model_name(self) -> str:
        """The name of the model that is served."""
        models = await self._get("/v1/models", _Models)
        return models.data[0].id if models.data else ""

    async def live_state(self) -> LiveState:
        """One frame of the live view."""
        return await self._get("/ui/state", LiveState)

    async def live_states(self, silence_timeout_s: float) -> AsyncGenerator[LiveState]:
        """Frames, as they come, for as long as the server sends any and is never silent for that long."""
        timeout = httpx2.Timeout(silence_timeout_s, connect=_CONNECT_TIMEOUT_S)
        async with aclosing(self._events("GET", "/ui/events", timeout=timeout)) as events:
            async for data in events:
                yield _decoded(data, LiveState)

    async def chat(self, messages: list[dict[str, str]], sampling: Mapping[str, Any]) -> AsyncGenerator[Piece]:
        """The answer, piece by piece; closing the iterator tells the server to stop."""
        body = {
            "messages": [{name: _encodable(text) for name, text in message.items()} for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **sampling,
        }
        num_tokens, is_whole = 0, False
        async with aclosing(self._events("POST", "/v1/chat/completions", json=body)) as events:
            async for data in events:
                if data == _DONE:
                    break
                chunk = _decoded(data, _Chunk)
                if chunk.error is not None:
                    raise ServerTrouble(f"the answer failed: {chunk.error.message}")
                for choice in chunk.choices:
                    text = choice.delta.content or ""
                    # Servers that do not count send a token in each piece, as a rule.
                    num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens + bool(text)
                    is_whole = is_whole or choice.finish_reason is not None
                    yield Piece(text, num_tokens, choice.finish_reason)
        if not is_whole:
            raise ServerTrouble("the answer broke off: the server closed the connection")

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    async def _get(self, path: str, kind: type[T]) -> T:
        with self._in_words():
            async with self._http.stream("GET", path, timeout=_CONNECT_TIMEOUT_S) as response:
                if response.status_code != 200:
                    raise await self._refusal(response)
                return _decoded(await response.aread(), kind)

    async def _events(self, method: str, path: str, **how: Any) -> AsyncGenerator[bytes]:
        parser = EventParser()
        with self._in_words():
            async with self._http.stream(method, path, **how) as response:
                if response.status_code != 200:
                    raise await self._refusal(response)
                async for piece in response.aiter_bytes():
                    for data in parser.feed(piece):
                        yield data

    async def _refusal(self, response: httpx2.Response) -> ServerTrouble:
        """In words why the status is not 200."""
        body = b""
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > _MOST_ERROR_BYTES:
                break
        try:
            error = msgspec.json.decode(body, type=_Refusal).error
        except msgspec.DecodeError:
            error = _Error()
        status = response.status_code
        said = error.message or f"{self.url} answers {status} {response.reason_phrase}"
        wait_s = response.headers.get("Retry-After")
        if status == 401:
            known = "does not know this API key" if self._has_key else "wants an API key"
            return ServerTrouble(f"the server {known}; --api-key or SERVEKIT_API_KEY has it", is_lasting=True)
        if error.code == "chat_template_missing":
            return ServerTrouble(
                "this model has no chat template, so it cannot chat; start the server with --chat-template FILE, "
                "or send it plain prompts: /v1/completions, or the console's page",
                is_lasting=True,
            )
        if error.code == "context_length_exceeded":
            return ServerTrouble(f"{said} (/new begins a new conversation)", is_lasting=True)
        if status == 404 and "/ui/" in str(response.request.url):
            return ServerTrouble(
                f"{self.url} has no live view: it was started with --no-ui, or is no servekit", is_lasting=True
            )
        if status in (429, 503):
            return ServerTrouble(f"{said} (busy; try again {f'in {wait_s} s' if wait_s else 'later'})")
        return ServerTrouble(said, is_lasting=400 <= status < 500)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except httpx2.ConnectError:
            raise ServerTrouble(f"nothing answers at {self.url}; `servekit serve` starts a server") from None
        except httpx2.ConnectTimeout:
            raise ServerTrouble(f"{self.url} cannot be reached: no answer in {_CONNECT_TIMEOUT_S} s") from None
        except httpx2.TimeoutException:
            raise ServerTrouble(f"{self.url} has gone silent") from None
        except (httpx2.NetworkError, httpx2.RemoteProtocolError):
            raise ServerTrouble(f"the connection to {self.url} broke off") from None
        except httpx2.HTTPError as error:
            raise ServerTrouble(f"{self.url} cannot be asked: {error or type(error).__name__}") from None
        except EventTooLong as error:
            raise ServerTrouble(f"{self.url} sends what cannot be read: {error}") from None


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerTrouble(f"the server sends what cannot be read: {error}", is_lasting=True) from None


def _encodable(text: str) -> str:
    """A terminal's bytes need not be UTF-8, and become halves of characters where they are not."""
    return text.encode(errors="replace").decode()
