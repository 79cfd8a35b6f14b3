"""Keep files and batches on disk: an SQLite database, and a folder with the uploaded files.

Every change is one transaction, and is on disk when the method returns (`synchronous = FULL`; answers to several lines
share one). The primary key of `result` is (batch, line): a line that is computed again after a crash cannot be answered
twice. Several processes may open the same folder. One of them owns it (`OwnerLock`), and runs the batches.

All methods block, and are called in one thread of each process. They raise StorageFailed.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from servekit.batches.records import OPEN_STATUSES, BatchRecord, End, FileRecord, LineError, LineResult
from servekit.errors import ConfigError, StorageFailed

T = TypeVar("T")

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 10.0  # for a transaction of another process
HIDDEN = 0  # `expires_s` of a file that is being deleted: no file is found with it, and after a crash it has expired
# One call deletes about so much at most, because the calls of other tenants wait for it.
DELETED_ROWS, DELETED_BYTES = 500, 2**22  # of answers
DELETED_ENTRIES = 20  # files and batches
_SCHEMA = """
CREATE TABLE file (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
    batch_id TEXT NOT NULL, num_bytes INTEGER NOT NULL, expires_s INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE INDEX file_of_tenant ON file (tenant, number);
CREATE TABLE batch (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, status TEXT NOT NULL,
    input_file_id TEXT NOT NULL, num_bytes INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE INDEX batch_of_tenant ON batch (tenant, number);
CREATE INDEX batch_of_status ON batch (status, number);
CREATE TABLE result (
    batch_id TEXT NOT NULL, is_error INTEGER NOT NULL, line INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (batch_id, line)
);
CREATE INDEX result_of_file ON result (batch_id, is_error, line);
"""


class Usage(msgspec.Struct, frozen=True):
    """What is stored: of one tenant, or of all."""

    num_files: int
    num_batches: int
    num_bytes: int


class BatchStore:
    """The files and batches in one folder."""

    def __init__(self, directory: str) -> None:
        """Open the folder, or make it. Raises ConfigError if it cannot be written, or is of another version."""
        self.directory = Path(directory).absolute()
        self.uploads = self.directory / "files"
        try:
            # The folder contains prompts and answers, so no other user may read it.
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.uploads.mkdir(mode=0o700, exist_ok=True)
            self._database = sqlite3.connect(
                self.directory / "batches.sqlite3",
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,  # several threads use it, one at a time
            )
            version = self._prepare()
        except (OSError, sqlite3.Error, StorageFailed) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"batch_dir = {directory!r}: {reason}; choose a directory on a local disk that can be written"
            ) from None
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"batch_dir = {directory!r} has the format {version}, and this version of servekit writes "
                f"{SCHEMA_VERSION}; choose another directory"
            )

    def _prepare(self) -> int:
        execute = self._database.execute
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        with self._transaction():
            if not execute("PRAGMA user_version").fetchone()[0]:
                for statement in _SCHEMA.split(";\n"):
                    execute(statement)
                execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            version: int = execute("PRAGMA user_version").fetchone()[0]
        return version

    def close(self) -> None:
        """Close the database. Idempotent."""
        self._database.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit the changes of the block, or none of them if it raises."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self.failure(error) from None

    def _rows(self, statement: str, *values: Any) -> list[Any]:
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self.failure(error) from None

    def failure(self, error: Exception) -> StorageFailed:
        """Return the error for clients and for the log."""
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return StorageFailed(f"files and batches cannot be written ({reason}); free space on the disk of --batch-dir")

    # -- usage ---------------------------------------------------------------------------------------------------------

    def usage(self, tenant: str | None = None) -> Usage:
        """Return what a tenant has stored, or all."""
        # The bytes of answers are counted with their batch, from the first line on, and not with its output files.
        ((num_files, in_files),) = self._rows(
            "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM file "
            "WHERE batch_id = '' AND (?1 IS NULL OR tenant = ?1)",
            tenant,
        )
        ((num_batches, in_batches),) = self._rows(
            "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM batch WHERE ?1 IS NULL OR tenant = ?1", tenant
        )
        return Usage(num_files, num_batches, in_files + in_batches)

    # -- files ---------------------------------------------------------------------------------------------------------

    def path_of(self, file_id: str) -> Path:
        """Return where the content of an uploaded file is. The id must be one that this server made."""
        return self.uploads / file_id

    def sync_content(self, file_id: str) -> None:
        """Make the complete content of an upload durable. Any thread may call this: it does not use the database."""
        try:
            with self.path_of(file_id).open("rb") as content:
                os.fsync(content.fileno())
            _sync_directory(self.uploads)
        except OSError as error:
            raise self.failure(error) from None

    def add_file(self, file: FileRecord, check_room: Callable[[], None] = lambda: None) -> None:
        """Add a file whose content is durable (`sync_content`).

        `check_room` raises if there is no room. It is called in the transaction, so nothing else is stored in between.
        """
        with self._transaction():
            check_room()
            self._insert_file(file)

    def _insert_file(self, file: FileRecord) -> None:
        self._database.execute(
            "INSERT INTO file (id, tenant, purpose, batch_id, num_bytes, expires_s, record) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file.id, file.tenant, file.purpose, file.batch_id, file.num_bytes, file.expires_s, _encode(file)),
        )

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """Return a tenant's file, if it has one of this id."""
        rows = self._rows(
            "SELECT record FROM file WHERE tenant = ? AND id = ? AND expires_s > ?", tenant, file_id, HIDDEN
        )
        return _decode(rows[0][0], FileRecord) if rows else None

    def files(
        self, tenant: str, purpose: str | None, after: str | None, is_newest_first: bool, limit: int
    ) -> list[FileRecord]:
        """Return a tenant's files after the one with the id `after`, in the order of their creation or against it."""
        wanted = "tenant = ? AND expires_s > ?"
        values: list[Any] = [tenant, HIDDEN]
        if purpose is not None:
            wanted, values = wanted + " AND purpose = ?", [*values, purpose]
        return self._page("file", wanted, values, after, is_newest_first, limit, FileRecord)

    def _page(
        self,
        table: str,
        wanted: str,
        values: list[Any],
        after: str | None,
        is_newest_first: bool,
        limit: int,
        kind: type[T],
    ) -> list[T]:
        if after is not None:
            than = "<" if is_newest_first else ">"
            wanted += f" AND number {than} (SELECT number FROM {table} WHERE id = ?)"  # noqa: S608
            values = [*values, after]
        order = "DESC" if is_newest_first else "ASC"
        statement = f"SELECT record FROM {table} WHERE {wanted} ORDER BY number {order} LIMIT ?"  # noqa: S608  # our words
        return [_decode(record, kind) for (record,) in self._rows(statement, *values, limit)]

    def user_of(self, file_id: str) -> str | None:
        """Return the id of a batch that has not ended and reads this file, if there is one."""
        marks = ", ".join("?" * len(OPEN_STATUSES))
        statement = f"SELECT id FROM batch WHERE status IN ({marks}) AND input_file_id = ? LIMIT 1"  # noqa: S608
        rows = self._rows(statement, *OPEN_STATUSES, file_id)
        return rows[0][0] if rows else None

    def hide_file(self, file: FileRecord) -> None:
        """Begin to delete a file: it is not found any more. After a crash, it is deleted like one that has expired."""
        with self._transaction():
            self._database.execute("UPDATE file SET expires_s = ? WHERE id = ?", (HIDDEN, file.id))

    def delete_some_results(self, batch_id: str, is_error: bool) -> bool:
        """Delete some of the answers in one file of a batch. Returns whether more may be left."""
        with self._transaction():
            row_ids, num_bytes = [], 0
            for row_id, size in self._database.execute(
                "SELECT rowid, LENGTH(content) FROM result WHERE batch_id = ? AND is_error = ? LIMIT ?",
                (batch_id, is_error, DELETED_ROWS),
            ):
                row_ids.append((row_id,))
                num_bytes += size
                if num_bytes >= DELETED_BYTES:
                    break
            is_over = len(row_ids) < DELETED_ROWS and num_bytes < DELETED_BYTES
            self._database.executemany("DELETE FROM result WHERE rowid = ?", row_ids)
        return not is_over

    def delete_file(self, file: FileRecord) -> None:
        """Delete a file and its content. The entry is deleted first; content without an entry is removed later."""
        with self._transaction():
            self._database.execute("DELETE FROM file WHERE id = ?", (file.id,))
            if file.batch_id:
                self._database.execute(
                    "DELETE FROM result WHERE batch_id = ? AND is_error = ?", (file.batch_id, file.is_error)
                )
                batch = self._batch(file.batch_id)
                if batch is not None:
                    batch.num_bytes = max(0, batch.num_bytes - file.num_bytes)
                    self._update(batch)
        if not file.batch_id:
            with suppress(OSError):
                self.path_of(file.id).unlink()

    def read_results(self, batch_id: str, is_error: bool, after_line: int, max_bytes: int) -> tuple[bytes, int]:
        """Return the next lines of an output file, one at least if there is one, and the number of the last one."""
        parts, num_bytes = [], 0
        try:
            for line, content in self._database.execute(
                "SELECT line, content FROM result WHERE batch_id = ? AND is_error = ? AND line > ? "
                "ORDER BY line LIMIT 1000",
                (batch_id, is_error, after_line),
            ):
                parts.append(content)
                after_line, num_bytes = line, num_bytes + len(content)
                if num_bytes >= max_bytes:
                    break
        except sqlite3.Error as error:
            raise self.failure(error) from None
        return b"".join(parts), after_line

    # -- batches -------------------------------------------------------------------------------------------------------

    def add_batch(self, batch: BatchRecord) -> None:
        """Add a new batch."""
        with self._transaction():
            self._database.execute(
                "INSERT INTO batch (id, tenant, status, input_file_id, num_bytes, record) VALUES (?, ?, ?, ?, 0, ?)",
                (batch.id, batch.tenant, batch.status, batch.input_file_id, _encode(batch)),
            )

    def batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Return a tenant's batch, if it has one of this id."""
        rows = self._rows("SELECT record FROM batch WHERE tenant = ? AND id = ?", tenant, batch_id)
        return _decode(rows[0][0], BatchRecord) if rows else None

    def batches(self, tenant: str, after: str | None, limit: int) -> list[BatchRecord]:
        """Return a tenant's batches after the one with the id `after`, newest first."""
        return self._page("batch", "tenant = ?", [tenant], after, True, limit, BatchRecord)

    def open_batches(self) -> list[BatchRecord]:
        """Return all batches that have not ended, oldest first."""
        marks = ", ".join("?" * len(OPEN_STATUSES))
        statement = f"SELECT record FROM batch WHERE status IN ({marks}) ORDER BY number"  # noqa: S608
        return [_decode(record, BatchRecord) for (record,) in self._rows(statement, *OPEN_STATUSES)]

    def change(self, batch_id: str, change: Callable[[BatchRecord], None]) -> BatchRecord | None:
        """Let `change` change a batch, in one transaction, and return it; None if it was deleted."""
        with self._transaction():
            batch = self._batch(batch_id)
            if batch is not None:
                change(batch)
                self._update(batch)
        return batch

    def _batch(self, batch_id: str) -> BatchRecord | None:
        row = self._database.execute("SELECT record FROM batch WHERE id = ?", (batch_id,)).fetchone()
        return None if row is None else _decode(row[0], BatchRecord)

    def _update(self, batch: BatchRecord) -> None:
        self._database.execute(
            "UPDATE batch SET status = ?, num_bytes = ?, record = ? WHERE id = ?",
            (batch.status, batch.num_bytes, _encode(batch), batch.id),
        )

    def cancel(self, tenant: str, batch_id: str, now_s: int) -> BatchRecord | None:
        """Let a batch be cancelled, if it has not ended; return it, or None if there is none."""

        def cancel(batch: BatchRecord) -> None:
            if batch.status in ("validating", "in_progress"):
                batch.status, batch.cancelling_s = "cancelling", now_s

        return None if self.batch(tenant, batch_id) is None else self.change(batch_id, cancel)

    def begin(self, batch_id: str, num_lines: int, errors: list[LineError], now_s: int) -> None:
        """Let a checked batch begin, or fail if its file has errors.

        A batch that was cancelled in the meantime stays cancelled.
        """

        def begin(batch: BatchRecord) -> None:
            if batch.status != "validating":
                return  # with num_lines = 0, because its file is not read again
            batch.num_lines, batch.errors = num_lines, errors
            if errors:
                batch.status, batch.failed_s = "failed", now_s
            else:
                batch.status, batch.in_progress_s = "in_progress", now_s

        self.change(batch_id, begin)

    def finalize(self, batch_id: str, now_s: int) -> None:
        """Note that all lines of a batch have an answer."""

        def finalize(batch: BatchRecord) -> None:
            if batch.status == "in_progress":
                batch.status, batch.finalizing_s = "finalizing", now_s

        self.change(batch_id, finalize)

    def answered_lines(self, batch_id: str) -> set[int]:
        """Return the numbers of the lines that have an answer."""
        return {line for (line,) in self._rows("SELECT line FROM result WHERE batch_id = ?", batch_id)}

    def add_results(self, results: Sequence[LineResult]) -> None:
        """Store answers, each line's first one only. They are on disk when this returns."""
        with self._transaction():
            for batch_id in {result.batch_id for result in results}:
                batch = self._batch(batch_id)
                if batch is None or batch.status not in OPEN_STATUSES:
                    continue  # it has ended or was deleted in the meantime
                for result in results:
                    if result.batch_id == batch_id:
                        self._add_result(batch, result)
                self._update(batch)

    def _add_result(self, batch: BatchRecord, result: LineResult) -> None:
        values = (result.batch_id, result.is_error, result.line, result.content)
        added = self._database.execute(
            "INSERT INTO result (batch_id, is_error, line, content) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (batch_id, line) DO NOTHING",
            values,
        ).rowcount
        if added:
            batch.num_completed += not result.is_error
            batch.num_failed += result.is_error
            batch.num_bytes += len(result.content)

    def end(
        self,
        batch_id: str,
        end: End,
        file_ids: tuple[str, str],
        files_expire_s: int,
        now_s: int,
        errors: Sequence[LineError] = (),
    ) -> BatchRecord | None:
        """End a batch, and add its output file and its error file, if not empty.

        `file_ids` are the ids that the two get; `errors` say why the batch cannot go on.
        """
        with self._transaction():
            batch = self._batch(batch_id)
            if batch is None or batch.status not in OPEN_STATUSES:
                return batch
            for is_error, file_id in enumerate(file_ids):
                (num_rows, num_bytes) = self._database.execute(
                    "SELECT COUNT(*), COALESCE(SUM(LENGTH(content)), 0) FROM result "
                    "WHERE batch_id = ? AND is_error = ?",
                    (batch_id, is_error),
                ).fetchone()
                if not num_rows:
                    continue
                self._insert_file(
                    FileRecord(
                        id=file_id,
                        tenant=batch.tenant,
                        name=f"{batch_id}_{'error' if is_error else 'output'}.jsonl",
                        purpose="batch_output",
                        num_bytes=num_bytes,
                        created_s=now_s,
                        expires_s=files_expire_s,
                        batch_id=batch_id,
                        is_error=bool(is_error),
                    )
                )
                setattr(batch, "error_file_id" if is_error else "output_file_id", file_id)
            batch.status, batch.errors = end, list(errors)
            setattr(batch, f"{end}_s", now_s)
            self._update(batch)
        return batch

    # -- expiry --------------------------------------------------------------------------------------------------------

    def delete_expired(self, now_s: int, batches_before_s: int) -> int:
        """Delete some of the files that have expired, and of the batches that ended before `batches_before_s`.

        If one of them has many answers, only some of these are deleted. Returns how many files and batches the call
        has worked on; 0 if nothing is left to delete. A file that a batch still reads stays.
        """
        num_deleted = 0
        expired = self._rows("SELECT record FROM file WHERE expires_s <= ? LIMIT 1000", now_s)
        for file in (_decode(record, FileRecord) for (record,) in expired):
            if self.user_of(file.id) is not None:
                continue
            if file.batch_id and self.delete_some_results(file.batch_id, file.is_error):
                return num_deleted + 1
            self.delete_file(file)
            num_deleted += 1
            if num_deleted == DELETED_ENTRIES:
                return num_deleted
        for (record,) in self._rows("SELECT record FROM batch ORDER BY number"):
            batch = _decode(record, BatchRecord)
            if batch.ended_s is None or batch.ended_s >= batches_before_s:
                continue
            if any(self.delete_some_results(batch.id, is_error) for is_error in (False, True)):
                return num_deleted + 1
            with self._transaction():
                self._database.execute("DELETE FROM file WHERE batch_id = ?", (batch.id,))
                self._database.execute("DELETE FROM batch WHERE id = ?", (batch.id,))
            num_deleted += 1
            if num_deleted == DELETED_ENTRIES:
                break
        return num_deleted

    def sweep_uploads(self, before_s: float) -> None:
        """Delete content that has no entry and is older than this: the rest of uploads that a crash interrupted."""
        with suppress(OSError):
            known = {file_id for (file_id,) in self._rows("SELECT id FROM file WHERE batch_id = ''")}
            for path in self.uploads.iterdir():
                if path.name not in known and path.stat().st_mtime < before_s:
                    path.unlink(missing_ok=True)


class OwnerLock:
    """The right to run the batches of a folder. The kernel releases it when its process ends for any reason."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "owner.lock"
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Return whether this process owns the folder now. Raises OSError."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Release the right. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_encode = msgspec.json.Encoder().encode


def _decode(record: bytes, kind: type[T]) -> T:
    return msgspec.json.decode(record, type=kind)
