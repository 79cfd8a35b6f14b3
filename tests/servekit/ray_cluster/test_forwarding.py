"""A client's request on its way to a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from servekit.errors import RequestTooLarge
from servekit.ray_cluster.forwarding import ForwardedRequest, forwarded, read_body


def scope(path: str, raw_path: bytes | None, **fields: Any) -> dict[str, Any]:
    return {"method": "GET", "path": path, "raw_path": raw_path, "query_string": b"", "headers": [], **fields}


def receiver(*messages: dict[str, Any]) -> Callable[[], Awaitable[Any]]:
    left = list(messages)

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    return receive


def test_a_request_is_passed_on_as_it_was_written_but_for_what_belongs_to_the_connection() -> None:
    headers = [(b"Host", b"example.org"), (b"content-length", b"2"), (b"authorization", b"Bearer k\xe9")]
    received = scope("/v1/models/a/b", b"/v1/models/a%2Fb", query_string=b"x=a%20b", headers=headers)
    assert forwarded(received, b"{}") == ForwardedRequest(
        "GET", "/v1/models/a%2Fb?x=a%20b", [("authorization", "Bearer ké")], b"{}"
    )


def test_the_route_prefix_of_the_application_is_not_passed_on() -> None:
    assert forwarded(scope("/llm/v1/models", b"/llm/v1/models", root_path="/llm"), b"").path == "/v1/models"
    assert forwarded(scope("/a b", None), b"").path == "/a%20b", "a server may leave raw_path out"


@pytest.mark.parametrize("target", ["@example.org/", "http://example.org/", ".example.org/", "*"])
def test_a_request_line_without_a_path_does_not_reach_another_server(target: str) -> None:
    assert forwarded(scope(target, target.encode()), b"").path == f"/{target}"


async def test_a_body_is_read_to_its_end() -> None:
    more = {"type": "http.request", "body": b"ab", "more_body": True}
    assert await read_body(receiver(more, {"type": "http.request", "body": b"c"}), 3) == b"abc"
    assert await read_body(receiver(more, {"type": "http.disconnect"}), 3) is None, "the client went before its end"


async def test_a_body_over_the_limit_is_refused_before_all_of_it_has_come() -> None:
    more = {"type": "http.request", "body": b"ab", "more_body": True}
    with pytest.raises(RequestTooLarge, match="more than 3 bytes"):
        await read_body(receiver(more, more), 3)
