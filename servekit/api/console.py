"""The console: a page of ours and what it loads, from memory.

Its files are read once and each has a route of its own, so that no path a client writes ever comes near the file
system. The page holds nothing that anybody could want, so it needs no key: its user types that in, and the page shows
it to the routes that do.
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

from servekit.api import about

FOLDER = Path(__file__).parents[1] / "console"
PAGE = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Nothing but our own scripts and styles, and nobody to be asked but this server: what a model says cannot become more
# than text, whatever mistake the page makes with it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, and asked for again: a page of one version must not load another's scripts
}


class _File:
    """One file, as a plain ASGI application."""

    def __init__(self, content: bytes, suffix: str, headers: dict[str, str] | None = None) -> None:
        self._tag = f'"{sha256(content).hexdigest()[:32]}"'
        headers = HEADERS | {"ETag": self._tag} | (headers or {})
        self._whole = Response(content, headers=headers, media_type=MEDIA_TYPES[suffix])
        self._unchanged = Response(status_code=304, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._unchanged if self._is_known(Headers(scope=scope)) else self._whole
        await response(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        """Whether the client has it: weak and strong tags are compared alike (RFC 9110, section 13.1.2)."""
        tags = ",".join(headers.getlist("if-none-match")).split(",")
        return any(tag.strip().removeprefix("W/") in (self._tag, "*") for tag in tags)


class _Root:
    """GET /: the page to who would show it to somebody, and to programs who answers here."""

    def __init__(self, page: _File) -> None:
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if wants_page(scope):
            await self._page(scope, receive, send)
            return
        response = await about.index(Request(scope, receive))
        response.headers["Vary"] = "Accept"
        await response(scope, receive, send)


def wants_page(scope: Scope) -> bool:
    """Whether it is a browser that shows what it gets: all of them name HTML, and nothing else does."""
    return any("text/html" in value.lower() for value in Headers(scope=scope).getlist("accept"))


def is_open(scope: Scope) -> bool:
    """Whether somebody without a key is asking for the page, or for what it loads."""
    if scope["method"] not in ("GET", "HEAD"):
        return False
    return scope["path"] in _names() or (scope["path"] == "/" and wants_page(scope))


def routes() -> list[Route]:
    """The page at / and /ui, its files below that. To be asked before GET / of those who serve no page."""
    files = _files()
    page = _File(files[PAGE], ".html", {"Vary": "Accept"})
    apps: dict[str, ASGIApp] = {"/": _Root(page)}
    apps |= {path: _File(files[name], Path(name).suffix) for path, name in _names().items()}
    return [Route(path, app, methods=["GET"]) for path, app in apps.items()]


@cache
def _names() -> dict[str, str]:
    """Each file's name by its path. The page's own links are good at /ui and at / alone."""
    return {"/ui" if name == PAGE else f"/ui/{name}": name for name in _files()}


@cache
def _files() -> dict[str, bytes]:
    """By name: all that is there of the kinds that a page has."""
    files = sorted(path for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES)
    return {path.name: path.read_bytes() for path in files}
