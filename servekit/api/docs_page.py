"""GET /docs: show the API on one page where every route can be tried. It loads nothing from other servers."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import servekit
from servekit import __version__
from servekit.api.endpoint import Endpoint, models_of
from servekit.api.openapi import document

Json = dict[str, Any]

_FOLDER = Path(servekit.__file__).parent / "assets" / "docs_page"
_STYLE = (_FOLDER / "style.css").read_text()
_SCRIPT = (_FOLDER / "try.js").read_text()
_SCRIPT_HASH = b64encode(sha256(_SCRIPT.encode()).digest()).decode()
# Only the script in this page runs, and it connects only to this server.
_POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_SCRIPT_HASH}'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(api: Json, base_url: str, model_name: str) -> str:
    """Return the HTML page for an OpenAPI document. `model_name` is for the examples."""
    sections = "".join(
        _section(path, method, operation, api, base_url, model_name)
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>servekit API</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        f"<h1>servekit {__version__}</h1>"
        "<p>All routes of this server. The same for programs: <a href=/openapi.json>/openapi.json</a>.</p>"
        "<p><label>API key, if this server needs one: <input id=key type=password autocomplete=off></label></p>"
        f"{sections}<script>{_SCRIPT}</script>"
    )


def _section(path: str, method: str, operation: Json, api: Json, base_url: str, model_name: str) -> str:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    parts = [
        f"<h2><b>{method.upper()}</b> {escape(path)}</h2>",
        *(f"<p>{_inline(paragraph)}</p>" for paragraph in operation["description"].split("\n\n")),
        _form(path.replace("{model}", quote(model_name)), method, content and content["example"], base_url),
    ]
    if content:
        parts += [_fields(name, api) for name in _names(content["schema"])]
    for kind, answer in operation["responses"]["200"].get("content", {}).items():
        names = _names(answer["schema"])
        parts.append(f"<details><summary>Answer as {kind}: {', '.join(names)}</summary>")
        parts += [_fields(name, api) for name in names]
        parts.append("</details>")
    return "".join(parts)


def _form(path: str, method: str, example: Json | None, base_url: str) -> str:
    """Return the route as a curl command, and a form that sends the request."""
    if method == "get" and path == "/generate_stream":
        path += "?prompt=What+color+is+the+sky%3F&max_tokens=20"
    command = f"curl '{base_url}{path}'" if "?" in path else f"curl {base_url}{path}"
    body = ""
    if method == "post":
        text = json.dumps(example) if example else ""
        command += f" -d '{text}'"
        rows = 3 if example else 1
        body = f"<textarea name=body rows={rows} aria-label='request body' spellcheck=false>{escape(text)}</textarea>"
    return (
        f"<pre>{escape(command)}</pre><form data-method={method.upper()}>"
        f"<input name=path value='{escape(path)}' aria-label='path' spellcheck=false>{body}"
        "<button>Send</button><pre class=answer hidden></pre></form>"
    )


def _inline(text: str) -> str:
    """Return a line of text as HTML, with `code` in backticks as code elements."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def _names(schema: Json) -> list[str]:
    """Return the names of the objects that a schema refers to."""
    found = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
    for key in ("oneOf", "anyOf"):
        found += [name for inner in schema.get(key, ()) for name in _names(inner)]
    return found + (_names(schema["items"]) if isinstance(schema.get("items"), dict) else [])


def _fields(name: str, api: Json) -> str:
    schema = api["components"]["schemas"][name]
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code><td>{escape(_kind(described))}"
        f"<td>{_inline(described.get('description', ''))}"
        for field, described in schema.get("properties", {}).items()
    )
    return f"<h3>{escape(name)}</h3><p>{_inline(schema.get('description', ''))}</p><table>{rows}</table>"


def _kind(schema: Json) -> str:
    """Return a field's type and bounds in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(kind for kind in map(_kind, schema["anyOf"]) if kind != "null")
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items') or {})}"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]}" for key, sign in limits.items() if key in schema]
    return " ".join([str(schema.get("type", "anything")), *bounds])


def routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    """Return the route of the page. Its content is made at the first request."""

    @cache
    def api() -> Json:
        return document(endpoints)

    async def docs(request: Request) -> Response:
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        base_url, model_name = str(request.base_url).rstrip("/"), models_of(request).config.model_name
        return HTMLResponse(page(api(), base_url, model_name), headers=headers)

    return [Route("/docs", docs)]
