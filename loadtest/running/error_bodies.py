"""Read what a server says about an error: servekit, OpenAI, vLLM and text-generation-inference."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

MAX_MESSAGE_LENGTH = 500  # characters


class ErrorBody(Struct):
    """The error object of servekit and OpenAI."""

    code: str | int | None = None
    type: str | None = None
    message: Any = None


class _Failure(Struct):
    """servekit's and OpenAI's error object, or TGI's text and type."""

    error: ErrorBody | str | None = None
    error_type: str | None = None
    code: str | int | None = None  # of older vLLM, where the object is the body
    type: str | None = None
    message: Any = None


_decode_failure = msgspec.json.Decoder(_Failure).decode


def refusal_code(body: bytes | bytearray) -> str:
    """Return the server's code for a refusal, from the body; empty if there is no known one."""
    try:
        failure = _decode_failure(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    if failure.error is None:
        return error_code(ErrorBody(failure.code, failure.type), "")
    return error_code(failure.error, failure.error_type or "")


def refusal_message(body: bytes | bytearray) -> str:
    """Return the server's message for a refusal, shortened; empty if there is no known one."""
    try:
        failure = _decode_failure(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    message = failure.error.message if isinstance(failure.error, ErrorBody) else failure.error or failure.message
    return message[:MAX_MESSAGE_LENGTH] if isinstance(message, str) else ""


def error_code(error: ErrorBody | str, error_type: str | None) -> str:
    """Return a code in words if there is one: a status number as code repeats the HTTP status."""
    if isinstance(error, str):
        return error_type or error[:80]
    if isinstance(error.code, str) and error.code:
        return error.code
    return error.type or error_type or ("" if error.code is None else str(error.code))
