"""OpenAI's Files endpoints, for the input and the output of batches: /v1/files."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from io import FileIO

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.api.batch_runner import new_file_id
from servekit.api.batch_storage import BatchStorage
from servekit.api.endpoint import Endpoint, caller_of, models_of
from servekit.api.multipart import MultipartReader, Part
from servekit.api.responses.http import respond
from servekit.api.schemas.batches import File, FileDeleted, FileList, FileQuery
from servekit.api.schemas.json_body import decode_query
from servekit.batches.records import FileRecord
from servekit.errors import (
    InvalidRequest,
    ObjectNotFound,
    QueueFull,
    RequestTimeout,
    RequestTooLarge,
    StorageFailed,
)
from servekit.shared_budget import SharedBudget

MAX_UPLOADS = 8  # at the same time, in one process; a tenant may have as many as it leaves free
MIN_BYTES_PER_S = 2**17  # of an upload, beyond --body-timeout
MAX_FIELD_BYTES = 2**10
FORM_BYTES = 2**14  # that a body may have besides the content of its file
MAX_NAME = 255  # characters of a file's name
WRITE_BYTES = 2**20  # that are written at once
READ_BYTES = 2**18


def storage_of(request: Request) -> BatchStorage:
    """Return the storage of files and batches. Raises ObjectNotFound if there is none."""
    storage: BatchStorage | None = request.app.state.batch_storage
    if storage is None:
        raise ObjectNotFound(
            "this server keeps no files and runs no batches; start it with --batch-dir DIRECTORY, or send the requests "
            "one by one: servekit batch FILE does that",
            code="batches_disabled",
        )
    return storage


async def upload_file(request: Request) -> Response:
    """Upload a file of requests for a batch, as multipart/form-data with the fields `file` and `purpose`."""
    storage, tenant = storage_of(request), caller_of(request).tenant
    uploads: SharedBudget = request.app.state.uploads
    if not uploads.has_room(tenant, 1):
        raise QueueFull(
            f"{uploads.total} files are being uploaded{uploads.describe_share(tenant)}; the limit is {MAX_UPLOADS}. "
            "Try again later.",
            retry_after_s=5,
        )
    declared = request.headers.get("content-length", "0")
    declared_bytes = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
    limit = storage.config.batch_max_file_bytes
    if declared_bytes > limit + FORM_BYTES:
        raise _too_large(limit)
    await storage.check_room(tenant, num_files=1, num_bytes=max(1, declared_bytes))
    uploads.take(tenant, 1)
    try:
        return respond(File.of(await _receive(request, storage)))
    finally:
        uploads.release(tenant, 1)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the file is larger than {limit} bytes (batch_max_file_bytes); divide it among several batches"
    )


async def _receive(request: Request, storage: BatchStorage) -> FileRecord:
    """Write the body's file to disk as it arrives, and return its record."""
    form = _Form(storage.config.batch_max_file_bytes)
    reader = MultipartReader(request.headers.get("content-type", ""))
    file_id = new_file_id()
    path = storage.store.path_of(file_id)
    timeout_s = models_of(request).config.body_timeout + form.limit / MIN_BYTES_PER_S
    num_received = 0
    try:
        file = await asyncio.to_thread(FileIO, path, "xb")
        try:
            async with pause_tolerant_timeout(timeout_s):
                async for chunk in request.stream():
                    num_received += len(chunk)
                    # The form counts its file. This also bounds what is in no part: text before them and after them.
                    if num_received > form.limit + FORM_BYTES:
                        raise _too_large(form.limit)
                    for event in reader.feed(chunk):
                        form.add(event)
                    await form.write(file, WRITE_BYTES)
            await form.write(file, 1)
        finally:
            await asyncio.to_thread(file.close)
        if not reader.is_complete:
            raise InvalidRequest("the body ends before the form does; its last boundary is missing")
        record = form.record(file_id, caller_of(request).tenant, storage)
        # The length may have been undeclared, and others may have stored something meanwhile.
        await storage.add_file(record)
    except BaseException as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        if isinstance(error, TimeoutError):
            raise RequestTimeout(f"the file did not arrive within {timeout_s:g} s; send it faster") from None
        if isinstance(error, OSError):
            raise storage.store.failure(error) from None
        raise
    return record


class _Form:
    """The fields of an upload's form. The file's content waits here until it is written."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._fields: dict[str, bytearray] = {}
        self._content = bytearray()
        self._part: Part | None = None
        self._name: str | None = None  # of the file, when it has come
        self._num_bytes = 0

    def add(self, event: Part | bytes) -> None:
        """Take the next part of the form, or some of its content. Raises InvalidRequest or RequestTooLarge."""
        if isinstance(event, Part):
            self._part = event
            if event.name == "file":
                if self._name is not None:
                    raise InvalidRequest("the form has two files; upload them one by one", param="file")
                self._name = (event.filename or "file")[:MAX_NAME]
            else:
                self._fields[event.name[:MAX_FIELD_BYTES]] = bytearray()
            return
        assert self._part is not None, "content follows its part"
        if self._part.name == "file":
            self._num_bytes += len(event)
            if self._num_bytes > self.limit:
                raise _too_large(self.limit)
            self._content += event
            return
        value = self._fields[self._part.name[:MAX_FIELD_BYTES]]
        value += event
        if len(value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._part.name[:64]} has more than {MAX_FIELD_BYTES} bytes", param="form")

    async def write(self, file: FileIO, min_bytes: int) -> None:
        """Write the content to the file if there is as much as this. Raises OSError."""
        if len(self._content) >= min_bytes:
            content, self._content = self._content, bytearray()
            await asyncio.to_thread(_write_all, file, content)

    def record(self, file_id: str, tenant: str, storage: BatchStorage) -> FileRecord:
        """Return the record of a complete form. Raises InvalidRequest."""
        purpose = self._fields.get("purpose", bytearray()).decode("utf-8", "replace")
        if self._name is None:
            raise InvalidRequest("the form has no file; add the field file", param="file")
        if purpose != "batch":
            raise InvalidRequest(f"purpose = {purpose[:40]!r}: this server keeps files for batch only", param="purpose")
        return FileRecord(
            id=file_id,
            tenant=tenant,
            name=self._name,
            purpose=purpose,
            num_bytes=self._num_bytes,
            created_s=storage.now_s(),
            expires_s=storage.files_expire_s,
        )


def _write_all(file: FileIO, content: bytearray) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


async def find_file(request: Request, file_id: str) -> FileRecord:
    """Return the caller's file. Raises ObjectNotFound."""
    storage = storage_of(request)
    tenant = caller_of(request).tenant
    file = await storage.call(tenant, storage.store.file, tenant, file_id)
    if file is None:
        raise ObjectNotFound(f"there is no file {file_id[:64]!r}; GET /v1/files lists yours", param="file_id")
    return file


async def list_files(request: Request) -> Response:
    """List the caller's files."""
    storage = storage_of(request)
    query = decode_query({name: request.query_params.getlist(name) for name in request.query_params}, FileQuery)
    tenant = caller_of(request).tenant
    files = await storage.call(
        tenant,
        storage.store.files,
        tenant,
        query.purpose,
        query.after,
        query.order == "desc",
        query.limit + 1,
    )
    page = [File.of(file) for file in files[: query.limit]]
    return respond(
        FileList(page, len(files) > query.limit, page[0].id if page else None, page[-1].id if page else None)
    )


async def retrieve_file(request: Request) -> Response:
    """Describe one file."""
    return respond(File.of(await find_file(request, request.path_params["file_id"])))


async def file_content(request: Request) -> Response:
    """Return the content of a file. That of a batch's output file has one answer on each line."""
    file = await find_file(request, request.path_params["file_id"])
    return _Content(file, storage_of(request))


async def delete_file(request: Request) -> Response:
    """Delete a file. A file that a batch still reads stays: cancel the batch first."""
    storage, file = storage_of(request), await find_file(request, request.path_params["file_id"])
    user = await storage.call(file.tenant, storage.store.user_of, file.id)
    if user is not None:
        message = f"file {file.id} is read by {user}; cancel that first"
        raise InvalidRequest(message, param="file_id", code="file_in_use")
    await storage.delete_file(file)
    return respond(FileDeleted(file.id))


class _Cursor(Struct):
    """How far a content has been sent."""

    offset: int = 0
    line: int = 0


class _Content(Response):
    """The content of a file, read in a thread and sent in pieces: each one when the client has taken the last one."""

    def __init__(self, file: FileRecord, storage: BatchStorage) -> None:
        headers = {"content-length": str(file.num_bytes), "content-disposition": "attachment"}
        super().__init__(headers=headers, media_type="application/octet-stream")
        self._file = file
        self._storage = storage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cursor = _Cursor()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while cursor.offset < self._file.num_bytes:
            piece = await self._read(cursor)
            if not piece:  # it was deleted meanwhile, and the length was told: the connection must not look complete
                raise ClientDisconnect
            cursor.offset += len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _read(self, cursor: _Cursor) -> bytes:
        file, store = self._file, self._storage.store
        if file.batch_id:
            piece, cursor.line = await self._storage.call(
                file.tenant, store.read_results, file.batch_id, file.is_error, cursor.line, READ_BYTES
            )
            return piece
        return await asyncio.to_thread(self._read_upload, cursor.offset)

    def _read_upload(self, offset: int) -> bytes:
        with suppress(OSError), self._storage.store.path_of(self._file.id).open("rb") as file:
            file.seek(offset)
            return file.read(READ_BYTES)
        return b""


ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "POST",
        "/v1/files",
        upload_file,
        form={"purpose": "batch", "file": "a file with one request on each line"},
        gives=(File,),
        own_errors=(ObjectNotFound, StorageFailed),
    ),
    Endpoint("GET", "/v1/files", list_files, takes=(FileQuery,), gives=(FileList,), own_errors=(ObjectNotFound,)),
    Endpoint("GET", "/v1/files/{file_id}", retrieve_file, gives=(File,), own_errors=(ObjectNotFound,)),
    Endpoint("GET", "/v1/files/{file_id}/content", file_content, own_errors=(ObjectNotFound,)),
    Endpoint(
        "DELETE",
        "/v1/files/{file_id}",
        delete_file,
        gives=(FileDeleted,),
        own_errors=(ObjectNotFound, InvalidRequest, StorageFailed),
    ),
]
