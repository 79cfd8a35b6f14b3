"""Define OpenAI's wire format of files and batches."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from servekit.api.schemas.common_fields import described
from servekit.batches.records import BatchRecord, BatchStatus, FileRecord, LineError

MAX_METADATA = 16
MAX_PAGE = 10_000

MetadataKey = Annotated[str, Meta(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class CreateBatch(Struct, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=64)], described("id of an uploaded file of requests")
    ]
    endpoint: Annotated[Annotated[str, Meta(min_length=1, max_length=100)], described("route of all its requests")]
    completion_window: Annotated[Literal["24h"], described("what is not answered then is not answered")] = "24h"
    metadata: Annotated[
        Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)] | None,
        described("pairs of texts that are returned with the batch"),
    ] = None


class FileQuery(Struct, kw_only=True):
    """The parameters of GET /v1/files."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE), described("maximum number of files to return")] = MAX_PAGE
    after: Annotated[str | None, described("id of the file before the first one")] = None
    order: Annotated[Literal["asc", "desc"], described("newest last, or first")] = "desc"
    purpose: Annotated[str | None, described("return only files with this purpose")] = None


class BatchQuery(Struct, kw_only=True):
    """The parameters of GET /v1/batches."""

    limit: Annotated[int, Meta(ge=1, le=100), described("maximum number of batches to return")] = 20
    after: Annotated[str | None, described("id of the batch before the first one")] = None


class File(Struct):
    """A file."""

    id: str
    bytes: int
    created_at: int  # seconds since 1970, as in all other fields with _at
    expires_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"

    @classmethod
    def of(cls, file: FileRecord) -> File:
        """Return the wire format of a file."""
        return cls(file.id, file.num_bytes, file.created_s, file.expires_s, file.name, file.purpose)


class FileDeleted(Struct):
    """The answer to DELETE."""

    id: str
    deleted: bool = True
    object: str = "file"


class FileList(Struct):
    """A page of files."""

    data: list[File]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class RequestCounts(Struct):
    """How many requests a batch has, and how many are answered."""

    total: int
    completed: int
    failed: int


class BatchErrors(Struct):
    """What is wrong with the input file."""

    data: list[LineError]
    object: str = "list"


class Batch(Struct, kw_only=True):
    """A batch."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    output_file_id: str | None
    error_file_id: str | None
    errors: BatchErrors | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    object: str = "batch"

    @classmethod
    def of(cls, batch: BatchRecord) -> Batch:
        """Return the wire format of a batch."""
        return cls(
            id=batch.id,
            endpoint=batch.endpoint,
            input_file_id=batch.input_file_id,
            completion_window=batch.completion_window,
            status=batch.status,
            created_at=batch.created_s,
            expires_at=batch.expires_s,
            in_progress_at=batch.in_progress_s,
            finalizing_at=batch.finalizing_s,
            completed_at=batch.completed_s,
            failed_at=batch.failed_s,
            expired_at=batch.expired_s,
            cancelling_at=batch.cancelling_s,
            cancelled_at=batch.cancelled_s,
            output_file_id=batch.output_file_id,
            error_file_id=batch.error_file_id,
            errors=BatchErrors(batch.errors) if batch.errors else None,
            request_counts=RequestCounts(batch.num_lines, batch.num_completed, batch.num_failed),
            metadata=batch.metadata,
        )


class BatchList(Struct):
    """A page of batches, newest first."""

    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"
