"""OpenAI's Batches endpoints: /v1/batches."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.auth.keys import Key
from servekit.api.batch_runner import BatchRunner
from servekit.api.endpoint import Endpoint, caller_of
from servekit.api.request_body import read_small_body
from servekit.api.responses.http import respond
from servekit.api.routes.files import find_file, storage_of
from servekit.api.schemas.batches import Batch, BatchList, BatchQuery, CreateBatch
from servekit.api.schemas.json_body import decode, decode_query
from servekit.batches.records import BatchRecord
from servekit.errors import InvalidRequest, ObjectNotFound, StorageFailed

WINDOW_S = 24 * 3600


async def create_batch(request: Request) -> Response:
    """Create a batch: all requests of a file are answered within 24 hours, when the server has nothing more urgent."""
    storage = storage_of(request)
    wanted = decode(await read_small_body(request), CreateBatch)
    endpoints: tuple[str, ...] = request.app.state.batch_endpoints
    if wanted.endpoint not in endpoints:
        raise InvalidRequest(
            f"endpoint = {wanted.endpoint!r}: a batch takes one of {', '.join(endpoints)}", param="endpoint"
        )
    file = await find_file(request, wanted.input_file_id)
    if file.purpose != "batch":
        raise InvalidRequest(f"file {file.id} has the purpose {file.purpose}; it must be batch", param="input_file_id")
    tenant, key = caller_of(request).tenant, getattr(request.state, "api_key", None)
    await storage.check_room(tenant, num_batches=1)
    now_s = storage.now_s()
    batch = BatchRecord(
        id=f"batch_{secrets.token_hex(12)}",
        tenant=tenant,
        key_digest=key.digest.hex() if isinstance(key, Key) else "",
        endpoint=wanted.endpoint,
        input_file_id=file.id,
        completion_window=wanted.completion_window,
        created_s=now_s,
        expires_s=now_s + WINDOW_S,
        metadata=wanted.metadata,
    )
    await storage.call(tenant, storage.store.add_batch, batch)
    _runner(request).wake()
    return respond(Batch.of(batch))


def _runner(request: Request) -> BatchRunner:
    runner: BatchRunner = request.app.state.batch_runner
    return runner


async def list_batches(request: Request) -> Response:
    """List the caller's batches, newest first."""
    storage = storage_of(request)
    query = decode_query({name: request.query_params.getlist(name) for name in request.query_params}, BatchQuery)
    tenant = caller_of(request).tenant
    batches = await storage.call(tenant, storage.store.batches, tenant, query.after, query.limit + 1)
    page = [Batch.of(batch) for batch in batches[: query.limit]]
    return respond(
        BatchList(page, len(batches) > query.limit, page[0].id if page else None, page[-1].id if page else None)
    )


async def retrieve_batch(request: Request) -> Response:
    """Describe one batch: its status, how many of its requests are answered, and its files."""
    storage, batch_id = storage_of(request), request.path_params["batch_id"]
    tenant = caller_of(request).tenant
    return _found(batch_id, await storage.call(tenant, storage.store.batch, tenant, batch_id))


async def cancel_batch(request: Request) -> Response:
    """Cancel a batch. What is answered already stays in its output file. One that has ended stays as it is."""
    storage, batch_id = storage_of(request), request.path_params["batch_id"]
    tenant = caller_of(request).tenant
    batch = await storage.call(tenant, storage.store.cancel, tenant, batch_id, storage.now_s())
    _runner(request).wake()
    return _found(batch_id, batch)


def _found(batch_id: str, batch: BatchRecord | None) -> Response:
    if batch is None:
        raise ObjectNotFound(f"there is no batch {batch_id[:64]!r}; GET /v1/batches lists yours", param="batch_id")
    return respond(Batch.of(batch))


ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "POST",
        "/v1/batches",
        create_batch,
        takes=(CreateBatch,),
        gives=(Batch,),
        example={"input_file_id": "file-…", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
        own_errors=(ObjectNotFound, StorageFailed),
    ),
    Endpoint("GET", "/v1/batches", list_batches, takes=(BatchQuery,), gives=(BatchList,), own_errors=(ObjectNotFound,)),
    Endpoint("GET", "/v1/batches/{batch_id}", retrieve_batch, gives=(Batch,), own_errors=(ObjectNotFound,)),
    Endpoint(
        "POST",
        "/v1/batches/{batch_id}/cancel",
        cancel_batch,
        gives=(Batch,),
        own_errors=(ObjectNotFound, StorageFailed),
    ),
]
