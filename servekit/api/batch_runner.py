"""Run batches: check their files, answer their lines, and end them.

One process runs the batches of a folder: the one that holds its lock. Each of its actions can be repeated. After a
crash, the next owner reads each batch's status and the lines that have an answer, and continues.

A line is answered by the application itself, as a request that has passed authentication: the same schemas, limits and
errors, without a socket. Its answer counts when it is on disk. docs/design/batches.md has the reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from msgspec import Raw, Struct
from starlette.types import ASGIApp, Message

from servekit.aio.round_robin_executor import RoundRobinExecutor
from servekit.aio.round_robin_semaphore import RoundRobinSemaphore
from servekit.api.auth.keys import Keyring
from servekit.api.batch_storage import SERVER, BatchStorage
from servekit.api.inner_request import answer_inner_request
from servekit.api.schemas.json_body import encode
from servekit.batches.lines import LineReader, RequestLine, check_lines
from servekit.batches.records import BatchRecord, End, LineError, LineResult
from servekit.batches.store import OwnerLock
from servekit.engine.caller import Caller
from servekit.engine.interface import Service
from servekit.engine.request_state import RequestState
from servekit.errors import InternalError, StorageFailed
from servekit.protocol.logging import fields

log = logging.getLogger("servekit")

POLL_S = 1.0  # how soon a batch is noticed that another process has created or cancelled
ROOM_POLL_S = 0.02  # how soon a line begins when a slot is free
BEGIN_POLL_S = 0.002  # how soon it is noticed that a line's prompt is computed
RETRY_S = 5.0  # after a failure of the disk, or of a batch
MAX_ATTEMPTS = 60  # of one line; with the pauses between them they take half an hour
MAX_RETRY_AFTER_S = 60.0
SWEEP_INTERVAL_S = 600.0
UPLOAD_MAX_AGE_S = 6 * 3600.0  # content without an entry is of an upload that was cut off
MAX_ANSWERED = 64  # batches that are answered at the same time; one of each tenant
BEGIN_ALONE_S = 0.5  # so long, a line that begins keeps the lines of other tenants from beginning
OPEN_LINES_PER_PLACE = 4  # of one batch: those that are computed, and those that wait to be tried again
MIN_FREE_BYTES = 2**20  # that a tenant must be allowed to store, for its batches to run
LOWEST_PRIORITY = 1000
MAX_ANSWERS = 8  # that one line may ask for: prompts times n
RETRIED = (429, 499, 503)  # statuses of a server that is busy, has lost its worker, or shuts down

_UNFINISHED: dict[End, tuple[str, str]] = {
    "expired": ("batch_expired", "This request was not executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed, because the batch was cancelled."),
}


class _Response(Struct):
    status_code: int
    request_id: str
    body: Raw


class _Unanswered(Struct):
    code: str
    message: str


class _OutputLine(Struct):
    """A line of an output file or an error file, as OpenAI writes it."""

    id: str
    custom_id: str
    response: _Response | None
    error: _Unanswered | None


class _Work(Struct):
    """What is done for a batch at present."""

    name: str
    task: asyncio.Task[None]


class BatchRunner:
    """Runs all batches of one folder while this process owns it."""

    def __init__(
        self, service: Service, keyring: Keyring, storage: BatchStorage, answer: ASGIApp, app_scope: dict[str, Any]
    ) -> None:
        """`answer` is the application below the authentication layer; `app_scope` is what all its scopes contain."""
        self._service = service
        self._keyring = keyring
        self._storage = storage
        self._store = storage.store
        self._answer_app = answer
        self._app_scope = app_scope
        self._lock = OwnerLock(self._store.directory)
        self._places = RoundRobinSemaphore(service.config.batch_concurrency)
        self._turns = RoundRobinSemaphore(sys.maxsize, max_per_tenant=1)  # one line of each tenant begins at a time
        self._beginning = asyncio.Lock()  # one line at a time looks for a free slot
        # Threads of their own: the default ones make the long answers of all tenants.
        self._check_thread = RoundRobinExecutor("batch-check", num_threads=1, max_submitted=1, max_per_tenant=1)
        self._read_thread = RoundRobinExecutor("batch-read", num_threads=1, max_submitted=2, max_per_tenant=1)
        self._results = _ResultWriter(storage)
        self._work: dict[str, _Work] = {}  # by batch
        self._pauses: dict[str, float] = {}  # by batch that has failed: when it is tried again, on the loop's clock
        self._full_tenants: set[str] = set()  # that may not store more; for the log
        self._left = set[str]()  # batches whose work has ended since the last look began
        self._woken = asyncio.Event()
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to run batches, or to wait until the process that does so ends."""
        self._main = asyncio.create_task(self._run(), name="batches")

    async def stop(self) -> None:
        """Stop. Lines that have no answer yet are left for the next start."""
        if self._main is not None:
            self._main.cancel()
            await asyncio.wait([self._main])
            await self._stop_work(list(self._work))
            await self._results.stop()
        self._check_thread.shutdown()
        self._read_thread.shutdown()
        self._lock.release()

    def wake(self) -> None:
        """Look at the batches now: one was created or cancelled."""
        self._woken.set()

    # -- what there is to do -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        await self._become_owner()
        next_sweep_s = 0.0
        loop = asyncio.get_running_loop()
        while True:
            try:
                if loop.time() >= next_sweep_s:
                    next_sweep_s = loop.time() + SWEEP_INTERVAL_S
                    await self._sweep()
                await self._look()
            except StorageFailed as error:
                log.error("batches: %s", error.message)
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("batches: internal error")
                await asyncio.sleep(RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._woken.wait()
            self._woken.clear()

    async def _become_owner(self) -> None:
        """Wait until no other process runs the batches of the folder."""
        while True:
            try:
                if self._lock.try_acquire():
                    return
            except OSError as error:
                log.error("batches do not run: %s; trying again in %g s", error, RETRY_S)
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(POLL_S)

    async def _sweep(self) -> None:
        storage, store, now_s = self._storage, self._store, self._storage.now_s()
        await storage.call(SERVER, store.sweep_uploads, now_s - UPLOAD_MAX_AGE_S)
        while await storage.call(SERVER, store.delete_expired, now_s, now_s - self._service.config.batch_retention):
            pass

    async def _look(self) -> None:
        """Give each open batch the work that its state asks for, and stop work that it does not ask for any more."""
        self._left.clear()
        batches = await self._storage.call(SERVER, self._store.open_batches)
        await self._stop_work([batch_id for batch_id in self._work if batch_id not in {each.id for each in batches}])
        await self._note_full_tenants({batch.tenant for batch in batches})
        keys = {key.digest.hex(): key.tenant for key in self._keyring.keys} or {"": ""}
        now_s, loop_s = self._storage.now_s(), asyncio.get_running_loop().time()
        served: set[tuple[str, bool]] = set()  # tenants that have a batch that is answered, or work of another kind
        for batch in batches:
            if batch.id in self._left:  # what was read of it may be old; there is another look at once
                continue
            name, work = self._wanted(batch, now_s)
            present, is_answered = self._work.get(batch.id), name == "answer"
            if is_answered and (keys.get(batch.key_digest) != batch.tenant or batch.tenant in self._full_tenants):
                await self._stop_work([batch.id])  # its key is missing, or room for its answers
                continue
            # One batch of a tenant after the other; and one of those that are checked or end, which takes less time.
            if (batch.tenant, is_answered) in served:
                await self._stop_work([batch.id])
                continue
            if (present is None or present.name != name) and self._pauses.get(batch.id, 0.0) > loop_s:
                await self._stop_work([batch.id])
                if is_answered:  # the next one does not overtake it
                    served.add((batch.tenant, True))
                continue
            served.add((batch.tenant, is_answered))
            if present is not None and present.name == name:
                continue
            await self._stop_work([batch.id])
            if is_answered and sum(each.name == name for each in self._work.values()) >= MAX_ANSWERED:
                continue
            self._pauses.pop(batch.id, None)
            task = asyncio.create_task(self._do(batch, work), name=f"{name} {batch.id}")
            self._work[batch.id] = _Work(name, task)

    def _wanted(self, batch: BatchRecord, now_s: int) -> tuple[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return what an open batch needs next: its name, and what does it."""
        if batch.status == "cancelling":
            return "cancel", lambda: self._end_early(batch, "cancelled")
        if now_s >= batch.expires_s:
            return "expire", lambda: self._end_early(batch, "expired")
        if batch.status == "validating":
            return "check", lambda: self._check(batch)
        return "answer", lambda: self._answer_lines(batch)

    async def _note_full_tenants(self, tenants: set[str]) -> None:
        full = set()
        for tenant in tenants:
            try:
                await self._storage.check_room(tenant, num_bytes=MIN_FREE_BYTES)
            except StorageFailed as error:
                full.add(tenant)
                if tenant not in self._full_tenants:
                    log.error("batches of a tenant stop: %s", error.message, extra=fields(tenant=tenant))
        self._full_tenants = full

    async def _stop_work(self, batch_ids: list[str]) -> None:
        tasks = [work.task for batch_id in batch_ids if (work := self._work.pop(batch_id, None)) is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _do(self, batch: BatchRecord, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._pauses[batch.id] = asyncio.get_running_loop().time() + RETRY_S
            if isinstance(error, StorageFailed):
                log.error("batch %s: %s", batch.id, error.message)
            else:
                log.exception("batch %s: internal error; it is tried again", batch.id)
        present = self._work.get(batch.id)
        if present is not None and present.task is asyncio.current_task():
            del self._work[batch.id]
        self._left.add(batch.id)
        self.wake()

    # -- one batch -----------------------------------------------------------------------------------------------------

    async def _check(self, batch: BatchRecord) -> None:
        path = self._store.path_of(batch.input_file_id)
        try:
            num_lines, errors = await self._check_thread.run(batch.tenant, partial(check_lines, path, batch.endpoint))
        except FileNotFoundError:  # the file was removed from the folder
            num_lines, errors = 0, [_missing(batch)]
        except OSError as error:
            raise self._store.failure(error) from None
        await self._storage.call(batch.tenant, self._store.begin, batch.id, num_lines, errors, self._storage.now_s())
        state = f"fails: {errors[0].code}" if errors else f"begins, with {num_lines} requests"
        log.info("batch %s %s", batch.id, state, extra=fields(tenant=batch.tenant))

    async def _answer_lines(self, batch: BatchRecord) -> None:
        """Answer all lines that have no answer, and end the batch."""
        answered = await self._storage.call(batch.tenant, self._store.answered_lines, batch.id)
        try:
            opened = await self._open(batch, answered)
        except FileNotFoundError:
            await self._end(batch, "failed", [_missing(batch)])
            return
        open_lines = asyncio.Semaphore(OPEN_LINES_PER_PLACE * self._service.config.batch_concurrency)
        with opened as reader:
            async with asyncio.TaskGroup() as group:
                while lines := await self._read_thread.run(batch.tenant, reader.read):
                    for number, line in lines:
                        await open_lines.acquire()
                        task = group.create_task(self._answer(batch, number, line))
                        task.add_done_callback(lambda _: open_lines.release())
        await self._storage.call(batch.tenant, self._store.finalize, batch.id, self._storage.now_s())
        await self._end(batch, "completed")

    async def _end_early(self, batch: BatchRecord, end: End) -> None:
        """End a batch, with an error for each line that has no answer."""
        code, message = _UNFINISHED[end]
        answered = await self._storage.call(batch.tenant, self._store.answered_lines, batch.id)
        # Its file was checked, and is still in the folder.
        if batch.num_lines and self._store.path_of(batch.input_file_id).exists():
            with await self._open(batch, answered) as reader:
                while lines := await self._read_thread.run(batch.tenant, reader.read):
                    results = [_result(batch, number, line, None, _Unanswered(code, message)) for number, line in lines]
                    await self._storage.call(batch.tenant, self._store.add_results, results)
        await self._end(batch, end)

    async def _open(self, batch: BatchRecord, answered: set[int]) -> LineReader:
        """Open a batch's file. Raises FileNotFoundError if it was removed from the folder, else StorageFailed."""
        path, opened, is_cancelled = self._store.path_of(batch.input_file_id), list[LineReader](), threading.Event()

        def open_reader() -> LineReader:
            opened.append(LineReader(path, answered))
            if is_cancelled.is_set():  # nothing will use it
                opened[0].close()
            return opened[0]

        try:
            return await self._read_thread.run(batch.tenant, open_reader)
        except asyncio.CancelledError:
            is_cancelled.set()
            for reader in opened:
                reader.close()
            raise
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._store.failure(error) from None

    async def _end(self, batch: BatchRecord, end: End, errors: Sequence[LineError] = ()) -> None:
        file_ids = new_file_id(), new_file_id()
        now_s, expire_s = self._storage.now_s(), self._storage.files_expire_s
        ended = await self._storage.call(
            batch.tenant, self._store.end, batch.id, end, file_ids, expire_s, now_s, errors
        )
        if ended is not None:
            counts = f"{ended.num_completed} of {ended.num_lines} requests completed, {ended.num_failed} failed"
            log.info("batch %s %s: %s", batch.id, ended.status, counts, extra=fields(tenant=batch.tenant))

    # -- one line ------------------------------------------------------------------------------------------------------

    async def _answer(self, batch: BatchRecord, number: int, line: RequestLine) -> None:
        """Answer a line, and return when the answer is on disk.

        It holds a place, except while it waits for its tenant's turn, or to be tried again.
        """
        for attempt in range(1, MAX_ATTEMPTS + 1):
            request_id = secrets.token_hex(16)
            asking = await self._begin_in_turn(batch, line, request_id)
            try:
                status, retry_after_s, body = await asking
                if status not in RETRIED or attempt == MAX_ATTEMPTS:
                    response = _Response(status, request_id, Raw(body))
                    await self._results.write(_result(batch, number, line, response, None))
                    return
            finally:
                self._places.release(batch.tenant)
            await asyncio.sleep(min(max(retry_after_s, attempt), MAX_RETRY_AFTER_S))

    async def _begin_in_turn(
        self, batch: BatchRecord, line: RequestLine, request_id: str
    ) -> asyncio.Task[tuple[int, float, bytes]]:
        """Begin the line after the one before it of its tenant, with a place, which the caller releases."""
        await self._turns.acquire(batch.tenant)
        try:
            await self._places.acquire(batch.tenant)
            try:
                return await self._begin(batch, line, request_id)
            except BaseException:
                self._places.release(batch.tenant)
                raise
        finally:
            self._turns.release(batch.tenant)

    async def _begin(
        self, batch: BatchRecord, line: RequestLine, request_id: str
    ) -> asyncio.Task[tuple[int, float, bytes]]:
        """Send the line when a slot is free, and return when it has begun.

        It has begun when its prompt is computed, or when it waits for its model to load: loading takes minutes, and
        lines for other models do not wait for it. Until then no other line of its tenant begins, and for BEGIN_ALONE_S
        none of another one. So another request waits for the prompt of one line, or for one of each tenant if they take
        longer, and not for many.
        """
        state: dict[str, Any] = {}

        def has_begun() -> bool:
            return asking.done() or _has_token(state) or bool(state.get("waits_for_model"))

        async with self._beginning:
            while self._service.state != "ready" or not self._service.has_free_slots:  # noqa: ASYNC110
                await asyncio.sleep(ROOM_POLL_S)
            asking = asyncio.create_task(self._ask(batch, line, request_id, state), name="line of a batch")
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEGIN_ALONE_S):
                        await _wait_until(has_begun)
            except asyncio.CancelledError:
                await _cancel(asking)
                raise
        try:
            await _wait_until(has_begun)
        except asyncio.CancelledError:
            await _cancel(asking)
            raise
        return asking

    async def _ask(
        self, batch: BatchRecord, line: RequestLine, request_id: str, state: dict[str, Any]
    ) -> tuple[int, float, bytes]:
        """Return the application's answer: its status, its Retry-After and its body."""
        state["caller"] = Caller(batch.tenant, request_id, LOWEST_PRIORITY, MAX_ANSWERS)
        started: list[Message] = []
        parts: list[bytes] = []

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message)
            else:
                parts.append(message.get("body", b""))

        try:
            await answer_inner_request(self._answer_app, self._app_scope, line.url, bytes(line.body), state, send)
        except Exception:  # it was answered with a 500, as far as that was possible
            log.exception("internal error in a line of a batch", extra=fields(request_id=request_id))
        if not started:
            failed = InternalError("internal error; the server's log has the details of this request")
            return 500, 0.0, encode({"error": {"message": failed.message, "type": failed.type, "code": failed.code}})
        headers = dict(started[0]["headers"])
        return started[0]["status"], float(headers.get(b"retry-after", 1)), b"".join(parts)


async def _wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(BEGIN_POLL_S)


async def _cancel(asking: asyncio.Task[Any]) -> None:
    asking.cancel()
    await asyncio.wait([asking])


def _has_token(state: dict[str, Any]) -> bool:
    """Return whether the request with this state has been given a token."""
    request_state: RequestState | None = state.get("request_state")
    return request_state is not None and request_state.num_generated_tokens > 0


def _missing(batch: BatchRecord) -> LineError:
    return LineError("file_not_found", f"the content of {batch.input_file_id} is missing; upload the file again")


def new_file_id() -> str:
    """Return an id that cannot be guessed."""
    return f"file-{secrets.token_hex(12)}"


def _result(
    batch: BatchRecord, number: int, line: RequestLine, response: _Response | None, error: _Unanswered | None
) -> LineResult:
    content = encode(_OutputLine(f"batch_req_{secrets.token_hex(12)}", line.custom_id, response, error)) + b"\n"
    return LineResult(batch.id, number, content, response is None or response.status_code != 200)


class _ResultWriter:
    """Writes answers to disk. Those that come while the disk is busy share its next transaction."""

    def __init__(self, storage: BatchStorage) -> None:
        self._storage = storage
        self._pending: list[tuple[LineResult, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def write(self, result: LineResult) -> None:
        """Return when the answer is on disk. If that fails, it is tried again until the caller is cancelled."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((result, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all(), name="batch results")
        await written

    async def stop(self) -> None:
        """Finish the transaction that has begun. No caller waits for another one any more."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=RETRY_S)
            self._writing.cancel()

    async def _write_all(self) -> None:
        while self._pending:
            group, self._pending = self._pending, []
            try:
                await self._storage.call(SERVER, self._storage.store.add_results, [result for result, _ in group])
            except StorageFailed as error:
                log.error("answers of batches: %s; trying again in %g s", error.message, RETRY_S)
                self._pending = [each for each in group if not each[1].cancelled()] + self._pending
                await asyncio.sleep(RETRY_S)
                continue
            for _, written in group:
                if not written.done():
                    written.set_result(None)
