"""Send requests to a server, and turn every failure into a message for the user."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.request import getproxies, proxy_bypass

import httpx2
import msgspec
from msgspec import Struct

from servekit.client.safe_text import safe_line
from servekit.errors import ConfigError, ServekitError

T = TypeVar("T")
CONNECT_TIMEOUT_S = 10
# An idle stream carries a comment every 15 s by default (--sse-keep-alive-interval).
_SILENCE_TIMEOUT_S = 300
_MAX_ERROR_BYTES = 1 << 16


class RequestFailed(ServekitError):
    """The server did not answer, refused the request or sent an invalid answer; the message is safe to print."""

    def __init__(self, message: str, is_permanent: bool = False) -> None:
        super().__init__(safe_line(message))
        self.is_permanent = is_permanent  # sending the same request again cannot succeed


class Refusal(Struct):
    """An answer with a status other than 200."""

    status: int
    path: str
    message: str
    code: str | None  # of servekit's errors; other servers have codes of their own
    retry_after_s: str | None


class _Error(Struct):
    message: str = ""
    code: str | int | None = None


class _ErrorBody(Struct):
    error: _Error


class HttpClient:
    """HTTP client of the server at a URL. The methods raise RequestFailed; the constructor raises ConfigError."""

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
                timeout=httpx2.Timeout(_SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def get(self, path: str, kind: type[T], max_bytes: int) -> T:
        """Return the decoded answer to a GET, which must come soon."""
        return await self._whole("GET", path, kind, max_bytes, timeout=CONNECT_TIMEOUT_S)

    async def post(self, path: str, body: Mapping[str, Any], kind: type[T], max_bytes: int) -> T:
        """Return the decoded answer to a POST, which may take as long as a model needs."""
        headers = {"Content-Type": "application/json"}
        return await self._whole("POST", path, kind, max_bytes, content=msgspec.json.encode(body), headers=headers)

    async def exchange(self, path: str, content: bytes, max_bytes: int) -> tuple[int, bytes, str | None]:
        """Return the answer to a POST of JSON, whatever its status: that, the body, and the header Retry-After.

        Raises RequestFailed if there is none.
        """
        headers = {"Content-Type": "application/json"}
        with self._explaining_failures():
            async with self._http.stream("POST", path, content=content, headers=headers) as response:
                body = await _read_body(response, max_bytes)
        if len(body) > max_bytes:
            raise RequestFailed(f"the answer to {self.url}{path} is longer than {max_bytes:,} bytes", is_permanent=True)
        return response.status_code, body, response.headers.get("Retry-After")

    async def _whole(self, method: str, path: str, kind: type[T], max_bytes: int, **options: Any) -> T:
        async with self.open_answer(method, path, **options) as response:
            body = await _read_body(response, max_bytes)
        if len(body) > max_bytes:
            raise RequestFailed(f"the answer to {self.url}{path} is longer than {max_bytes:,} bytes", is_permanent=True)
        return decoded(body, kind)

    @asynccontextmanager
    async def open_answer(self, method: str, path: str, **options: Any) -> AsyncIterator[httpx2.Response]:
        """Open a response with status 200. It must not be compressed: a few bytes could decompress to any size."""
        with self._explaining_failures():
            async with self._http.stream(method, path, **options) as response:
                if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
                    raise RequestFailed(
                        f"{self.url} answered with Content-Encoding {encoding}, which servekit does not accept",
                        is_permanent=True,
                    )
                if response.status_code != 200:
                    raise self.explain(await self._refusal(response))
                yield response

    async def _refusal(self, response: httpx2.Response) -> Refusal:
        body = await _read_body(response, _MAX_ERROR_BYTES)
        try:
            error = msgspec.json.decode(body, type=_ErrorBody).error
        except msgspec.DecodeError:
            error = _Error()
        status = response.status_code
        message = error.message or f"{self.url} answered {status} {response.reason_phrase}{self._via_proxy}"
        code = None if error.code is None else str(error.code)
        return Refusal(status, response.request.url.path, message, code, response.headers.get("Retry-After"))

    def explain(self, refusal: Refusal) -> RequestFailed:
        """Return the error for a refusal. Subclasses explain more of them."""
        status, wait_s = refusal.status, refusal.retry_after_s
        if status == 401:
            reason = "rejected the API key" if self._has_key else "requires an API key"
            return RequestFailed(f"the server {reason}; give it with --api-key or SERVEKIT_API_KEY", is_permanent=True)
        if status in (429, 503):
            when = f"in {wait_s} s" if wait_s else "later"
            return RequestFailed(f"{refusal.message} (the server is busy; try again {when})")
        return RequestFailed(refusal.message, is_permanent=400 <= status < 500)

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
                f"cannot connect to {self.url}{self._via_proxy}: no answer within {CONNECT_TIMEOUT_S} s"
            ) from None
        except httpx2.TimeoutException:
            raise RequestFailed(f"{self.url}{self._via_proxy} stopped sending data") from None
        except (httpx2.NetworkError, httpx2.RemoteProtocolError):
            raise RequestFailed(f"the connection to {self.url}{self._via_proxy} was lost") from None
        except httpx2.HTTPError as error:
            raise RequestFailed(
                f"the request to {self.url}{self._via_proxy} failed: {error or type(error).__name__}"
            ) from None


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


def decoded(data: bytes, kind: type[T]) -> T:
    """Decode JSON of a server. Raises RequestFailed."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestFailed(f"the server sent an invalid answer: {error}", is_permanent=True) from None
