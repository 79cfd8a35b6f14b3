"""No route decodes a large body on the event loop: it goes to the process for that, or is refused, whatever it has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from msgspec import Struct

from servekit.api.app import ENDPOINTS
from servekit.api.endpoint import Endpoint
from servekit.api.schemas.packed_body import MAX_INLINE_BYTES, Refusal
from tests.support.asgi import ask, make_app

# The routes that never read a body. What a client sends is discarded.
WITHOUT_BODY = {
    "/v1/models/{model:path}/load",
    "/v1/models/{model:path}/unload",
    "/v1/batches/{batch_id}/cancel",
    "/profile/start",
    "/profile/stop",
    "/api/pull",
    "/api/push",
    "/api/create",
    "/api/copy",
}
LARGE = 2 * MAX_INLINE_BYTES
POSTS = {endpoint.path: endpoint for endpoint in ENDPOINTS if endpoint.method not in ("GET", "DELETE")}


class RecordingDecoder:
    """Stands for the process that decodes large bodies. It refuses each one."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def decode(
        self, body: bytes | bytearray, kinds: Sequence[type[Struct]], max_prompt_tokens: int, tenant: str
    ) -> Refusal:
        self.lengths.append(len(body))
        return Refusal(kinds[0].__name__, False, "refused by the test", None, "invalid_request")


@pytest.fixture
def decoded_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the JSON that this process decodes."""
    lengths: list[int] = []

    def watch(module: Any, name: str) -> None:
        decode = getattr(module, name)

        def watched(data: Any, *arguments: Any, **options: Any) -> Any:
            lengths.append(len(data))
            return decode(data, *arguments, **options)

        monkeypatch.setattr(module, name, watched)

    watch(msgspec.json, "decode")
    watch(json, "loads")
    return lengths


def large(endpoint: Endpoint) -> bytes:
    """Return a body of the route, with more white space than a body on the event loop may have."""
    text = json.dumps(endpoint.example or {"model": "a"}).encode()
    return text + b" " * (LARGE - len(text))


@pytest.mark.parametrize("path", sorted(POSTS))
async def test_a_large_body_is_decoded_in_the_process_for_that_or_refused(
    path: str, tmp_path: Path, decoded_here: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(batch_dir=str(tmp_path))
    app.state.body_decoder = decoder = RecordingDecoder()
    monkeypatch.setattr(type(app.state.models), "max_prompt_tokens", 1000)
    body = large(POSTS[path])
    decoded_here.clear()
    answer = await ask(app, "POST", path.replace("{", "").replace(":path}", "").replace("}", ""), body=body)
    assert max(decoded_here, default=0) <= MAX_INLINE_BYTES, "it was decoded on the event loop"
    if path in WITHOUT_BODY:
        assert not decoder.lengths
    elif path == "/v1/files":
        assert answer.status == 400 and "form" in answer.error["message"]  # the test below sends forms
    elif not decoder.lengths:
        assert answer.status == 413 and f"the limit is {MAX_INLINE_BYTES}" in answer.error["message"]
    else:
        assert decoder.lengths == [len(body)] and "refused by the test" in answer.body.decode()


@pytest.mark.parametrize(("path", "field", "status"), [("/predict", "image", 400), ("/v1/files", "file", 200)])
async def test_a_large_form_is_not_decoded_as_a_whole(
    path: str, field: str, status: int, tmp_path: Path, decoded_here: list[int]
) -> None:
    app = make_app(batch_dir=str(tmp_path))
    app.state.body_decoder = decoder = RecordingDecoder()
    content = b'{"a": 1}' * LARGE
    fields = {"purpose": "batch"} if path == "/v1/files" else {}
    form = httpx2.Request("POST", "http://x", data=fields, files={field: ("a", content)})
    decoded_here.clear()
    answer = await ask(app, "POST", path, ("content-type", form.headers["content-type"]), body=form.read())
    assert max(decoded_here, default=0) <= MAX_INLINE_BYTES and not decoder.lengths
    assert answer.status == status, answer.body  # no model classifies images in this test


def test_a_route_that_reads_no_body_is_one() -> None:
    assert POSTS.keys() >= WITHOUT_BODY
    assert all(endpoint.takes == () for path, endpoint in POSTS.items() if path in WITHOUT_BODY)


def test_the_watch_sees_what_is_decoded(decoded_here: list[int]) -> None:
    msgspec.json.decode(b"{}" + b" " * LARGE)
    assert decoded_here == [LARGE + 2]
