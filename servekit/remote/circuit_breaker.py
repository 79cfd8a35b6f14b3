"""A circuit breaker: stop sending requests to a server that fails, and probe it until it answers again.

    closed ── failures_to_open failures in a row ──▶ open
    open ── the cooldown is over, and a request comes ──▶ half_open: that request is the probe
    half_open ── the probe is answered ──▶ closed
    half_open ── the probe fails ──▶ open, for twice as long

`TABLE` has all transitions. This is pure: times are arguments. Each transition begins a new epoch. The outcome of a
request of an earlier epoch is ignored, because it describes a past state of the server.
"""

from __future__ import annotations

from enum import StrEnum
from math import ceil

from msgspec import Struct

MAX_COOLDOWN_S = 60.0


class State(StrEnum):
    """Whether requests are sent."""

    CLOSED = "closed"  # all requests are sent
    OPEN = "open"  # no request is sent
    HALF_OPEN = "half_open"  # one request at a time is sent: the probe


class Outcome(StrEnum):
    """What the end of a request says about the server's health."""

    ANSWERED = "answered"  # the server works; it may have refused the request
    FAILED = "failed"
    UNKNOWN = "unknown"  # the client left first, or the server was busy


class Event(StrEnum):
    """What changes the state."""

    ANSWERED = "answered"
    FAILED = "failed"
    FAILED_TOO_OFTEN = "failed_too_often"  # in a row
    COOLED_DOWN = "cooled_down"


TABLE = {
    (State.CLOSED, Event.ANSWERED): State.CLOSED,
    (State.CLOSED, Event.FAILED): State.CLOSED,
    (State.CLOSED, Event.FAILED_TOO_OFTEN): State.OPEN,
    (State.OPEN, Event.COOLED_DOWN): State.HALF_OPEN,
    (State.HALF_OPEN, Event.ANSWERED): State.CLOSED,
    (State.HALF_OPEN, Event.FAILED_TOO_OFTEN): State.OPEN,
}


class Permit(Struct, frozen=True):
    """Permission to send one request. The sender reports the outcome once."""

    epoch: int


class CircuitBreaker:
    """Permits requests to one server, or refuses them. Times that are passed to its methods must never decrease."""

    def __init__(self, failures_to_open: int, cooldown_s: float) -> None:
        self.state = State.CLOSED
        self._failures_to_open = failures_to_open
        self._first_cooldown_s = min(cooldown_s, MAX_COOLDOWN_S)
        self._cooldown_s = self._first_cooldown_s  # how long it stays open the next time
        self._num_failures = 0  # in a row, while it is closed
        self._opened_until_s = 0.0
        self._is_probed = False  # in half_open: whether a probe is in flight
        self._epoch = 0

    def begin(self, now_s: float) -> Permit | None:
        """Return the permission to send a request; None if it must not be sent."""
        if self.state is State.OPEN and now_s >= self._opened_until_s:
            self._move(Event.COOLED_DOWN, now_s)
        if self.state is State.OPEN or self._is_probed:
            return None
        self._is_probed = self.state is State.HALF_OPEN
        return Permit(self._epoch)

    def end(self, permit: Permit, outcome: Outcome, now_s: float) -> None:
        """Report how a permitted request ended."""
        if permit.epoch != self._epoch:
            return
        if outcome is Outcome.UNKNOWN:
            self._is_probed = False  # the next request is the probe
        elif outcome is Outcome.ANSWERED:
            self._move(Event.ANSWERED, now_s)
        elif self.state is State.HALF_OPEN or self._num_failures + 1 >= self._failures_to_open:
            self._move(Event.FAILED_TOO_OFTEN, now_s)
        else:
            self._move(Event.FAILED, now_s)

    def retry_after_s(self, now_s: float) -> int:
        """Whole seconds until a refused request should come back."""
        return max(1, ceil(self._opened_until_s - now_s)) if self.state is State.OPEN else 1

    def _move(self, event: Event, now_s: float) -> None:
        before, self.state = self.state, TABLE[self.state, event]
        self._num_failures = self._num_failures + 1 if event is Event.FAILED else 0
        if self.state is before:
            return
        self._epoch += 1
        self._is_probed = False
        if self.state is State.OPEN:
            self._opened_until_s = now_s + self._cooldown_s
            self._cooldown_s = min(2 * self._cooldown_s, MAX_COOLDOWN_S)
        elif self.state is State.CLOSED:
            self._cooldown_s = self._first_cooldown_s
