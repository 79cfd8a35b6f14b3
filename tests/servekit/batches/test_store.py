"""Claims about what is stored. A second store of the same folder is the server after a crash."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from servekit.batches.records import BatchRecord, FileRecord, LineError, LineResult
from servekit.batches.store import BatchStore, OwnerLock
from servekit.errors import ConfigError, StorageFailed


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(str(tmp_path / "batches"))


def file(file_id: str = "file-1", **changes: Any) -> FileRecord:
    values = {"tenant": "a", "name": "in", "purpose": "batch", "num_bytes": 10, "created_s": 1, "expires_s": 100}
    return FileRecord(id=file_id, **{**values, **changes})


def batch(batch_id: str = "batch_1", **changes: Any) -> BatchRecord:
    values: dict[str, Any] = {
        "tenant": "a",
        "key_digest": "",
        "endpoint": "/v1/completions",
        "input_file_id": "file-1",
        "completion_window": "24h",
        "created_s": 1,
        "expires_s": 86401,
        **changes,
    }
    return BatchRecord(id=batch_id, **values)


def add_file(store: BatchStore, added: FileRecord) -> None:
    store.path_of(added.id).write_bytes(b"x" * added.num_bytes)
    store.sync_content(added.id)
    store.add_file(added)


def begun(store: BatchStore, num_lines: int = 3) -> BatchRecord:
    add_file(store, file())
    store.add_batch(batch())
    store.begin("batch_1", num_lines, [], 2)
    return found(store)


def found(store: BatchStore) -> BatchRecord:
    record = store.batch("a", "batch_1")
    assert record is not None
    return record


def result(line: int, content: bytes = b"{}\n", is_error: bool = False) -> LineResult:
    return LineResult("batch_1", line, content, is_error)


def test_a_line_keeps_its_first_answer_whatever_comes_later(store: BatchStore) -> None:
    begun(store)
    store.add_results([result(1, b"first\n"), result(2, b"bad\n", is_error=True)])
    store.add_results([result(1, b"again\n"), result(1, b"again\n", is_error=True), result(3, b"third\n")])
    record = found(store)
    assert (record.num_completed, record.num_failed, record.num_bytes) == (2, 1, 16)
    ended = store.end("batch_1", "completed", ("file-out", "file-err"), 100, 5)
    assert ended is not None and (ended.output_file_id, ended.error_file_id) == ("file-out", "file-err")
    assert store.read_results("batch_1", False, 0, 1000) == (b"first\nthird\n", 3)
    assert store.read_results("batch_1", True, 0, 1000) == (b"bad\n", 2)
    assert store.add_results([result(2, b"late\n")]) is None and found(store).num_completed == 2


def test_what_was_committed_is_there_after_a_crash(store: BatchStore, tmp_path: Path) -> None:
    begun(store)
    store.add_results([result(2)])
    after = BatchStore(str(tmp_path / "batches"))  # the first one was not closed
    assert after.answered_lines("batch_1") == {2} and found(after).num_completed == 1
    assert [each.id for each in after.open_batches()] == ["batch_1"]


def test_a_transaction_that_fails_changes_nothing(store: BatchStore) -> None:
    begun(store)
    with pytest.raises(StorageFailed, match="--batch-dir"):
        store.add_results([result(1), LineResult("batch_1", 2, None, False)])  # type: ignore[arg-type]
    assert store.answered_lines("batch_1") == set() and found(store).num_completed == 0


def test_a_full_disk_is_a_clear_error(store: BatchStore) -> None:
    begun(store)
    pages = store._database.execute("PRAGMA page_count").fetchone()[0]
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFailed, match="full"):
        store.add_results([result(1, b"x" * 2**20)])
    assert store.answered_lines("batch_1") == set()


def test_a_batch_is_cancelled_only_before_its_end_and_by_its_tenant(store: BatchStore) -> None:
    begun(store)
    assert store.cancel("b", "batch_1", 3) is None and found(store).status == "in_progress"
    cancelled = store.cancel("a", "batch_1", 3)
    assert cancelled is not None and (cancelled.status, cancelled.cancelling_s) == ("cancelling", 3)
    store.end("batch_1", "cancelled", ("o", "e"), 100, 4)
    again = store.cancel("a", "batch_1", 5)
    assert again is not None and (again.status, again.cancelled_s, again.cancelling_s) == ("cancelled", 4, 3)
    assert again.output_file_id is None, "no line was answered"
    assert store.open_batches() == []


def test_a_batch_that_is_cancelled_while_it_is_checked_stays_so(store: BatchStore) -> None:
    store.add_batch(batch())
    store.cancel("a", "batch_1", 3)
    store.begin("batch_1", 3, [LineError("invalid_json_line", "wrong", 2)], 4)
    assert (found(store).status, found(store).num_lines, found(store).errors) == ("cancelling", 0, [])
    store.finalize("batch_1", 5)
    assert found(store).status == "cancelling"


def test_a_batch_with_wrong_lines_fails(store: BatchStore) -> None:
    store.add_batch(batch())
    store.begin("batch_1", 0, [LineError("empty_file", "empty")], 4)
    assert (found(store).status, found(store).failed_s) == ("failed", 4)


def test_pages_list_what_a_tenant_has(store: BatchStore) -> None:
    for number in range(5):
        add_file(store, file(f"file-{number}", purpose="batch" if number else "batch_output"))
        store.add_batch(batch(f"batch_{number}"))
    add_file(store, file("file-of-b", tenant="b"))
    newest = [each.id for each in store.files("a", None, None, True, 2)]
    assert newest == ["file-4", "file-3"]
    assert [each.id for each in store.files("a", None, "file-3", True, 9)] == ["file-2", "file-1", "file-0"]
    assert [each.id for each in store.files("a", "batch", None, False, 9)] == [f"file-{n}" for n in range(1, 5)]
    assert [each.id for each in store.batches("a", "batch_3", 2)] == ["batch_2", "batch_1"]
    assert store.files("c", None, None, True, 9) == [] and store.file("b", "file-1") is None


def test_usage_counts_uploads_and_answers_once(store: BatchStore) -> None:
    begun(store)
    store.add_results([result(1, b"12345\n")])
    store.end("batch_1", "completed", ("file-out", "file-err"), 100, 5)
    add_file(store, file("file-of-b", tenant="b"))
    own, total = store.usage("a"), store.usage()
    assert (own.num_files, own.num_batches, own.num_bytes) == (1, 1, 16)
    assert (total.num_files, total.num_bytes) == (2, 26)
    output = store.file("a", "file-out")
    assert output is not None
    store.delete_file(output)
    assert store.usage("a").num_bytes == 10 and store.read_results("batch_1", False, 0, 9) == (b"", 0)


def test_old_files_and_batches_are_deleted_but_not_what_is_in_use(store: BatchStore) -> None:
    begun(store)
    assert store.delete_expired(1000, 1000) == 0, "the batch has not ended, and reads its file"
    store.add_results([result(1)])
    store.end("batch_1", "completed", ("file-out", "file-err"), 2000, 5)
    assert store.delete_expired(50, 5) == 0
    assert store.delete_expired(1000, 5) == 1 and store.file("a", "file-1") is None
    assert not store.path_of("file-1").exists()
    assert store.delete_expired(1000, 6) == 1 and store.batch("a", "batch_1") is None
    assert store.file("a", "file-out") is None and store.answered_lines("batch_1") == set()


def test_a_batch_is_kept_as_long_as_its_answers(store: BatchStore) -> None:
    begun(store)
    store.add_results([result(1)])
    store.end("batch_1", "completed", ("file-out", "file-err"), 105, 50)
    assert store.delete_expired(60, 5) == 0 and store.file("a", "file-out") is not None
    assert store.delete_expired(100, 51) == 2, "the batch, and its input file"


def test_content_without_an_entry_is_swept_up_when_it_is_old(store: BatchStore) -> None:
    add_file(store, file())
    for name, changed_s in (("file-old", 10), ("file-new", 1000)):
        store.path_of(name).write_bytes(b"x")
        os.utime(store.path_of(name), (changed_s, changed_s))
    os.utime(store.path_of("file-1"), (10, 10))
    store.sweep_uploads(500)
    assert sorted(path.name for path in store.uploads.iterdir()) == ["file-1", "file-new"]


def test_one_process_owns_a_folder_until_it_lets_go(store: BatchStore) -> None:
    first, second = OwnerLock(store.directory), OwnerLock(store.directory)
    assert first.try_acquire() and not second.try_acquire()
    first.release()
    first.release()
    assert second.try_acquire()
    second.release()


def test_only_the_owner_of_the_process_can_read_the_folder(store: BatchStore) -> None:
    assert store.directory.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_used_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="batch_dir"):
        BatchStore(str(tmp_path / "file"))
    BatchStore(str(tmp_path / "newer")).close()
    with sqlite3.connect(tmp_path / "newer" / "batches.sqlite3") as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match="format 99"):
        BatchStore(str(tmp_path / "newer"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "batches.sqlite3").write_bytes(b"x" * 4096)
    with pytest.raises(ConfigError, match="not a database"):
        BatchStore(str(tmp_path / "broken"))
