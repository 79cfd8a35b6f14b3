"""Classify a failed request to a remote model's server: for the client, the circuit breaker and retries."""

from __future__ import annotations

from servekit.errors import (
    ContextTooLong,
    InvalidRequest,
    RemoteFailed,
    RemoteTimeout,
    RemoteUnavailable,
    ServekitError,
)
from servekit.remote.circuit_breaker import Outcome

OVERLOADED = (408, 425, 429)  # the server works, and asks to come back later
OF_THE_REQUEST = (400, 413, 422)  # the client can correct it
DEFAULT_RETRY_AFTER_S = 5
MAX_RETRY_AFTER_S = 600


class Failure(Exception):
    """A request to the server that failed. `result` is its label in the metrics."""

    def __init__(
        self,
        error: ServekitError,
        result: str,
        outcome: Outcome = Outcome.FAILED,
        *,
        may_repeat: bool = False,
        wait_s: float = 0.0,
        status: int | None = None,
        server_message: str = "",
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.result = result
        self.outcome = outcome
        self.may_repeat = may_repeat  # as long as no part of the answer has come
        self.wait_s = wait_s  # before the next try, at least
        self.status = status  # of the server's answer, if there was one
        self.server_message = server_message  # for the log


def of_status(model: str, status: int, message: str, code: str | None, retry_after: str | None) -> Failure:
    """Return the failure for an answer with a status other than 200.

    `message` and `code` are the server's own. They are repeated if the client can correct the request. They are left
    out if the operator must act, because a message about an API key may contain a part of the key.
    """
    detail = f": {message}" if message else ""
    if status in OF_THE_REQUEST:
        is_length = code == "context_length_exceeded" or "maximum context length" in message
        kind = ContextTooLong if is_length else InvalidRequest
        error: ServekitError = kind(f"the server of the model {model!r} refused the request{detail}")
        return Failure(error, "refused", Outcome.ANSWERED, status=status, server_message=message)
    wait_s = _seconds(retry_after)
    if status in OVERLOADED or (status == 503 and wait_s is not None):
        error = RemoteUnavailable(
            f"the server of the model {model!r} is busy (status {status}){detail}; please try again later",
            retry_after_s=max(1, round(wait_s or DEFAULT_RETRY_AFTER_S)),
        )
        return Failure(
            error, "busy", Outcome.UNKNOWN, may_repeat=True, wait_s=wait_s or 0.0, status=status, server_message=message
        )
    if status >= 500:
        kind_of_error = RemoteTimeout if status == 504 else RemoteFailed
        return Failure(
            kind_of_error(f"the server of the model {model!r} failed (status {status}){detail}"),
            "failed",
            may_repeat=True,
            status=status,
            server_message=message,
        )
    error = RemoteFailed(
        f"the server of the model {model!r} does not accept this server's requests (status {status}); the operator has "
        "to correct its entry in the model file: the log has the reason"
    )
    return Failure(error, "refused", Outcome.ANSWERED, status=status, server_message=message)


def _seconds(retry_after: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None for a date, or without the header."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if seconds >= 0 else None
