"""Claims about /v1/files and /v1/batches, without an engine: what is stored, for whom, and what is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette

from servekit.api import batch_storage
from servekit.api.routes import files
from tests.support.asgi import KEY, Answer, ask, bearer, guarded, make_app

LINES = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
OTHER = bearer("narrow")  # of another tenant


def form(content: bytes = LINES, **fields: str) -> tuple[tuple[str, str], bytes]:
    request = httpx2.Request(
        "POST", "http://x", data={"purpose": "batch", **fields}, files={"file": ("in.jsonl", content)}
    )
    return ("content-type", request.headers["content-type"]), request.read()


async def upload(app: Starlette, *headers: tuple[str, str], content: bytes = LINES, **fields: str) -> Answer:
    content_type, body = form(content, **fields)
    return await ask(app, "POST", "/v1/files", content_type, *headers, body=body)


async def create(app: Starlette, file_id: str, *headers: tuple[str, str], **changes: Any) -> Answer:
    wanted = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h", **changes}
    return await ask(app, "POST", "/v1/batches", *headers, body=json.dumps(wanted).encode())


def read(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    told: dict[str, Any] = json.loads(answer.body)
    return told


async def test_without_a_folder_the_routes_say_what_to_set() -> None:
    app = make_app()
    for method, path in (
        ("POST", "/v1/files"),
        ("GET", "/v1/files/x"),
        ("GET", "/v1/batches"),
        ("POST", "/v1/batches"),
    ):
        answer = await ask(app, method, path)
        assert (answer.status, answer.error["code"]) == (404, "batches_disabled")
        assert "--batch-dir" in answer.error["message"] and "servekit batch" in answer.error["message"]


async def test_a_tenant_sees_its_own_files_and_batches_only(tmp_path: Path) -> None:
    app, own = guarded(batch_dir=str(tmp_path)), bearer(KEY)
    file = read(await upload(app, own))
    batch = read(await create(app, file["id"], own))
    assert batch["status"] == "validating"
    for method, path in (
        ("GET", f"/v1/files/{file['id']}"),
        ("GET", f"/v1/files/{file['id']}/content"),
        ("DELETE", f"/v1/files/{file['id']}"),
        ("GET", f"/v1/batches/{batch['id']}"),
        ("POST", f"/v1/batches/{batch['id']}/cancel"),
    ):
        assert (await ask(app, method, path, OTHER)).status == 404, path
        assert (await ask(app, method, path)).status == 401, path
    assert (await create(app, file["id"], OTHER)).status == 404
    assert read(await ask(app, "GET", "/v1/files", OTHER))["data"] == []
    assert read(await ask(app, "GET", "/v1/batches", OTHER))["data"] == []
    assert [each["id"] for each in read(await ask(app, "GET", "/v1/batches", own))["data"]] == [batch["id"]]
    content = await ask(app, "GET", f"/v1/files/{file['id']}/content", own)
    assert (content.status, content.body) == (200, LINES)
    in_use = await ask(app, "DELETE", f"/v1/files/{file['id']}", own)
    assert (in_use.status, in_use.error["code"]) == (400, "file_in_use")
    assert read(await ask(app, "POST", f"/v1/batches/{batch['id']}/cancel", own))["status"] == "cancelling"


async def test_a_large_file_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    app, content = make_app(batch_dir=str(tmp_path)), bytes(range(256)) * 12_000
    file = read(await upload(app, content=content))
    assert (await ask(app, "GET", f"/v1/files/{file['id']}/content")).body == content
    assert read(await ask(app, "DELETE", f"/v1/files/{file['id']}"))["deleted"]
    assert list((tmp_path / "files").iterdir()) == []
    assert (await ask(app, "GET", f"/v1/files/{file['id']}")).status == 404


@pytest.mark.parametrize(
    ("fields", "content", "status", "param"),
    [
        ({"purpose": "fine-tune"}, LINES, 400, "purpose"),
        ({"purpose": ""}, LINES, 400, "purpose"),
        ({"other": "x" * 5000}, LINES, 400, "form"),
        ({}, b"x" * 100_001, 413, None),
    ],
)
async def test_what_is_refused_leaves_nothing(
    tmp_path: Path, fields: dict[str, str], content: bytes, status: int, param: str | None
) -> None:
    app = make_app(batch_dir=str(tmp_path), batch_max_file_bytes=100_000)
    answer = await upload(app, content=content, **fields)
    assert (answer.status, answer.error["param"]) == (status, param)
    assert list((tmp_path / "files").iterdir()) == [] and app.state.uploads.total == 0


async def test_bodies_that_are_no_complete_form_are_refused(tmp_path: Path) -> None:
    app = make_app(batch_dir=str(tmp_path))
    content_type, body = form()
    assert (await ask(app, "POST", "/v1/files", body=LINES)).error["param"] == "content-type"
    assert "boundary" in (await ask(app, "POST", "/v1/files", content_type, body=body[:-5])).error["message"]
    assert list((tmp_path / "files").iterdir()) == []


async def test_a_body_that_goes_on_behind_its_form_is_refused(tmp_path: Path) -> None:
    app = make_app(batch_dir=str(tmp_path), batch_max_file_bytes=100_000)
    content_type, body = form()
    assert (await ask(app, "POST", "/v1/files", content_type, body=body + b"x" * 1000)).status == 200
    for wrong in (body + b"x" * 120_000, b"x" * 120_000 + b"\r\n" + body):
        assert (await ask(app, "POST", "/v1/files", content_type, body=wrong)).status == 413
    assert len(list((tmp_path / "files").iterdir())) == 1


async def test_one_tenant_fills_only_half_of_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app, own = guarded(batch_dir=str(tmp_path), batch_max_total_bytes=10_000), bearer(KEY)
    read(await upload(app, own, content=b"x" * 3_000))
    full = await upload(app, own, content=b"x" * 3_000)
    assert (full.status, full.error["code"], full.headers["x-should-retry"]) == (507, "storage_full", "false")
    read(await upload(app, OTHER, content=b"x" * 3_000))
    monkeypatch.setattr(batch_storage, "MAX_BATCHES", 4)
    file = read(await ask(app, "GET", "/v1/files", own))["data"][0]
    answers = [(await create(app, file["id"], own)).status for _ in range(3)]
    assert answers == [200, 200, 507]


async def test_uploads_at_the_same_time_do_not_exceed_the_storage_together(tmp_path: Path) -> None:
    app = make_app(batch_dir=str(tmp_path), batch_max_total_bytes=10_000)
    answers = await asyncio.gather(*(upload(app, content=b"x" * 3_000) for _ in range(6)))
    assert sorted(answer.status for answer in answers) == [200] * 3 + [507] * 3
    assert len(list((tmp_path / "files").iterdir())) == 3


async def test_uploads_at_the_same_time_are_bounded(tmp_path: Path) -> None:
    app = make_app(batch_dir=str(tmp_path))
    app.state.uploads.take("", files.MAX_UPLOADS)
    answer = await upload(app)
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"input_file_id": "file-unknown"}, "file_id"),
    ],
)
async def test_a_batch_that_cannot_run_is_refused(tmp_path: Path, changes: dict[str, Any], param: str) -> None:
    app = make_app(batch_dir=str(tmp_path))
    answer = await create(app, read(await upload(app))["id"], **changes)
    assert answer.status in (400, 404) and (answer.error["param"] or "").startswith(param)


async def test_lists_come_in_pages(tmp_path: Path) -> None:
    app = make_app(batch_dir=str(tmp_path))
    ids = [read(await upload(app))["id"] for _ in range(3)]

    async def page(query: bytes) -> dict[str, Any]:
        received: list[Any] = []
        scope: dict[str, Any] = {
            "type": "http",
            "method": "GET",
            "path": "/v1/files",
            "raw_path": b"/v1/files",
            "query_string": query,
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [],
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            received.append(message)

        await app(scope, receive, send)
        found: dict[str, Any] = json.loads(received[1]["body"])
        return found

    first = await page(b"limit=2&order=asc&purpose=batch")
    assert ([each["id"] for each in first["data"]], first["has_more"]) == (ids[:2], True)
    second = await page(f"limit=2&order=asc&after={first['last_id']}".encode())
    assert ([each["id"] for each in second["data"]], second["has_more"]) == (ids[2:], False)
    assert "limit" in (await page(b"limit=0"))["error"]["message"]
