"""Keep KV blocks in files, one file for each block, so that the next worker finds them.

A file begins with a header: the format, the identity of the model, the block's key, and a checksum. The identity covers
everything that a block's bytes depend on. If a header does not match, the file is deleted, and the block is computed
again. The checksum detects damage, but not changes on purpose: a user who may write to the folder can change answers.
So the folder is private. The checksum is XXH3 of 64 bits: CRC-32 took longer than copying the file from the page
cache.

A file that is in the kernel's page cache is read by the step's thread, directly into the memory where it is needed
(`read_cached`). Other files are read by several threads.

Files are written by a thread, without waiting for the disk: a file that a power failure cuts off does not pass the
check. If the disk is slower than what is stored, blocks are left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from hashlib import blake2b
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from servekit.errors import ConfigError

log = logging.getLogger("servekit.worker")

Bytes = NDArray[np.uint8]

KEY_BYTES = 16
FORMAT = 2  # version of the files and of the pages' layout; files of another version are not read
_HEADER = struct.Struct(f"=4sI16s{KEY_BYTES}sIQ")  # magic, format, model, key, bytes of the block, checksum
_MAGIC = b"sKVb"
_SUFFIX, _UNFINISHED = ".block", ".unfinished"
MAX_UNWRITTEN_BYTES = 2**28  # bytes that wait for the disk
MAX_WORKERS = 64  # workers that share a folder
NUM_READERS = 4  # threads that help to read; one waits for the disk while another computes a checksum
UNUSED_S = 30 * 24 * 3600  # after which blocks of other models, of other settings and of other workers are deleted
NUM_PREFETCHERS = 2  # threads, so that reads that a step waits for never wait for those ahead of need
MAX_PREFETCHED_BYTES = 2**28  # bytes that were read and not used yet
# After which what was read ahead of need makes room for others: most likely its sequence was cancelled.
MAX_PREFETCHED_S = 120.0


class DiskTier:
    """The blocks of one worker in a folder of its own. Its methods are called by one thread, the worker's."""

    def __init__(self, folder: Path, identity: str, max_bytes: int, bytes_per_block: int) -> None:
        """Find what is there. Raises ConfigError if the folder cannot be used.

        `identity` names everything that blocks depend on. Each worker of a model that uses the folder has `max_bytes`.
        """
        self._model = blake2b(identity.encode(), digest_size=16).digest()
        self._block_bytes = bytes_per_block
        self._file_bytes = _HEADER.size + bytes_per_block
        self._num_blocks = max_bytes // self._file_bytes
        self._max_waiting = max(1, MAX_UNWRITTEN_BYTES // self._file_bytes)
        self._lock = threading.Lock()  # protects all fields below
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # keys of files, the least recently used first
        self._waiting: dict[bytes, bytes] = {}  # blocks that are not written yet
        self._dropped: list[bytes] = []
        self._num_unwritten = 0
        self._has_warned = False
        if not self._num_blocks:
            raise ConfigError(
                f"--kv-offload-disk-bytes {max_bytes} holds no block: a block's file takes {self._file_bytes:,} bytes"
            )
        try:
            self._folder = self._claim(folder / self._model.hex())
            self._find_files()
        except OSError as error:
            raise ConfigError(
                f"--kv-offload-dir {folder} cannot be used: {error}; name a folder that the worker may write to"
            ) from None
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # bounded by `_max_waiting`
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="kv-read")
        self._prefetchers = ThreadPoolExecutor(NUM_PREFETCHERS, thread_name_prefix="kv-prefetch")
        self._max_prefetched = max(1, MAX_PREFETCHED_BYTES // self._file_bytes)
        # (when it began, the reading), the oldest first
        self._prefetched: OrderedDict[bytes, tuple[float, Future[Bytes | None]]] = OrderedDict()
        # Memory for what is read ahead. It has been used before: to get new pages takes longer than to read a file.
        self._spare: list[Bytes] = []
        threading.Thread(target=self._write_all, daemon=True, name="kv-write").start()

    def __contains__(self, key: bytes) -> bool:
        """Whether a block can be read, as far as is known."""
        with self._lock:
            return key in self._keys or key in self._waiting

    def __len__(self) -> int:
        with self._lock:
            return len(self._keys)

    def keys(self) -> list[bytes]:
        """The blocks that have files, the last ones those that were used last."""
        with self._lock:
            return list(self._keys)

    def take_dropped(self) -> list[bytes]:
        """Return the keys of blocks whose files are gone since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def take_num_unwritten(self) -> int:
        """Return how many blocks were not written since the last call, although they were stored."""
        with self._lock:
            number, self._num_unwritten = self._num_unwritten, 0
            return number

    def write(self, key: bytes, block: bytes) -> None:
        """Write a block soon, unless too many blocks wait for the disk."""
        with self._lock:
            if len(self._waiting) >= self._max_waiting:
                self._num_unwritten += 1
                return
            self._waiting[key] = block
        self._queue.put(key)

    def prefetch(self, keys: list[bytes]) -> None:
        """Begin to read blocks that will be needed soon.

        If there is no room for all, the last ones are left out: those that came first are usually needed first.
        """
        now_s = time.monotonic()
        while self._prefetched and next(iter(self._prefetched.values()))[0] + MAX_PREFETCHED_S <= now_s:
            reading = self._prefetched.popitem(last=False)[1][1]
            if not reading.cancel():
                reading.add_done_callback(self._reuse)
        for key in keys:
            if len(self._prefetched) >= self._max_prefetched:
                return
            if key not in self._prefetched and key in self:
                self._prefetched[key] = now_s, self._prefetchers.submit(self._read_ahead, key)

    def read_cached(self, keys: list[bytes], places: Iterable[list[memoryview]]) -> list[bool]:
        """Read blocks whose files are in the kernel's page cache. Returns which were read.

        A block is read in parts, one behind the other in its file; `places` has the memory of each block's parts. If a
        block is damaged, or only a part of it is in the page cache, its memory is set to zero, because wrong bytes may
        be numbers that are not finite. `read` may still read such a block, and logs what is wrong. The calling thread
        does all of this: it takes less time to copy from the page cache than to wait for other threads.
        """
        with self._lock:
            are_files = [key in self._keys for key in keys]
        were_read = [False] * len(keys)
        for index, (key, parts) in enumerate(zip(keys, places, strict=True)):
            if not are_files[index] or key in self._prefetched:
                continue
            try:
                were_read[index] = self._read_file(key, parts, os.RWF_NOWAIT)
            except OSError:  # mostly because nothing of it is in the page cache; then nothing was read
                continue
            if not were_read[index]:
                for part in parts:
                    part[:] = bytes(part.nbytes)
        self._note_use(keys, were_read)
        return were_read

    def read(
        self,
        keys: list[bytes],
        memory: list[Bytes],
        rows: list[int],
        use: Callable[[list[int]], None] = lambda indices: None,
        *,
        num_used_at_once: int = 1,
        may_replace: bool = False,
    ) -> list[bool]:
        """Read blocks into memory, one row for each key. Returns which were there and undamaged.

        What was read ahead is copied to its row. With `may_replace`, it replaces the row's memory in the list instead.

        `use` gets the indices of blocks that were read, while others are still read, so that their rows are in a
        processor's cache. It gets at least `num_used_at_once` of them at a time, and the last ones when all are read.
        It is called in the thread that calls this method. That thread reads blocks, too: on a busy machine, it would
        wait long for the threads that help. The files of damaged blocks are deleted, and anything may be in their rows.
        """
        ahead = [self._prefetched.pop(key, (0.0, None))[1] for key in keys]
        jobs = iter(list(enumerate(zip(keys, rows, ahead, strict=True))))  # each thread takes the next one
        were_read = [False] * len(keys)
        ready: list[int] = []  # indices of blocks that were read and not used yet

        def fill_next(after_each: Callable[[], None] = lambda: None) -> None:
            for index, job in jobs:
                if self._fill(memory, *job, may_replace=may_replace):
                    were_read[index] = True
                    ready.append(index)
                after_each()

        def use_ready(num_at_least: int = 1) -> None:
            if len(ready) >= num_at_least:
                indices = ready[:]
                del ready[: len(indices)]  # others may have been appended meanwhile
                use(indices)

        helpers = [self._readers.submit(fill_next) for _ in range(min(NUM_READERS, len(keys) - 1))]
        try:
            fill_next(lambda: use_ready(num_used_at_once))
        finally:
            for _ in jobs:  # if `use` has raised, no other block is read
                pass
            helpers = [helper for helper in helpers if not helper.cancel()]  # those that have begun
            wait(helpers)  # then nothing writes to the rows any more
        for helper in helpers:
            helper.result()
        use_ready()
        self._note_use(keys, were_read)
        return were_read

    def _note_use(self, keys: list[bytes], were_read: list[bool]) -> None:
        """Note that the blocks that were read are the ones used last."""
        with self._lock:
            for key, was_read in zip(keys, were_read, strict=True):
                if was_read and key in self._keys:
                    self._keys.move_to_end(key)

    def _fill(
        self, memory: list[Bytes], key: bytes, row: int, ahead: Future[Bytes | None] | None, *, may_replace: bool
    ) -> bool:
        """Read a block, unless that has begun ahead of need."""
        if ahead is not None and not ahead.cancel() and (block := ahead.result()) is not None:
            if may_replace:
                memory[row], block = block, memory[row]
            else:
                np.copyto(memory[row], block)
            self._spare.append(block)
            return True
        return self._read(key, memory[row])  # also if it was not there ahead of need: it may have been written since

    def _read_ahead(self, key: bytes) -> Bytes | None:
        try:
            block = self._spare.pop()
        except IndexError:
            block = np.empty(self._block_bytes, dtype=np.uint8)
        if self._read(key, block):
            return block
        self._spare.append(block)
        return None

    def _reuse(self, ahead: Future[Bytes | None]) -> None:
        """Keep the memory of a block that was read ahead and is not needed."""
        block = ahead.result()
        if block is not None:
            self._spare.append(block)

    # -- files --------------------------------------------------------------------------------------------------------

    def _claim(self, folder: Path) -> Path:
        """Return the first folder that no other worker uses, and lock it for the life of this process."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        _make_private(folder)
        for number in range(MAX_WORKERS):
            candidate = folder / str(number)
            _make_private(candidate)
            lock = os.open(candidate / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            else:
                return candidate
        raise OSError(f"{MAX_WORKERS} workers use it already")

    def _find_files(self) -> None:
        """Find the files of earlier workers. Delete unfinished ones, and the oldest ones if there are too many."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                path = Path(entry.path)
                with contextlib.suppress(FileNotFoundError):  # another worker deletes what was not used for long
                    if path.suffix == _UNFINISHED:
                        path.unlink()
                    elif path.suffix == _SUFFIX and (key := _key_of(path)) is not None:
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, key))
        for _, key in sorted(found):
            self._keys[key] = None
        self._delete_oldest()
        self._dropped = []  # no manager knows these keys yet
        if self._keys:
            log.info("found %d offloaded KV blocks in %s", len(self._keys), self._folder)

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}{_SUFFIX}"

    def _header(self, key: bytes, parts: Iterable[bytes | memoryview]) -> bytes:
        checksum = xxhash.xxh3_64()
        for part in parts:
            checksum.update(part)
        return _HEADER.pack(_MAGIC, FORMAT, self._model, key, self._block_bytes, checksum.intdigest())

    def _read_file(self, key: bytes, parts: list[memoryview], flags: int = 0) -> bool:
        """Read a block's file into `parts`, one behind the other. Returns whether it is undamaged. Raises OSError."""
        header = bytearray(_HEADER.size)
        # Without `_path`, because making a Path takes as long as opening the file.
        fd = os.open(f"{self._folder}/{key.hex()}{_SUFFIX}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # A byte more, to notice a longer file.
            num_bytes = os.preadv(fd, [header, *parts, bytearray(1)], 0, flags)
            if num_bytes != self._file_bytes or header != self._header(key, parts):
                return False
            os.utime(fd)  # for the order in which the next worker finds them
        finally:
            os.close(fd)
        return True

    def _read(self, key: bytes, row: Bytes) -> bool:
        """Read a block into memory. Returns whether it was there and undamaged."""
        with self._lock:
            unwritten = self._waiting.get(key)
            if unwritten is None and key not in self._keys:
                return False
        if unwritten is not None:
            np.copyto(row, np.frombuffer(unwritten, dtype=np.uint8))
            return True
        try:
            if self._read_file(key, [row.data]):
                return True
            what = "it is damaged"
        except OSError as error:
            what = str(error)
        path = self._path(key)
        log.warning("the KV block in %s cannot be used, and is computed again: %s", path, what)
        with contextlib.suppress(OSError):
            path.unlink()
        with self._lock:  # behind the deletion: from now on the block may be written again, while others are read
            self._keys.pop(key, None)
        return False

    def _write_all(self) -> None:
        """Write blocks for the whole life of the process."""
        self._delete_unused()
        while True:
            key = self._queue.get()
            with self._lock:
                block = self._waiting[key]
            path = self._path(key)
            unfinished = path.with_suffix(_UNFINISHED)
            try:
                with open(unfinished, "wb", buffering=0, opener=_private) as file:
                    if os.writev(file.fileno(), [self._header(key, [block]), block]) < self._file_bytes:
                        raise OSError("the disk is full")
                unfinished.replace(path)
                error = None
            except OSError as caught:
                error = caught
                with contextlib.suppress(OSError):
                    unfinished.unlink()
            with self._lock:
                del self._waiting[key]
                if error is None:
                    self._keys[key] = None
                else:
                    self._num_unwritten += 1
                    self._dropped.append(key)
            if error is not None and not self._has_warned:
                self._has_warned = True
                log.warning("KV blocks are not written to %s: %s; further failures are only counted", path, error)
            self._delete_oldest()

    def _delete_unused(self) -> None:
        """Delete the blocks of all other folders that were not used for long: nothing else might ever read them.

        The folder of a living worker is left alone. If a worker claims one just now, it computes the block again. The
        folders stay, because a worker may claim one at any time.
        """
        lock = self._folder / "lock"
        try:
            os.utime(lock)
            newest_s = lock.lstat().st_mtime - UNUSED_S  # by the clock that the times of files are from
        except OSError as error:
            log.warning("unused KV blocks are not deleted, because %s cannot be used: %s", lock, error)
            return
        for folder in _private_folders_in(self._folder.parent.parent):
            for other in _private_folders_in(folder):
                if other != self._folder:
                    _delete_blocks(other, newest_s)

    def _delete_oldest(self) -> None:
        while True:
            with self._lock:
                if len(self._keys) <= self._num_blocks:
                    return
                key, _ = self._keys.popitem(last=False)
                self._dropped.append(key)
            with contextlib.suppress(OSError):
                self._path(key).unlink()


def _make_private(folder: Path) -> None:
    """Make a folder for this user only. Raises OSError if there is one that others can use, or that is another's."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        raise OSError(f"{folder} is not a folder of this user alone (mode 0700)")


def _is_private(folder: Path) -> bool:
    """Return whether it is a folder, and no link, that only this user can use."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _private_folders_in(folder: Path) -> list[Path]:
    """Return the private folders in a folder, as far as they can be seen: others may delete some meanwhile."""
    found = []
    with _log_failure("%s cannot be searched for KV blocks", folder):
        for path in folder.iterdir():
            with _log_failure("%s cannot be looked at", path):
                if _is_private(path):
                    found.append(path)
    return found


def _delete_blocks(folder: Path, newest_s: float) -> None:
    """Delete the files of blocks in a folder that were not used since that time, unless a worker has claimed it.

    The folder is not locked meanwhile: the next worker that wants it would take another one, and miss its blocks.
    """
    with _log_failure("unused KV blocks in %s are not deleted", folder):
        unused = [path for path in folder.iterdir() if _is_unused_block(path, newest_s)]
        if unused and not _is_claimed(folder):
            for path in unused:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()


def _is_unused_block(path: Path, newest_s: float) -> bool:
    if path.suffix not in (_SUFFIX, _UNFINISHED) or _key_of(path) is None:
        return False
    try:
        return path.lstat().st_mtime < newest_s
    except FileNotFoundError:
        return False


def _is_claimed(folder: Path) -> bool:
    """Return whether a living worker has the folder. Raises OSError, for example if no worker ever had it."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


@contextlib.contextmanager
def _log_failure(what: str, path: Path) -> Iterator[None]:
    """Go on after an OSError, and log it: the rest can be cleaned up."""
    try:
        yield
    except FileNotFoundError as error:  # somebody else has deleted it
        log.debug(f"{what}: %s", path, error)
    except OSError as error:
        log.warning(f"{what}: %s", path, error)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _key_of(path: Path) -> bytes | None:
    """Return the key of a block's file; None if the file has another name."""
    try:
        key = bytes.fromhex(path.stem)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and path.stem == key.hex() else None
