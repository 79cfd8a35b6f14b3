"""Answers for paths and methods without a route."""

from __future__ import annotations

import json

import pytest

from tests.support.asgi import KEY, ask, bearer, make_app, shared


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("/v1/chat/completion", "did you mean POST /v1/chat/completions"),
        ("/chat/completions", "did you mean POST /v1/chat/completions"),
        ("/completions", "POST /v1/completions"),
        ("/v1/generate", "POST /generate"),
        ("/v1/model", "GET /v1/models"),
        ("/Health", "GET /health"),
        ("/healthz", "GET /health"),
        ("/generate/", "POST /generate"),
    ],
)
async def test_unknown_path_names_the_nearest_routes(path: str, suggestion: str) -> None:
    answer = await ask(make_app(), "POST", path)
    message = answer.error["message"]
    assert answer.status == 404 and answer.error["code"] == "not_found"
    assert message.startswith(f"there is no route {path}; ") and suggestion in message
    assert message.endswith("GET /docs describes all routes")


async def test_path_like_no_route_gets_no_suggestion() -> None:
    for path in ("/favicon.ico", "/wp-login.php", "/" + "x" * 5000):
        message = (await ask(make_app(), "GET", path)).error["message"]
        assert "did you mean" not in message and len(message) < 200


async def test_wrong_method_names_the_supported_ones() -> None:
    answer = await ask(shared(), "DELETE", "/v1/completions", bearer("canary-key"))
    assert answer.status == 405 and answer.headers["allow"] == "POST"
    assert answer.error["message"] == "/v1/completions does not support DELETE; it supports POST"


async def test_errors_below_ollamas_paths_are_one_text() -> None:
    """Also those that come before any route: of a path that is not there, and of the key."""
    unknown = await ask(make_app(), "POST", "/api/nothing")
    assert unknown.status == 404 and json.loads(unknown.body)["error"].startswith("there is no route /api/nothing; ")
    without_key = await ask(shared(), "POST", "/api/nothing")
    assert without_key.status == 401 and "an API key is required" in json.loads(without_key.body)["error"]


async def test_errors_below_anthropics_paths_are_of_its_kinds() -> None:
    unknown = await ask(make_app(), "POST", "/v1/messages/batches")
    told = json.loads(unknown.body)
    assert (unknown.status, told["type"], told["error"]["type"]) == (404, "error", "not_found_error")
    assert told["error"]["message"].startswith("there is no route /v1/messages/batches; ")
    without_key = await ask(shared(), "POST", "/v1/messages")
    assert json.loads(without_key.body)["error"]["type"] == "authentication_error"
    bad = await ask(shared(), "POST", "/v1/messages", ("x-api-key", KEY), body=b"{}")
    told = json.loads(bad.body)["error"]
    assert (bad.status, told["type"], told["param"]) == (400, "invalid_request_error", "messages")
