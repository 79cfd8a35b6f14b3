"""Serve the console: one page and the files that it loads, from memory.

The files are read once and each has its own route, so no path from a client ever reaches the file system. The page and
its files contain nothing secret and need no API key. The user types a key into the page, and the page sends it to the
routes that need one.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from servekit.api.routes import health

FOLDER = Path(__file__).parents[2] / "console"
PAGE = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Only scripts and styles from this server run, and the page connects only to this server. So a model's output stays
# text, even if the page has a bug in how it shows it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # cached, but revalidated: a page must not load another version's scripts
}


class _File:
    """An ASGI application that serves one file."""

    def __init__(self, content: bytes, suffix: str, headers: dict[str, str] | None = None) -> None:
        self._tag = f'"{sha256(content).hexdigest()[:32]}"'
        headers = HEADERS | {"ETag": self._tag} | (headers or {})
        self._whole = Response(content, headers=headers, media_type=MEDIA_TYPES[suffix])
        self._unchanged = Response(status_code=304, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._unchanged if self._is_known(Headers(scope=scope)) else self._whole
        await response(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        """Return whether the client has this content. Weak and strong tags compare alike (RFC 9110, section 13.1.2)."""
        tags = ",".join(headers.getlist("if-none-match")).split(",")
        return any(tag.strip().removeprefix("W/") in (self._tag, "*") for tag in tags)


class _Root:
    """GET /: the console for browsers, and the server's name and version for programs."""

    def __init__(self, page: _File) -> None:
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if wants_page(scope):
            await self._page(scope, receive, send)
            return
        response = await health.index(Request(scope, receive))
        response.headers["Vary"] = "Accept"
        await response(scope, receive, send)


def wants_page(scope: Scope) -> bool:
    """Return whether a browser is loading a page. Browsers list HTML in Accept, and other clients do not."""
    return any("text/html" in value.lower() for value in Headers(scope=scope).getlist("accept"))


def is_open(scope: Scope) -> bool:
    """Return whether the request is for the page or a file of it, which need no key."""
    if scope["method"] not in ("GET", "HEAD"):
        return False
    return scope["path"] in _names() or (scope["path"] == "/" and wants_page(scope))


def routes() -> list[Route]:
    """Return the routes of the page at / and /ui, and of its files below /ui. They must precede other routes of /."""
    files = _files()
    page = _File(files[PAGE], ".html", {"Vary": "Accept"})
    apps: dict[str, ASGIApp] = {"/": _Root(page)}
    apps |= {path: _File(files[name], Path(name).suffix) for path, name in _names().items()}
    return [Route(path, app, methods=["GET"]) for path, app in apps.items()]


@cache
def _names() -> dict[str, str]:
    """Map paths to file names. The page's relative links work at / and at /ui only."""
    return {"/ui" if name == PAGE else f"/ui/{name}": name for name in _files()}


@cache
def _files() -> dict[str, bytes]:
    """Read all files of the page, by name."""
    files = sorted(path for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES)
    return {path.name: path.read_bytes() for path in files}
