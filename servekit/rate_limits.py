"""How much may be asked with one API key: requests at the same time, and requests and tokens in a minute.

The time is told by whoever asks, in seconds on a clock that never goes back.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated

from msgspec import Meta, Struct

from servekit.errors import RateLimited

Limit = Annotated[int, Meta(ge=1, le=2**40)]

# Of a token. Whoever waited as long as told is not to be sent away because sums of floats are not exact.
ROUNDING = 1e-6


class Limits(Struct, frozen=True):
    """What the operator allows; None is as much as the server can do."""

    max_concurrent_requests: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None  # of prompts and answers


class TokenBucket:
    """An account that a minute's worth fits into, and that fills evenly, by a minute's worth each minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._balance = float(per_minute)
        self._counted_s = now

    def wait_s(self, balance: float, now: float) -> float:
        """Seconds until it has come to this balance; 0 if it has."""
        self._fill(now)
        missing = balance - self._balance
        return missing * 60 / self._per_minute if missing > ROUNDING else 0.0

    def take(self, amount: float, now: float) -> None:
        """Also what is not there: then it stays in debt until enough has flown in."""
        self._fill(now)
        self._balance -= amount

    def _fill(self, now: float) -> None:
        gained = (now - self._counted_s) * self._per_minute / 60
        self._balance = min(float(self._per_minute), self._balance + gained)
        self._counted_s = now


class Allowance:
    """One key's limits, and what was taken of them. Each `enter` that returns wants one `leave`."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self._requests = None if limits.requests_per_minute is None else TokenBucket(limits.requests_per_minute, now)
        self._tokens = None if limits.tokens_per_minute is None else TokenBucket(limits.tokens_per_minute, now)
        self.num_running = 0

    def enter(self, now: float) -> None:
        """Let a request in. Raises RateLimited with the seconds until one would be, and then nothing is taken."""
        limits, waits = self.limits, []
        if limits.max_concurrent_requests is not None and self.num_running >= limits.max_concurrent_requests:
            # When one of them ends, nobody knows.
            waits.append((1.0, f"{limits.max_concurrent_requests} at the same time (max_concurrent_requests)"))
        if self._requests is not None and (wait_s := self._requests.wait_s(1.0, now)):
            waits.append((wait_s, f"{limits.requests_per_minute} a minute (requests_per_minute)"))
        # How many tokens an answer will have is known when it ends, so that is when they are paid, to the token. Until
        # then the key may run into debt, by the requests that it has running; while it is in debt, no other is let in.
        if self._tokens is not None and (wait_s := self._tokens.wait_s(0.0, now)):
            waits.append((wait_s, f"{limits.tokens_per_minute} tokens a minute (tokens_per_minute)"))
        if waits:
            wait_s, limit = max(waits)
            retry_after_s = max(1, ceil(wait_s))
            raise RateLimited(
                f"this API key's limit is reached: {limit}; please try again in {retry_after_s} s",
                retry_after_s=retry_after_s,
            )
        if self._requests is not None:
            self._requests.take(1.0, now)
        self.num_running += 1

    def leave(self, num_tokens: int, now: float) -> None:
        """A request has ended, however it did, and this is what it took."""
        assert self.num_running, "more requests have ended than were let in"
        self.num_running -= 1
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)
