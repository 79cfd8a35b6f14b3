"""The server as a terminal sees it: what it answers, and in words what keeps it from answering."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, TypeVar
from urllib.request import getproxies, proxy_bypass

import httpx2
import msgspec
from msgspec import Struct

from servekit.errors import ConfigError, ServekitError
from servekit.live_view import LiveState
from servekit.terminal.event_parser import MOST_BYTES, EventParser, EventTooLong
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
        if api_key and not api_key.isascii():
            raise ConfigError("the API key has characters that no server's key has; it takes ASCII")
        address = _address(self.url)
        if address is None:
            raise ConfigError(f"{url!r} is no address of a server; it takes http://HOST:PORT")
        is_near = _is_loopback(address.host)
        proxy = None if is_near or proxy_bypass(address.host) else _proxy(address.scheme)
        try:
            # What leads from this machine to itself takes no way through another.
            self._http = httpx2.AsyncClient(
                base_url=address,
                headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
                timeout=httpx2.Timeout(_SILENCE_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
                trust_env=not is_near,
                proxy=proxy,
            )
            # As in ` through the proxy http://proxy:3128`, without the password that may stand in it.
            self._way = f" through the proxy {httpx2.URL(proxy).copy_with(userinfo=b'')}" if proxy else ""
        except (ImportError, ValueError, OSError, httpx2.InvalidURL) as error:
            raise ConfigError(
                "the environment's proxy (HTTP_PROXY and its like) or certificates (SSL_CERT_FILE) cannot be used: "
                + safe_line(str(error))
            ) from None

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
        async with self._answer("GET", path, timeout=_CONNECT_TIMEOUT_S) as response:
            body = await _beginning(response, MOST_BYTES)
        if len(body) > MOST_BYTES:
            raise ServerTrouble(f"{self.url}{path} is longer than {MOST_BYTES:,} bytes", is_lasting=True)
        return _decoded(body, kind)

    async def _events(self, method: str, path: str, **how: Any) -> AsyncGenerator[bytes]:
        parser = EventParser()
        async with self._answer(method, path, **how) as response:
            async for piece in response.aiter_raw():
                for data in parser.feed(piece):
                    yield data

    @asynccontextmanager
    async def _answer(self, method: str, path: str, **how: Any) -> AsyncIterator[httpx2.Response]:
        """One with status 200, not compressed: a few bytes of a compressed one could become any number."""
        with self._in_words():
            async with self._http.stream(method, path, **how) as response:
                if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
                    raise ServerTrouble(f"{self.url} answers in {encoding}, which was not asked for", is_lasting=True)
                if response.status_code != 200:
                    raise await self._refusal(response)
                yield response

    async def _refusal(self, response: httpx2.Response) -> ServerTrouble:
        """In words why the status is not 200."""
        body = await _beginning(response, _MOST_ERROR_BYTES)
        try:
            error = msgspec.json.decode(body, type=_Refusal).error
        except msgspec.DecodeError:
            error = _Error()
        status = response.status_code
        said = error.message or f"{self.url} answers {status} {response.reason_phrase}{self._way}"
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
            remedy = "NO_PROXY has the hosts to go to without one" if self._way else "`servekit serve` starts a server"
            raise ServerTrouble(f"nothing answers at {self.url}{self._way}; {remedy}") from None
        except httpx2.ConnectTimeout:
            raise ServerTrouble(
                f"{self.url} cannot be reached{self._way}: no answer in {_CONNECT_TIMEOUT_S} s"
            ) from None
        except httpx2.TimeoutException:
            raise ServerTrouble(f"{self.url} has gone silent{self._way}") from None
        except (httpx2.NetworkError, httpx2.RemoteProtocolError):
            raise ServerTrouble(f"the connection to {self.url}{self._way} broke off") from None
        except httpx2.HTTPError as error:
            raise ServerTrouble(f"{self.url} cannot be asked{self._way}: {error or type(error).__name__}") from None
        except EventTooLong as error:
            raise ServerTrouble(f"{self.url} sends what cannot be read: {error}") from None


def _address(url: str) -> httpx2.URL | None:
    """None if no server can be there."""
    try:
        address = httpx2.URL(url)
    except (httpx2.InvalidURL, UnicodeEncodeError):
        return None
    usable = address.scheme in ("http", "https") and bool(address.host) and (address.port or 0) < 1 << 16
    return address if usable and not any(character.isspace() for character in url) else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _proxy(scheme: str) -> str | None:
    """The environment's."""
    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


async def _beginning(response: httpx2.Response, most_bytes: int) -> bytes:
    """The body, or more than `most_bytes` of it."""
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > most_bytes:
            break
    return bytes(body)


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerTrouble(f"the server sends what cannot be read: {error}", is_lasting=True) from None


def _encodable(text: str) -> str:
    """A terminal's bytes need not be UTF-8, and become halves of characters where they are not."""
    return text.encode(errors="replace").decode()
