"""No tenant delays the files and batches of another by more than one short call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from servekit.api.batch_storage import BatchStorage
from servekit.batches import store as batch_store
from servekit.batches.records import BatchRecord, FileRecord, LineResult
from servekit.config import ServeConfig
from servekit.errors import WorkerNotReady

TIMEOUT_S = 60


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[BatchStorage]:
    made = BatchStorage(ServeConfig(batch_dir=str(tmp_path)))
    yield made
    await made.stop()


def file(storage: BatchStorage, file_id: str, tenant: str, **changes: Any) -> FileRecord:
    storage.store.path_of(file_id).write_bytes(b"x")
    values = {"name": "in", "purpose": "batch", "num_bytes": 1, "created_s": 1, "expires_s": 9999, **changes}
    return FileRecord(id=file_id, tenant=tenant, **values)


async def test_tenants_take_turns_with_the_store(storage: BatchStorage) -> None:
    """Before, calls of all tenants were made in the order in which they came."""
    go, called = threading.Event(), list[str]()

    def work(tenant: str) -> None:
        go.wait(TIMEOUT_S)
        called.append(tenant)

    tasks = [asyncio.create_task(storage.call("greedy", work, "greedy")) for _ in range(10)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(storage.call("modest", work, "modest")))
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT_S)
    assert called.index("modest") <= 2 and len(called) == 11


async def test_a_large_upload_is_made_durable_beside_the_calls_of_others(
    storage: BatchStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may take seconds for it. Before, the calls of all tenants waited for that."""
    go, begun = threading.Event(), threading.Event()

    def sync(_: int) -> None:
        begun.set()
        go.wait(TIMEOUT_S)

    monkeypatch.setattr(batch_store.os, "fsync", sync)
    adding = asyncio.create_task(storage.add_file(file(storage, "file-1", "greedy")))
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.to_thread(begun.wait, TIMEOUT_S)
        looking = storage.call("modest", storage.store.files, "modest", None, None, True, 9)
        try:
            assert await asyncio.wait_for(looking, 10) == []
        except TimeoutError:
            go.set()  # so that the storage can stop
            raise
        assert await storage.call("greedy", storage.store.file, "greedy", "file-1") is None, "it is not durable yet"
        go.set()
        await adding
    assert storage.store.file("greedy", "file-1") is not None


async def test_a_large_output_is_deleted_in_pieces_while_nobody_sees_it(
    storage: BatchStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To delete an output of gigabytes takes seconds. Before, the calls of all tenants waited for that."""
    monkeypatch.setattr(batch_store, "DELETED_ROWS", 2)
    store = storage.store
    fields = {"key_digest": "", "endpoint": "/v1/completions", "input_file_id": "file-1", "completion_window": "24h"}
    store.add_batch(BatchRecord(id="batch_1", tenant="greedy", created_s=1, expires_s=99, **fields))
    store.begin("batch_1", 9, [], 2)
    store.add_results([LineResult("batch_1", line, b"answer\n", False) for line in range(1, 10)])
    store.end("batch_1", "completed", ("file-out", "file-err"), 9999, 3)
    output = store.file("greedy", "file-out")
    assert output is not None
    deleting = asyncio.create_task(storage.delete_file(output))
    num_left = [len(store.answered_lines("batch_1"))]
    async with asyncio.timeout(TIMEOUT_S):
        while not deleting.done():
            num_left.append(len(await storage.call("modest", store.answered_lines, "batch_1")))
            if num_left[-1] < num_left[0]:
                assert await storage.call("modest", store.file, "greedy", "file-out") is None
                assert await storage.call("modest", store.files, "greedy", None, None, True, 9) == []
    await deleting
    assert {7, 5, 3, 1} & set(num_left), "the other tenant had its turns meanwhile"
    assert store.answered_lines("batch_1") == set() and store.usage("greedy").num_bytes == 0


async def test_a_deletion_that_a_crash_interrupted_is_finished(storage: BatchStorage) -> None:
    added = file(storage, "file-1", "a")
    await storage.add_file(added)
    storage.store.hide_file(added)
    assert storage.store.usage("a").num_files == 1
    assert storage.store.delete_expired(0, 0) == 1 and storage.store.usage("a").num_files == 0


async def test_old_answers_are_deleted_a_few_at_a_time(storage: BatchStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "DELETED_ROWS", 2)
    monkeypatch.setattr(batch_store, "DELETED_ENTRIES", 3)
    store = storage.store
    for number in range(7):
        await storage.add_file(file(storage, f"file-{number}", "a", expires_s=10))
    assert [store.delete_expired(20, 0) for _ in range(4)] == [3, 3, 1, 0]
    fields = {"key_digest": "", "endpoint": "/v1/completions", "input_file_id": "file-1", "completion_window": "24h"}
    for number in range(4):
        store.add_batch(BatchRecord(id=f"batch_{number}", tenant="a", created_s=1, expires_s=99, **fields))
        store.begin(f"batch_{number}", 3, [], 2)
    store.add_results([LineResult("batch_0", line, b"answer\n", line == 3) for line in range(1, 4)])
    for number in range(4):
        store.end(f"batch_{number}", "completed", (f"file-out{number}", f"file-err{number}"), 9999, 3)
    assert store.delete_expired(20, 50) == 1 and len(store.answered_lines("batch_0")) == 1
    assert [store.delete_expired(20, 50) for _ in range(3)] == [3, 1, 0]
    assert store.usage("a").num_batches == 0 and not store.answered_lines("batch_0")


async def test_calls_that_wait_for_their_turn_fail_when_the_server_stops(tmp_path: Path) -> None:
    storage, go = BatchStorage(ServeConfig(batch_dir=str(tmp_path))), threading.Event()
    running = asyncio.create_task(storage.call("a", go.wait, TIMEOUT_S))
    waiting = asyncio.create_task(storage.call("a", storage.store.open_batches))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(storage.stop())
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait_for(asyncio.gather(running, stopping), TIMEOUT_S)
    with pytest.raises(WorkerNotReady, match="shutting down"):
        await waiting
