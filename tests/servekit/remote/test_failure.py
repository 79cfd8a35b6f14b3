"""What each status of a remote server means."""

from __future__ import annotations

import pytest

from servekit.errors import ContextTooLong, InvalidRequest, RemoteFailed, RemoteTimeout, RemoteUnavailable
from servekit.remote.circuit_breaker import Outcome
from servekit.remote.failure import MAX_RETRY_AFTER_S, of_status

TOLD = "quota of org-17"


@pytest.mark.parametrize(
    ("status", "retry_after", "kind", "outcome", "may_repeat", "is_told"),
    [
        (400, None, InvalidRequest, Outcome.ANSWERED, False, True),
        (413, None, InvalidRequest, Outcome.ANSWERED, False, True),
        (422, None, InvalidRequest, Outcome.ANSWERED, False, True),
        (401, None, RemoteFailed, Outcome.ANSWERED, False, False),
        (403, None, RemoteFailed, Outcome.ANSWERED, False, False),
        (404, None, RemoteFailed, Outcome.ANSWERED, False, False),
        (302, None, RemoteFailed, Outcome.ANSWERED, False, False),
        (408, None, RemoteUnavailable, Outcome.UNKNOWN, True, True),
        (429, None, RemoteUnavailable, Outcome.UNKNOWN, True, True),
        (429, "3", RemoteUnavailable, Outcome.UNKNOWN, True, True),
        (503, "3", RemoteUnavailable, Outcome.UNKNOWN, True, True),
        (503, None, RemoteFailed, Outcome.FAILED, True, True),
        (503, "Wed, 21 Oct 2026 07:28:00 GMT", RemoteFailed, Outcome.FAILED, True, True),
        (500, None, RemoteFailed, Outcome.FAILED, True, True),
        (504, None, RemoteTimeout, Outcome.FAILED, True, True),
    ],
)
def test_status_says_who_is_at_fault_and_whether_to_repeat(
    status: int, retry_after: str | None, kind: type, outcome: Outcome, may_repeat: bool, is_told: bool
) -> None:
    failure = of_status("m", status, TOLD, None, retry_after)
    assert type(failure.error) is kind and failure.outcome is outcome and failure.may_repeat is may_repeat
    assert (TOLD in failure.error.message) is is_told, "what may contain the key is not repeated"
    assert "'m'" in of_status("m", status, "", None, retry_after).error.message


def test_prompt_that_is_too_long_there_is_too_long_here() -> None:
    by_code = of_status("m", 400, "too long", "context_length_exceeded", None)
    by_text = of_status("m", 400, "This model's maximum context length is 8 tokens.", None, None)
    assert isinstance(by_code.error, ContextTooLong) and isinstance(by_text.error, ContextTooLong)


@pytest.mark.parametrize(("header", "wait_s"), [("2", 2.0), ("1e9", MAX_RETRY_AFTER_S), ("-1", 0.0), ("nan", 0.0)])
def test_retry_after_is_bounded(header: str, wait_s: float) -> None:
    failure = of_status("m", 429, "", None, header)
    assert failure.wait_s == wait_s and 1 <= (failure.error.retry_after_s or 0) <= MAX_RETRY_AFTER_S
