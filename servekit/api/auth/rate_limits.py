"""Limit what one API key may use: requests at the same time, and requests and tokens per minute.

The caller passes the time, in seconds on a clock that never goes back.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated

from msgspec import Meta, Struct

from servekit.errors import RateLimited

Limit = Annotated[int, Meta(ge=1, le=2**40)]

# Of a token. A client that waits exactly Retry-After seconds must be admitted, although sums of floats are inexact.
ROUNDING = 1e-6


class Limits(Struct, frozen=True):
    """The limits of one key; None is unlimited."""

    max_concurrent_requests: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None  # of prompts and answers


class TokenBucket:
    """A token bucket. Its capacity is one minute's worth, and it fills evenly, by one minute's worth per minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._balance = float(per_minute)
        self._counted_s = now

    def wait_s(self, balance: float, now: float) -> float:
        """Return the seconds until the bucket has this balance; 0 if it has it already."""
        self._fill(now)
        missing = balance - self._balance
        return missing * 60 / self._per_minute if missing > ROUNDING else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take an amount. The balance may become negative; it then fills from there."""
        self._fill(now)
        self._balance -= amount

    def _fill(self, now: float) -> None:
        gained = (now - self._counted_s) * self._per_minute / 60
        self._balance = min(float(self._per_minute), self._balance + gained)
        self._counted_s = now


class Allowance:
    """One key's limits and what is left of them. Every `enter` that returns must be followed by one `leave`."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self._requests = None if limits.requests_per_minute is None else TokenBucket(limits.requests_per_minute, now)
        self._tokens = None if limits.tokens_per_minute is None else TokenBucket(limits.tokens_per_minute, now)
        self.num_running = 0

    def enter(self, now: float) -> None:
        """Admit a request. Raises RateLimited, with the seconds to wait, and then takes nothing."""
        limits, waits = self.limits, []
        if limits.max_concurrent_requests is not None and self.num_running >= limits.max_concurrent_requests:
            # When a running request will end is unknown, so this asks for one second.
            waits.append((1.0, f"{limits.max_concurrent_requests} concurrent requests (max_concurrent_requests)"))
        if self._requests is not None and (wait_s := self._requests.wait_s(1.0, now)):
            waits.append((wait_s, f"{limits.requests_per_minute} requests per minute (requests_per_minute)"))
        # The number of tokens is known when a request ends, so the exact number is charged then. Until then the running
        # requests may take the balance below zero; while it is negative, no other request is admitted.
        if self._tokens is not None and (wait_s := self._tokens.wait_s(0.0, now)):
            waits.append((wait_s, f"{limits.tokens_per_minute} tokens per minute (tokens_per_minute)"))
        if waits:
            wait_s, limit = max(waits)
            retry_after_s = max(1, ceil(wait_s))
            raise RateLimited(
                f"this API key has reached its limit of {limit}; try again in {retry_after_s} s",
                retry_after_s=retry_after_s,
            )
        if self._requests is not None:
            self._requests.take(1.0, now)
        self.num_running += 1

    def leave(self, num_tokens: int, now: float) -> None:
        """A request has ended, in whatever way, and used this many tokens."""
        assert self.num_running, "more requests have ended than were admitted"
        self.num_running -= 1
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)


class RunningRequest:
    """A request that counts against its key's limits until its response ends, or until `end` is called earlier."""

    __slots__ = ("_allowance",)

    def __init__(self, allowance: Allowance) -> None:
        self._allowance: Allowance | None = allowance

    def end(self, num_tokens: int, now: float) -> None:
        """Charge the tokens and free the key's slot for another request. Idempotent."""
        if self._allowance is not None:
            self._allowance.leave(num_tokens, now)
            self._allowance = None
