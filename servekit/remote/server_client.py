"""Send requests to the server of a remote model over HTTP, and read its responses as they arrive.

The address comes from the operator's model file only. Redirects are not followed, cookies are not kept, and proxies
come from that file, not from the environment. So neither clients nor servers can decide where requests go.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from servekit.aio.daemon_thread import run_in_daemon_thread
from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.errors import ConfigError, InvalidRequest, RemoteFailed, RemoteUnavailable
from servekit.protocol.frames import Bytes
from servekit.remote.api_keys import check_api_key
from servekit.remote.failure import Failure, of_status
from servekit.remote.openai_request import RemoteRequest
from servekit.remote.openai_stream import message_of
from servekit.remote.settings import ServerSettings

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger("servekit")

MAX_ERROR_BYTES = 2**16
MAX_MODELS_BYTES = 2**20
BYTES_PER_SLICE = 2**18  # of messages that are encoded without a pause; that takes less than a millisecond
KEEP_ALIVE_S = 30.0  # that an idle connection stays open


class _Model(Struct):
    id: str
    max_model_len: int | None = None


class _Models(Struct):
    data: list[_Model]


class ServerClient:
    """A client of one server. Call `start`, and then `close`."""

    def __init__(self, model: str, settings: ServerSettings, socket: str | None = None) -> None:
        """`model` is the model's name here. With `socket`, requests go through the socket file at this path.

        Raises ConfigError if the API key or httpx2 is missing.
        """
        self._socket = socket
        self._model = model
        self._settings = settings
        self._url = settings.url.rstrip("/")
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        key = check_api_key(model, settings)
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        try:
            import httpx2
        except ImportError:
            raise ConfigError(
                f"the model {model!r} runs on another server, which needs the package httpx2: "
                "in the checkout of servekit run: pip install '.[remote]'"
            ) from None
        try:
            httpx2.URL(self._url)
        except httpx2.InvalidURL as error:
            raise ConfigError(f"the model {model!r}: remote: url = {self._url!r}: {error}") from None
        self._httpx2 = httpx2
        self._http: httpx2.AsyncClient | None = None

    async def start(self) -> None:
        """Make the HTTP client. It opens no connection."""
        self._http = await run_in_daemon_thread(
            lambda _: self._make_client(), None
        )  # reading certificates takes tens of milliseconds

    def _make_client(self) -> Any:
        httpx2, settings = self._httpx2, self._settings
        verify: ssl.SSLContext | bool = ssl.create_default_context() if self._url.startswith("https:") else False
        limits = httpx2.Limits(max_keepalive_connections=settings.max_connections, keepalive_expiry=KEEP_ALIVE_S)
        return httpx2.AsyncClient(
            headers=self._headers,
            # The caller bounds all other waits, and the number of connections.
            timeout=httpx2.Timeout(None, connect=settings.connect_timeout),
            limits=limits,
            verify=verify,
            proxy=settings.proxy,
            transport=None if self._socket is None else httpx2.AsyncHTTPTransport(uds=self._socket, limits=limits),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            follow_redirects=False,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    @asynccontextmanager
    async def open(
        self, path: str, body: Sequence[Bytes] | None, request_id: str = "", *, busy_statuses: Container[int] = ()
    ) -> AsyncIterator[httpx2.Response]:
        """Send a POST with this body, which may be in parts, or a GET, and yield the response.

        A large body is sent in slices, so that the event loop stays free. Leaving the block closes the connection.
        `busy_statuses` mean that the server works but is overloaded, even without a Retry-After.

        Raises Failure for an answer with a status other than 200, and for a connection that fails, also in the block.
        """
        assert self._http is not None, "start was called"
        is_clean = request_id and request_id.isascii() and request_id.isprintable()
        headers = {"X-Request-Id": request_id} if is_clean else {}
        httpx2, method = self._httpx2, "GET" if body is None else "POST"
        try:
            content: Any = body
            if body is not None:
                headers["Content-Length"] = str(sum(map(len, body)))
                content = _slices(body)
            request = self._http.stream(method, self._url + path, content=content, headers=headers)
            async with request as response:
                if response.status_code != 200:
                    raise await self._refused(response, busy_statuses)
                encoding = response.headers.get("Content-Encoding", "identity")
                if encoding != "identity":
                    raise Failure(self._failed(f"answered in the encoding {encoding[:40]!r}"), "failed")
                yield response
        except httpx2.ConnectTimeout:
            raise self._unreachable(f"within {self._settings.connect_timeout:g} s (connect_timeout)") from None
        except httpx2.ConnectError as error:
            log.debug("the server of the model %s cannot be reached: %s", self._model, error)
            raise self._unreachable("at present") from None
        except (httpx2.NetworkError, httpx2.RemoteProtocolError):
            raise Failure(self._failed("closed the connection before its answer ended"), "failed", may_repeat=True)  # noqa: B904
        except httpx2.HTTPError as error:
            raise Failure(self._failed(f"cannot be asked ({type(error).__name__})"), "failed", may_repeat=True)  # noqa: B904

    async def _refused(self, response: httpx2.Response, busy_statuses: Container[int]) -> Failure:
        body = await read_up_to(response, MAX_ERROR_BYTES)
        message, code = message_of(body)
        retry_after = response.headers.get("Retry-After") or ("1" if response.status_code in busy_statuses else None)
        failure = of_status(self._model, response.status_code, message, code, retry_after)
        if isinstance(failure.error, RemoteFailed):  # the operator may see the server's message in the log
            level = logging.WARNING if response.status_code < 500 else logging.DEBUG  # the breaker logs the others
            shown = message or response.headers.get("Location", "")[:200]
            log.log(level, "the server of the model %s answered %d: %s", self._model, response.status_code, shown)
        return failure

    def _unreachable(self, when: str) -> Failure:
        message = f"the server of the model {self._model!r} cannot be reached {when}; please try again later"
        return Failure(RemoteUnavailable(message, retry_after_s=5), "unreachable", may_repeat=True)

    def _failed(self, what: str) -> RemoteFailed:
        return RemoteFailed(f"the server of the model {self._model!r} {what}")

    async def look_up(self, name: str, timeout_s: float) -> int | None:
        """Return the tokens of the longest sequence of a model there, if the server reports it. Logs errors."""
        assert self._http is not None, "start was called"
        try:
            async with pause_tolerant_timeout(timeout_s), self._http.stream("GET", f"{self._url}/models") as response:
                body = await read_up_to(response, MAX_MODELS_BYTES)
            if response.status_code not in (200, 404):  # not all servers list their models
                log.warning(
                    "the server of the model %s answered %d when it was asked for its models%s: %s",
                    self._model,
                    response.status_code,
                    " (is its API key right? api_key_env)" if response.status_code in (401, 403) else "",
                    message_of(body)[0] or response.headers.get("Location", "")[:200],
                )
                return None
            models = {each.id: each for each in msgspec.json.decode(body, type=_Models).data}
        except (TimeoutError, self._httpx2.HTTPError) as error:
            reason = str(error) or type(error).__name__
            log.warning("the server of the model %s does not answer yet: %s", self._model, reason)
            return None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None  # not all servers list their models
        if name not in models:
            log.warning("the server of the model %s does not list %r; it lists %s", self._model, name, [*models][:20])
            return None
        return models[name].max_model_len


async def _slices(parts: Sequence[Bytes]) -> AsyncIterator[bytes]:
    """Yield a body in slices. Short parts are joined."""
    joined = bytearray()
    for each in parts:
        part = memoryview(each)
        for start in range(0, len(part), BYTES_PER_SLICE):
            joined += part[start : start + BYTES_PER_SLICE]
            if len(joined) >= BYTES_PER_SLICE:
                yield bytes(joined)
                joined.clear()
                await asyncio.sleep(0)
    if joined:
        yield bytes(joined)


async def read_up_to(response: httpx2.Response, max_bytes: int) -> bytearray:
    """Return the body, or the beginning of a longer one. It is not copied as a whole."""
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > max_bytes:
            break
    del body[max_bytes:]
    return body


async def encode(request: RemoteRequest) -> list[Bytes]:
    """Return the body of a request, in parts. Of a long conversation, the event loop encodes a slice at a time."""
    try:
        head = msgspec.json.encode(request.fields)
        if request.messages is None:
            return [head]
        parts: list[Bytes] = [head[:-1], b',"messages":[']
        num_bytes = 0
        for number, message in enumerate(request.messages):
            parts += [b"," if number else b"", msgspec.json.encode(message)]
            num_bytes += len(parts[-1])
            if num_bytes > BYTES_PER_SLICE:
                await asyncio.sleep(0)
                num_bytes = 0
    except (UnicodeEncodeError, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"the request cannot be sent to the model's server: {_shown(error)}") from None
    return [*parts, b"]}"]


def _shown(error: Any) -> str:
    return str(error)[:200]
