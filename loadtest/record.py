"""What became of one request. Every reported figure can be computed again from these records."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

STOPPED_BY_USER = "stopped by the user"  # the error of a request that was cut, or not started, for this reason


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"  # a complete answer
    REFUSED = "refused"  # a status other than 200
    FAILED = "failed"  # an error inside a stream
    CUT = "cut"  # the connection ended in the middle of the answer
    UNREACHED = "unreached"  # no connection could be made
    TIMEOUT = "timeout"  # no complete answer within the timeout
    GARBLED = "garbled"  # the answer is not in the format of the API
    WRONG = "wrong"  # a complete answer that is not the expected one (--verify)
    SKIPPED = "skipped"  # not started: the run ended first, or the turn before it failed


class Counted(StrEnum):
    """Where the number of output tokens comes from."""

    USAGE = "usage"  # reported by the server
    EVENTS = "events"  # one token for each event with text; wrong if the server puts several tokens into one event
    NONE = "none"


class Record(Struct):
    """All times are seconds since the start of the run, on one clock for all client processes."""

    index: int
    intended_s: float  # when it should have started; in a closed loop or for a later turn, when it could start
    started_s: float = 0.0  # when its first byte was handed to the kernel, or its connection was opened
    token_times_s: list[float] = field(default_factory=list)  # when each event with tokens came
    tokens_per_event: list[int] | None = None  # if the server reports them; None is one each
    ended_s: float = 0.0
    outcome: Outcome = Outcome.SKIPPED
    status: int = 0
    error: str = ""  # the server's error code, or a description; few distinct values, so that failures can be counted
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    counted_by: Counted = Counted.NONE
    finish_reason: str | None = None
    queue_s: float | None = None  # waiting time that the server reports
    process: int = 0  # number of the client process
    group: int | None = None

    @property
    def first_token_s(self) -> float | None:
        return self.token_times_s[0] if self.token_times_s else None
