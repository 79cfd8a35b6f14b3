"""What became of one request. Every figure that is reported can be computed again from these."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field


class Outcome(StrEnum):
    """How a request ended, by who knows it first."""

    OK = "ok"  # whole, as its door promises
    REFUSED = "refused"  # a status other than 200
    FAILED = "failed"  # an error inside a stream that had begun
    CUT = "cut"  # the connection ended in the middle of the answer
    UNREACHED = "unreached"  # there was no connection
    TIMEOUT = "timeout"  # our patience was over
    GARBLED = "garbled"  # what came is not what the door gives
    WRONG = "wrong"  # whole, and not the answer that was expected (--verify)
    SKIPPED = "skipped"  # never begun: the run ended first, or the turn before it failed


class Counted(StrEnum):
    """Where the number of output tokens comes from."""

    USAGE = "usage"  # the server's word for it
    EVENTS = "events"  # one token for each event that had text: wrong if the server coalesces
    NONE = "none"


class Record(Struct):
    """All times are seconds since the run's beginning, on one clock for all processes of the client."""

    index: int
    intended_s: float  # when it should have begun; of a closed loop or a later turn: when nothing kept it any more
    started_s: float = 0.0  # when its first byte was handed to the kernel, a new connection included
    token_times_s: list[float] = field(default_factory=list)  # when each event that brought tokens came
    tokens_per_event: list[int] | None = None  # if the server tells; None is one each
    ended_s: float = 0.0
    outcome: Outcome = Outcome.SKIPPED
    status: int = 0
    error: str = ""  # the server's code, or what happened here: few different ones, to be counted by
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    counted_by: Counted = Counted.NONE
    finish_reason: str | None = None
    queue_s: float | None = None  # what the server says that it waited
    process: int = 0  # of the client's
    group: int | None = None

    @property
    def first_token_s(self) -> float | None:
        return self.token_times_s[0] if self.token_times_s else None
