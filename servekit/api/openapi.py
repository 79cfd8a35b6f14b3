"""GET /openapi.json and /docs: every route from the same table that the router has, every field from its schema."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from servekit import __version__
from servekit.api.http import Endpoint, respond
from servekit.errors import InternalError, RequestError, ServekitError, WorkerError

_REFERENCE = "#/components/schemas/{name}"
# Refusals that not every route knows.
_OF_WISHES = {400, 504}  # where there is something to ask for
_OF_BODIES = {404, 413, 415}
_OF_SWITCHES = {409}
_TELLS_MORE = {  # a header that comes with a refusal
    401: {"WWW-Authenticate": {"schema": {"type": "string"}, "description": "how to show a key"}},
    429: (_LATER := {"Retry-After": {"schema": {"type": "integer"}, "description": "try again after so many seconds"}}),
    503: _LATER,
}
_STATES = ("/health", "/ready")  # open to everybody, and their 503 is an answer
_SWITCHES = ("/profile/start", "/profile/stop")  # which may be where one wants them already
Json = dict[str, Any]


class ErrorDetail(msgspec.Struct):
    """What was wrong, whose doing it was, which field it is about, and a word for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct):
    """Every refusal."""

    error: ErrorDetail
    error_type: str | msgspec.UnsetType = msgspec.UNSET  # TGI's word, when asked with `inputs`


def document(endpoints: Sequence[Endpoint]) -> Json:
    """An OpenAPI 3.1 document, whose schemas are msgspec's."""
    kinds = [kind for endpoint in endpoints for kind in (*endpoint.takes, *endpoint.gives, *endpoint.streams)]
    _, components = msgspec.json.schema_components([*kinds, ErrorResponse], ref_template=_REFERENCE)
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "servekit", "version": __version__, "description": "One model, three doors."},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(endpoint: Endpoint, components: Json) -> Json:
    description = inspect.getdoc(endpoint.handler) or ""
    name = f"{endpoint.method.lower()}_{endpoint.handler.__name__}"
    operation: Json = {"operationId": name, "summary": description.split("\n")[0], "description": description}
    parameters = [
        {"name": part[1:-1].removesuffix(":path"), "in": "path", "required": True, "schema": {"type": "string"}}
        for part in endpoint.path.split("/")
        if part.startswith("{")
    ]
    if endpoint.takes and endpoint.method == "GET":
        fields = components[endpoint.takes[0].__name__]["properties"]
        parameters += [
            {"name": field, "in": "query", **_in_query(schema)}
            for field, schema in fields.items()
            if field not in endpoint.not_in_query
        ]
    elif endpoint.takes:
        content = {"schema": _any_of(endpoint.takes), "example": endpoint.example}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    if parameters:
        operation["parameters"] = parameters
    answers: Json = {}
    if endpoint.gives:
        answers["application/json"] = {"schema": _any_of(endpoint.gives)}
    if endpoint.streams:
        answers["text/event-stream"] = {"schema": _any_of(endpoint.streams)}
    operation["responses"] = {
        "200": {"description": "OK", **({"content": answers} if answers else {})},
        **dict(_refusals(endpoint)),
    }
    return operation


def _in_query(schema: Json) -> Json:
    """A field of the query string: lists by repetition, and an object written as JSON."""
    is_object = any("$ref" in kind or kind.get("type") == "object" for kind in schema.get("anyOf", [schema]))
    return {"content": {"application/json": {"schema": schema}}} if is_object else {"schema": schema}


def _any_of(kinds: tuple[Any, ...]) -> Json:
    """The schema of what is of one kind or another. What is of one may by chance be of another, too."""
    schemas, _ = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def _refusals(endpoint: Endpoint) -> Iterator[tuple[str, Json]]:
    """(status, what it means) of each with which a route may refuse: what servekit.errors says, of whom it concerns."""
    content = {"application/json": {"schema": _any_of((ErrorResponse,))}}
    kinds: list[type[ServekitError]] = [*_leaves(RequestError), *_leaves(WorkerError), InternalError]
    for status in sorted({kind.status for kind in kinds}):
        if status in _OF_WISHES and not endpoint.takes:
            continue
        has_body = endpoint.method == "POST" and endpoint.takes
        if status in _OF_BODIES and not has_body and not (status == 404 and "{" in endpoint.path):
            continue
        if status in _OF_SWITCHES and endpoint.path not in _SWITCHES:
            continue
        if endpoint.path in _STATES and status in (401, 403, 429, 503):
            if status == 503:
                yield "503", {"description": "Not now."}
            continue
        meanings = [(inspect.getdoc(kind) or "").split("\n")[0] for kind in kinds if kind.status == status]
        told = {"description": " ".join(meanings), "content": content}
        yield str(status), told | ({"headers": _TELLS_MORE[status]} if status in _TELLS_MORE else {})


def _leaves(kind: type[ServekitError]) -> Iterator[type[ServekitError]]:
    """The errors below one of the tree that stand for themselves."""
    below = kind.__subclasses__()
    yield from (leaf for inner in below for leaf in _leaves(inner)) if below else (kind,)


# -- the page ----------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 3rem; border-top: 1px solid #8886; padding-top: 1rem } h2 b { color: #28c }
pre { overflow-x: auto; padding: .8rem; background: #8882; border-radius: .4rem }
table { border-collapse: collapse; font-size: .9rem }
td { padding: .2rem .8rem .2rem 0; vertical-align: top }
details { margin: .5rem 0 } summary { cursor: pointer }
"""


def page(api: Json, base_url: str) -> str:
    """The document for people: plain HTML that loads nothing and runs nothing."""
    operations = [(path, method, told) for path, methods in api["paths"].items() for method, told in methods.items()]
    body = "".join(_section(path, method, told, api, base_url) for path, method, told in operations)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>servekit</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        f"<h1>servekit {__version__}</h1><p>Every route. For programs: <a href=/openapi.json>/openapi.json</a>.</p>"
        f"{body}"
    )


def _section(path: str, method: str, told: Json, api: Json, base_url: str) -> str:
    parts = [f"<h2><b>{method.upper()}</b> {escape(path)}</h2><p>{escape(told['description'])}</p>"]
    content = told.get("requestBody", {}).get("content", {}).get("application/json")
    if content:
        body = json.dumps(content["example"])
        parts.append(f"<pre>curl {escape(base_url)}{escape(path)} -d '{escape(body)}'</pre>")
        parts += [_fields(name, api) for name in _names(content["schema"])]
    for kind, answer in told["responses"]["200"].get("content", {}).items():
        names = ", ".join(_names(answer["schema"]))
        parts.append(f"<details><summary>answers {kind}: {names}</summary>")
        parts += [_fields(name, api) for name in _names(answer["schema"])]
        parts.append("</details>")
    return "".join(parts)


def _names(schema: Json) -> list[str]:
    """The objects that a schema refers to."""
    found = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
    for key in ("oneOf", "anyOf"):
        found += [name for inner in schema.get(key, ()) for name in _names(inner)]
    return found + (_names(schema["items"]) if isinstance(schema.get("items"), dict) else [])


def _fields(name: str, api: Json) -> str:
    schema = api["components"]["schemas"][name]
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code><td>{escape(_kind(told))}<td>{escape(told.get('description', ''))}"
        for field, told in schema.get("properties", {}).items()
    )
    return f"<h3>{escape(name)}</h3><p>{escape(schema.get('description', ''))}</p><table>{rows}</table>"


def _kind(schema: Json) -> str:
    """A field's schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(kind for inner in schema["anyOf"] if (kind := _kind(inner)) != "null")
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items') or {})}"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]}" for key, sign in limits.items() if key in schema]
    return " ".join([str(schema.get("type", "anything")), *bounds])


def routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    """The two routes, for the endpoints of all others."""
    api = document(endpoints)

    async def openapi_json(_: Request) -> Response:
        return respond(api)

    async def docs(request: Request) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(page(api, str(request.base_url).rstrip("/")), headers=headers)

    return [Route("/openapi.json", openapi_json), Route("/docs", docs)]
