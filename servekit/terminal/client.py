"""Send requests to a server, parse its answers, and turn every failure into a message for the user."""

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
from servekit.observability.live_frames import LiveState
from servekit.terminal.event_parser import MAX_EVENT_BYTES, EventParser, EventTooLong
from servekit.terminal.safe_text import safe_line

T = TypeVar("T")
_CONNECT_TIMEOUT_S = 10
# An idle stream carries a comment every 15 s by default (--sse-keep-alive-interval).
_SILENCE_TIMEOUT_S = 300
_MAX_ERROR_BYTES = 1 << 16
_DONE = b"[DONE]"  # the last event of a stream in OpenAI's format


class RequestFailed(ServekitError):
    """The server did not answer, refused the request or sent an invalid answer; the message is safe to print."""

    def __init__(self, message: str, is_permanent: bool = False) -> None:
        super().__init__(safe_line(message))
        self.is_permanent = is_permanent  # sending the same request again cannot succeed


class AnswerChunk(Struct):
    """A part of an answer."""

    text: str
    num_tokens: int  # of the answer up to this chunk
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


class _StreamChunk(Struct):
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
    """Client of the server at a URL. The methods raise RequestFailed; the constructor raises ConfigError."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url if "://" in url else f"http://{url}"
        self._has_key = bool(api_key)
        if api_key and not api_key.isascii():
            raise ConfigError("the API key contains characters that are not ASCII; check --api-key or SERVEKIT_API_KEY")
        address = _address(self.url)
        if address is None:
            raise ConfigError(f"{url!r} is not the address of a server; it takes http://HOST:PORT")
        is_local = _is_loopback(address.host)
        proxy = None if is_local or proxy_bypass(address.host) else _proxy(address.scheme)
        try:
            # Connections to this machine never use a proxy.
            self._http = httpx2.AsyncClient(
                base_url=address,
                headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
                timeout=httpx2.Timeout(_SILENCE_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
                trust_env=not is_local,
                proxy=proxy,
            )
            # For messages: ` through the proxy http://proxy:3128`, without the user and password of the proxy's URL.
            self._via_proxy = f" through the proxy {httpx2.URL(proxy).copy_with(userinfo=b'')}" if proxy else ""
        except (ImportError, ValueError, OSError, httpx2.InvalidURL) as error:
            raise ConfigError(
                "the proxy (HTTP_PROXY and similar variables) or the certificates (SSL_CERT_FILE) cannot be used: "
                + safe_line(str(error))
            ) from None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def model_name(self) -> str:
        """Return the name of the model that the server serves."""
        models = await self._get("/v1/models", _Models)
        return models.data[0].id if models.data else ""

    async def live_state(self) -> LiveState:
        """Return one frame of the live view."""
        return await self._get("/ui/state", LiveState)

    async def live_states(self, silence_timeout_s: float) -> AsyncGenerator[LiveState]:
        """Yield frames of the live view until the server closes the stream or sends nothing for `silence_timeout_s`."""
        timeout = httpx2.Timeout(silence_timeout_s, connect=_CONNECT_TIMEOUT_S)
        async with aclosing(self._events("GET", "/ui/events", timeout=timeout)) as events:
            async for data in events:
                yield _decoded(data, LiveState)

    async def chat(self, messages: list[dict[str, str]], sampling: Mapping[str, Any]) -> AsyncGenerator[AnswerChunk]:
        """Yield the answer in chunks. Closing the generator closes the connection, which aborts the request."""
        body = {
            "messages": [{name: _encodable(text) for name, text in message.items()} for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **sampling,
        }
        num_tokens, is_complete = 0, False
        async with aclosing(self._events("POST", "/v1/chat/completions", json=body)) as events:
            async for data in events:
                if data == _DONE:
                    break
                chunk = _decoded(data, _StreamChunk)
                if chunk.error is not None:
                    raise RequestFailed(f"the answer failed: {chunk.error.message}")
                for choice in chunk.choices:
                    text = choice.delta.content or ""
                    # Servers that send no usage usually send one token per chunk.
                    num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens + bool(text)
                    is_complete = is_complete or choice.finish_reason is not None
                    yield AnswerChunk(text, num_tokens, choice.finish_reason)
        if not is_complete:
            raise RequestFailed("the answer is incomplete: the server closed the connection")

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _get(self, path: str, kind: type[T]) -> T:
        async with self._answer("GET", path, timeout=_CONNECT_TIMEOUT_S) as response:
            body = await _read_body(response, MAX_EVENT_BYTES)
        if len(body) > MAX_EVENT_BYTES:
            raise RequestFailed(
                f"the answer to {self.url}{path} is longer than {MAX_EVENT_BYTES:,} bytes", is_permanent=True
            )
        return _decoded(body, kind)

    async def _events(self, method: str, path: str, **options: Any) -> AsyncGenerator[bytes]:
        parser = EventParser()
        async with self._answer(method, path, **options) as response:
            async for chunk in response.aiter_raw():
                for data in parser.feed(chunk):
                    yield data

    @asynccontextmanager
    async def _answer(self, method: str, path: str, **options: Any) -> AsyncIterator[httpx2.Response]:
        """Open a response with status 200. It must not be compressed: a few bytes could decompress to any size."""
        with self._explaining_failures():
            async with self._http.stream(method, path, **options) as response:
                if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
                    raise RequestFailed(
                        f"{self.url} answered with Content-Encoding {encoding}, which servekit does not accept",
                        is_permanent=True,
                    )
                if response.status_code != 200:
                    raise await self._refusal(response)
                yield response

    async def _refusal(self, response: httpx2.Response) -> RequestFailed:
        """Explain a status other than 200."""
        body = await _read_body(response, _MAX_ERROR_BYTES)
        try:
            error = msgspec.json.decode(body, type=_Refusal).error
        except msgspec.DecodeError:
            error = _Error()
        status = response.status_code
        message = error.message or f"{self.url} answered {status} {response.reason_phrase}{self._via_proxy}"
        wait_s = response.headers.get("Retry-After")
        if status == 401:
            reason = "rejected the API key" if self._has_key else "requires an API key"
            return RequestFailed(f"the server {reason}; give it with --api-key or SERVEKIT_API_KEY", is_permanent=True)
        if error.code == "chat_template_missing":
            return RequestFailed(
                "this model has no chat template, so it cannot chat; start the server with --chat-template FILE, "
                "or send plain prompts to /v1/completions or in the web console",
                is_permanent=True,
            )
        if error.code == "context_length_exceeded":
            return RequestFailed(f"{message} (/new starts a new conversation)", is_permanent=True)
        if status == 404 and "/ui/" in str(response.request.url):
            return RequestFailed(
                f"{self.url} has no live view: the server was started with --no-ui, or it is not servekit",
                is_permanent=True,
            )
        if status in (429, 503):
            return RequestFailed(f"{message} (the server is busy; try again {f'in {wait_s} s' if wait_s else 'later'})")
        return RequestFailed(message, is_permanent=400 <= status < 500)

    @contextmanager
    def _explaining_failures(self) -> Iterator[None]:
        try:
            yield
        except httpx2.ConnectError:
            remedy = (
                "NO_PROXY lists hosts to reach without a proxy" if self._via_proxy else "`servekit serve` starts one"
            )
            raise RequestFailed(f"no server answers at {self.url}{self._via_proxy}; {remedy}") from None
        except httpx2.ConnectTimeout:
            raise RequestFailed(
                f"cannot connect to {self.url}{self._via_proxy}: no answer within {_CONNECT_TIMEOUT_S} s"
            ) from None
        except httpx2.TimeoutException:
            raise RequestFailed(f"{self.url}{self._via_proxy} stopped sending data") from None
        except (httpx2.NetworkError, httpx2.RemoteProtocolError):
            raise RequestFailed(f"the connection to {self.url}{self._via_proxy} was lost") from None
        except httpx2.HTTPError as error:
            raise RequestFailed(
                f"the request to {self.url}{self._via_proxy} failed: {error or type(error).__name__}"
            ) from None
        except EventTooLong as error:
            raise RequestFailed(f"{self.url} sent an invalid answer: {error}") from None


def _address(url: str) -> httpx2.URL | None:
    """Parse the URL of a server; return None if it is not a usable one."""
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
    """Return the proxy for this scheme from the environment."""
    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


async def _read_body(response: httpx2.Response, max_bytes: int) -> bytes:
    """Return the body; of a longer body, return a part that is longer than `max_bytes`."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > max_bytes:
            break
    return bytes(body)


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestFailed(f"the server sent an invalid answer: {error}", is_permanent=True) from None


def _encodable(text: str) -> str:
    """Replace surrogates, which stand for bytes of the terminal's input that are not UTF-8."""
    return text.encode(errors="replace").decode()
