"""The wire format of files and batches is what OpenAI's client reads."""

from __future__ import annotations

import json
from typing import Any

import openai.types

from servekit.api.schemas.batches import Batch, File
from servekit.api.schemas.json_body import encode
from servekit.batches.records import BatchRecord, FileRecord, LineError


def record(**changes: Any) -> BatchRecord:
    return BatchRecord(
        id="batch_1",
        tenant="a",
        key_digest="",
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        created_s=1,
        expires_s=2,
        **changes,
    )


def test_a_batch_has_the_fields_of_openais_type() -> None:
    batch = record(num_lines=3, num_completed=1, num_failed=1, completed_s=9, status="completed", metadata={"a": "b"})
    written = json.loads(encode(Batch.of(batch)))
    read = openai.types.Batch.model_validate(written, strict=True)
    assert written.keys() <= openai.types.Batch.model_fields.keys()
    assert read.request_counts is not None and read.request_counts.total == 3 and read.completed_at == 9
    assert read.errors is None and read.metadata == {"a": "b"}


def test_errors_of_a_batch_name_their_lines() -> None:
    written = encode(Batch.of(record(status="failed", errors=[LineError("invalid_json_line", "wrong", 3)])))
    read = openai.types.Batch.model_validate_json(written)
    assert read.errors is not None and read.errors.data is not None
    assert (read.errors.data[0].line, read.errors.data[0].code) == (3, "invalid_json_line")


def test_a_file_has_the_fields_of_openais_type() -> None:
    file = FileRecord(id="file-1", tenant="a", name="in", purpose="batch", num_bytes=7, created_s=1, expires_s=2)
    read = openai.types.FileObject.model_validate_json(encode(File.of(file)))
    assert (read.bytes, read.filename, read.status, read.expires_at) == (7, "in", "processed", 2)
