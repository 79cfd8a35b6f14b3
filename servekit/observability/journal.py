"""Write the commands of the workload manager to a file, and replay such a file (docs/journal.md).

A journal file is a sequence of frames: a length in 4 bytes, big-endian, and as many bytes of msgpack. The first frame
is a JournalHeader, every other one is a list of records (servekit/scheduler/recording.py). A file that is larger than
`max_bytes` is followed by another one, which begins with a checkpoint of the manager, so each file is replayed alone.

The main loop makes records and appends them to a queue. A thread writes them, in batches. If it fails or cannot keep
up, the journal stops and the server goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from servekit import __version__
from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.scheduler.checkpoint import ManagerState
from servekit.scheduler.recording import (
    CommandRecord,
    ErrorRecord,
    Record,
    RecordedManager,
    RecordEncoder,
    ReplayDifferenceError,
    Replayer,
    ReplayWatcher,
)
from servekit.scheduler.scheduler_config import SchedulerConfig

log = logging.getLogger("servekit")

FORMAT = "servekit-journal-8"
LENGTH_BYTES = 4
FLUSH_INTERVAL_S = 0.1
# At 10 ms a step, which is some 3 records, these are 5 minutes in which a disk may be slow; and some 30 MB.
MAX_PENDING_RECORDS = 100_000
MAX_FRAME_BYTES = 2**30  # a longer frame is not one: the file is damaged
# From this part of the size on, the next file begins as soon as the manager is idle; at the size itself, at once.
EARLY_ROTATION = 0.75
CLOSE_TIMEOUT_S = 5.0


class JournalHeader(Struct, frozen=True):
    """The first frame of a file."""

    format: str
    servekit_version: str
    created: str  # UTC, ISO 8601
    has_token_ids: bool
    config: SchedulerConfig


class Journal:
    """Writes the records of one workload manager; the `RecordSink` of a RecordedManager.

    `put` and `fail` are called by the main loop's thread only.
    """

    def __init__(self, path: Path, max_bytes: int, max_files: int, keeps_token_ids: bool = False) -> None:
        self.path = path
        self.is_recording = False
        self.is_checkpoint_due = self.is_checkpoint_overdue = False
        self.num_bytes = 0  # written in all
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._keeps_token_ids = keeps_token_ids
        self._pending: deque[CommandRecord | ErrorRecord | ManagerState] = deque()
        self._encoder = RecordEncoder(secrets.token_bytes(16), keeps_token_ids)
        self._encode = msgspec.msgpack.Encoder().encode
        self._header: bytes | None = None  # not yet known
        self._file: BinaryIO | None = None
        self._file_bytes = 0
        self._has_checkpoint_pending = False
        self._rotation_lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="servekit journal", daemon=True)

    def open(self) -> None:
        """Create the file. Raises ConfigError."""
        try:
            self._open_next_file()
        except OSError as error:
            raise ConfigError(f"--journal {self.path}: {error.strerror}") from None

    def make_manager(self, limits: SchedulerConfig) -> RecordedManager:
        """Begin to record a new workload manager."""
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._header = self._encode(JournalHeader(FORMAT, __version__, created, self._keeps_token_ids, limits))
        self.is_recording = True
        self._thread.start()
        return RecordedManager(limits, self, self._encoder)

    def put(self, record: CommandRecord | ErrorRecord | ManagerState) -> None:
        """Queue a record. Never blocks; if the queue is full, the journal stops."""
        if isinstance(record, ManagerState):
            with self._rotation_lock:
                self._has_checkpoint_pending = True
                self.is_checkpoint_due = self.is_checkpoint_overdue = False
        self._pending.append(record)
        if not self.is_recording:  # the thread has stopped meanwhile, and may have emptied the queue already
            self._pending.clear()
        elif len(self._pending) > MAX_PENDING_RECORDS:
            self._stop(f"writing does not keep up: {MAX_PENDING_RECORDS} records are waiting")

    def fail(self, error: Exception) -> None:
        """Stop, because a record could not be made."""
        log.error("journal %s: a record could not be made", self.path, exc_info=error)
        self._stop("internal error")

    def close(self) -> None:
        """Write what is queued, and close the file. Waits a few seconds at most."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        elif self._file is not None:  # nothing was recorded, because the model could not be loaded
            self._file.close()
        self.is_recording = False

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write_header()
            while self.is_recording:
                is_last = self._closing.wait(FLUSH_INTERVAL_S)
                self._write_pending()
                if is_last:
                    break
        except OSError as error:
            self._stop(error.strerror or str(error))
        except Exception:
            log.exception("journal %s: the writer failed", self.path)
            self._stop("internal error")
        self._pending.clear()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _write_pending(self) -> None:
        """Write all queued records; a checkpoint begins the next file."""
        records: list[Record] = []
        while self._pending and self.is_recording:
            record = self._pending.popleft()
            if isinstance(record, ManagerState):
                self._write_records(records)
                self._open_next_file()
                self._write_header()
                records = [self._encoder.encode_checkpoint(record)]
            else:
                records.append(record)
        self._write_records(records)

    def _write_header(self) -> None:
        assert self._header is not None
        self._write(self._header)

    def _write_records(self, records: list[Record]) -> None:
        if records:
            self._write(self._encode(records))

    def _write(self, payload: bytes) -> None:
        assert self._file is not None
        frame = len(payload).to_bytes(LENGTH_BYTES, "big") + payload
        unwritten = memoryview(frame)
        while unwritten:  # a nearly full disk takes only a part
            unwritten = unwritten[self._file.write(unwritten) :]
        self._file_bytes += len(frame)
        self.num_bytes += len(frame)
        with self._rotation_lock:
            if not self._has_checkpoint_pending:
                self.is_checkpoint_due = self._file_bytes >= EARLY_ROTATION * self._max_bytes
                self.is_checkpoint_overdue = self._file_bytes >= self._max_bytes

    def _open_next_file(self) -> None:
        """Rename FILE to FILE.1, FILE.1 to FILE.2 and so on, remove what is too old, and create FILE."""
        if self._file is not None:
            self._file.close()
        if self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode):
            raise FileExistsError(0, "exists and is not a regular file")
        older = [self.path.with_name(f"{self.path.name}.{number}") for number in range(1, self._max_files)]
        paths = [self.path, *older]
        paths[-1].unlink(missing_ok=True)
        for source, target in zip(paths[-2::-1], paths[:0:-1], strict=True):
            if source.exists():
                source.rename(target)
        # Unbuffered: each frame is one write, and is in the file even if this process is killed.
        self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)
        self._file_bytes = 0
        self._has_checkpoint_pending = False

    def _stop(self, reason: str) -> None:
        """Record nothing more. What is in the file can be replayed."""
        if self.is_recording:
            self.is_recording = False
            log.error("journal %s stopped: %s; the server continues without a journal", self.path, reason)


def open_journals(config: ServeConfig, replicas: Iterable[int]) -> list[Journal]:
    """Create the journals of these replicas, if the settings ask for journals. Raises ConfigError."""
    if config.journal is None:
        return []
    limits = config.journal_max_bytes, config.journal_max_files, config.journal_tokens
    journals = [Journal(_replica_path(Path(config.journal), index), *limits) for index in replicas]
    for journal in journals:
        journal.open()
    return journals


def _replica_path(path: Path, index: int) -> Path:
    """The first replica, which is the only one of most servers, writes to the path itself."""
    return path.with_name(f"{path.name}.replica-{index}") if index else path


def journal_paths(path: Path) -> list[Path]:
    """The newest files that a server with `--journal PATH` has written: PATH, and one for each other replica."""
    return [path, *takewhile(Path.exists, (_replica_path(path, index) for index in count(1)))]


class JournalCollector(Collector):
    """Metrics of the journals of all replicas, read at each scrape."""

    def __init__(self, journals: Sequence[Journal], model_name: str) -> None:
        self._journals = journals
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "replica"]
        recording = GaugeMetricFamily(
            "servekit_journal_recording",
            "1 while --journal records; 0 after it stopped, because the disk was full or too slow.",
            labels=labels,
        )
        num_bytes = CounterMetricFamily("servekit_journal_bytes", "Bytes written to the journal.", labels=labels)
        for index, journal in enumerate(self._journals):
            recording.add_metric([self._model_name, str(index)], float(journal.is_recording))
            num_bytes.add_metric([self._model_name, str(index)], journal.num_bytes)
        yield recording
        yield num_bytes


# -- reading -----------------------------------------------------------------------------------------------------------


class ReplayResult(Struct, frozen=True):
    """What a replay found."""

    header: JournalHeader
    num_steps: int
    num_sequences: int
    num_restarts: int
    is_truncated: bool  # the last frame is incomplete
    recorded_error: str | None  # with which the recorded manager ended, and the replayed one as well
    difference: ReplayDifferenceError | None


def read_header(path: Path) -> JournalHeader:
    """Read how a journal was recorded. Raises ConfigError if it is not one."""
    try:
        with path.open("rb") as file:
            return _Frames(path, file).header()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def replay_journal(path: Path, watcher: ReplayWatcher | None = None) -> ReplayResult:
    """Replay a file up to its end or to the first difference. Raises ConfigError if it is not a journal."""
    try:
        with path.open("rb") as file:
            frames = _Frames(path, file)
            header = frames.header()
            replayer = Replayer(header.config, watcher=watcher)
            difference = None
            try:
                for record in frames.records():
                    replayer.apply(record)
            except ReplayDifferenceError as error:
                difference = error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return ReplayResult(
        header,
        replayer.num_plans,
        replayer.num_sequences,
        replayer.num_restarts,
        frames.is_truncated,
        replayer.error,
        difference,
    )


class _AnyHeader(Struct, frozen=True):
    """What the header has in every format."""

    format: str


class _Frames:
    """The frames of a file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self.is_truncated = False

    def header(self) -> JournalHeader:
        payload = self._next() or b""
        try:
            found = msgspec.msgpack.decode(payload, type=_AnyHeader).format
            if found == FORMAT:
                return msgspec.msgpack.decode(payload, type=JournalHeader)
        except msgspec.MsgspecError:
            raise ConfigError(f"{self._path}: this is not a journal of servekit") from None
        raise ConfigError(f"{self._path}: its format is {found!r}, but this version reads {FORMAT!r}")

    def records(self) -> Iterator[Record]:
        decode = msgspec.msgpack.Decoder(list[Record]).decode
        while (payload := self._next()) is not None:
            try:
                records = decode(payload)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{self._path}: damaged before byte {self._file.tell()}: {error}") from None
            yield from records

    def _next(self) -> bytes | None:
        length = self._file.read(LENGTH_BYTES)
        if not length:
            return None
        num_bytes = int.from_bytes(length, "big")
        payload = self._file.read(num_bytes) if num_bytes <= MAX_FRAME_BYTES else b""
        self.is_truncated = len(payload) < num_bytes
        return None if self.is_truncated else payload
