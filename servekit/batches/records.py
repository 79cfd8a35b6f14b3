"""Define the stored records of files and batches."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
# The states in which the runner still has work to do.
OPEN_STATUSES: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")


End = Literal["completed", "failed", "expired", "cancelled"]


class FileRecord(Struct, frozen=True, kw_only=True):
    """One file. The content of an uploaded file is in the folder; a batch's answers are rows of the database."""

    id: str
    tenant: str
    name: str
    purpose: str
    num_bytes: int
    created_s: int  # this and all times below: seconds since 1970
    expires_s: int  # when it is deleted
    batch_id: str = ""  # of the batch whose answers it contains; "" for an uploaded file
    is_error: bool = False  # whether a batch's file has the lines that failed


class LineError(Struct, frozen=True):
    """Why a batch's input cannot be run: one wrong line of it, or the whole file."""

    code: str
    message: str
    line: int | None = None  # from 1
    param: str | None = None


class BatchRecord(Struct, kw_only=True):
    """One batch. `num_completed`, `num_failed` and `num_bytes` change with each line that is answered."""

    id: str
    tenant: str
    key_digest: str  # SHA-256 of the API key that created it, as hex; "" without keys
    endpoint: str
    input_file_id: str
    completion_window: str
    created_s: int
    expires_s: int  # the end of the completion window
    status: BatchStatus = "validating"
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_bytes: int = 0  # of the answers
    metadata: dict[str, str] | None = None
    errors: list[LineError] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_s: int | None = None
    finalizing_s: int | None = None
    completed_s: int | None = None
    failed_s: int | None = None
    expired_s: int | None = None
    cancelling_s: int | None = None
    cancelled_s: int | None = None

    @property
    def ended_s(self) -> int | None:
        """When it ended, for any reason; None before that."""
        times = (self.completed_s, self.failed_s, self.expired_s, self.cancelled_s)
        return next((time_s for time_s in times if time_s is not None), None)


class LineResult(Struct, frozen=True):
    """The answer to one line, as a line of the output file or of the error file."""

    batch_id: str
    line: int  # from 1
    content: bytes  # with its newline
    is_error: bool
