"""Limit what one API key may use: requests and sequences at the same time, and requests and tokens per minute.

A request counts from its headers on. When its body is read, its sequences count as well, and the tokens that it may
take are reserved. When the request ends, the tokens that it used are charged to the key, and the rest is released. An
answer whose length the client leaves open is charged while it is generated (`OpenAnswer`).

The caller passes the time, in seconds on a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Annotated

from msgspec import Meta, Struct

from servekit.errors import InvalidRequest, RateLimited

Limit = Annotated[int, Meta(ge=1, le=2**40)]

# Reserved at a time for an answer without max_tokens. If the whole context were reserved, clients would be admitted one
# at a time, although most answers are much shorter.
OPEN_ANSWER_TOKENS = 1024

# Of a token. A client that waits exactly Retry-After seconds must be admitted, although sums of floats are inexact.
ROUNDING = 1e-6


class Limits(Struct, frozen=True):
    """The limits of one key; None is unlimited."""

    max_concurrent_requests: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None  # of prompts and answers
    max_concurrent_sequences: Limit | None = None  # answers that are computed, over all requests


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


class Reservation(Struct, frozen=True):
    """The sequences and tokens that are reserved for a running request until it ends."""

    num_sequences: int = 0
    num_tokens: int = 0


NOTHING = Reservation()


class Allowance:
    """One key's limits and what is left of them. Every `enter` that returns must be followed by one `leave`."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self._requests = None if limits.requests_per_minute is None else TokenBucket(limits.requests_per_minute, now)
        self._tokens = None if limits.tokens_per_minute is None else TokenBucket(limits.tokens_per_minute, now)
        self.num_running = 0
        self._num_sequences = 0  # of running requests
        self._num_reserved = 0  # tokens, for running requests

    def enter(self, now: float) -> None:
        """Admit a request. Raises RateLimited, with the seconds to wait, and then takes nothing."""
        limits, waits = self.limits, []
        if limits.max_concurrent_requests is not None and self.num_running >= limits.max_concurrent_requests:
            # When a running request will end is unknown, so this asks for one second.
            waits.append((1.0, f"{limits.max_concurrent_requests} concurrent requests (max_concurrent_requests)"))
        waits += self._request_waits(now)
        # Requests are charged when they end, which may take the balance below zero. While it is, no other request is
        # admitted. Reservations are not counted here, because many requests generate no tokens.
        if self._tokens is not None and (wait_s := self._tokens.wait_s(0.0, now)):
            waits.append((wait_s, f"{limits.tokens_per_minute} tokens per minute (tokens_per_minute)"))
        _refuse(waits)
        if self._requests is not None:
            self._requests.take(1.0, now)
        self.num_running += 1

    def reserve(self, wanted: Reservation, now: float, held: Reservation = NOTHING) -> Reservation:
        """Reserve sequences and tokens for a running request, in place of those that it holds. Returns the reservation.

        Raises InvalidRequest for more than the key may ever have, and RateLimited for more than is left; then nothing
        changes. A request with one answer is not refused for the length of the answer: it reserves the whole limit.
        """
        limits, num_tokens = self.limits, wanted.num_tokens
        if limits.max_concurrent_sequences is not None and wanted.num_sequences > limits.max_concurrent_sequences:
            raise InvalidRequest(
                f"the request asks for {wanted.num_sequences} answers (prompts times n, or best_of); this API key may "
                f"have {limits.max_concurrent_sequences} at the same time (max_concurrent_sequences); ask for fewer"
            )
        if limits.tokens_per_minute is not None and num_tokens > limits.tokens_per_minute:
            if wanted.num_sequences > 1:
                raise InvalidRequest(
                    f"the request asks for up to {num_tokens} tokens, over all its prompts and answers; this API key "
                    f"has {limits.tokens_per_minute} tokens per minute (tokens_per_minute). Ask for fewer answers, or "
                    f"for shorter ones; without max_tokens each one counts for {OPEN_ANSWER_TOKENS} tokens",
                    param="max_tokens",
                )
            num_tokens = limits.tokens_per_minute
        waits = [
            *self._sequence_waits(self._num_sequences - held.num_sequences + wanted.num_sequences),
            *self._token_waits(self._num_reserved - held.num_tokens, now),
        ]
        # This request stays charged, because its body was read. So the next one may have to wait for its turn, too.
        _refuse([*waits, *self._request_waits(now)] if waits else [])
        counted = Reservation(wanted.num_sequences, num_tokens)
        self._count(counted, held)
        return counted

    def _request_waits(self, now: float) -> list[tuple[float, str]]:
        if self._requests is None or not (wait_s := self._requests.wait_s(1.0, now)):
            return []
        return [(wait_s, f"{self.limits.requests_per_minute} requests per minute (requests_per_minute)")]

    def _sequence_waits(self, num_sequences: int) -> list[tuple[float, str]]:
        most = self.limits.max_concurrent_sequences
        if most is None or num_sequences <= most:
            return []
        return [(1.0, f"{most} answers at the same time (max_concurrent_sequences)")]

    def _token_waits(self, num_reserved: int, now: float) -> list[tuple[float, str]]:
        """Return how long to wait until one token is neither charged nor reserved.

        A request that comes while one token is left may reserve all that it asks for. So the reservations exceed the
        limit by one request at most.
        """
        if self._tokens is None:
            return []
        limit = f"{self.limits.tokens_per_minute} tokens per minute (tokens_per_minute)"
        if wait_s := self._tokens.wait_s(0.0, now):
            return [(wait_s, limit)]
        if num_reserved and self._tokens.wait_s(num_reserved + 1.0, now):
            # When a running request ends, its unused tokens are released. That may be soon, so the wait is one second.
            return [(1.0, f"{limit}: its running requests may still take {num_reserved}")]
        return []

    def extend(self, num_tokens: int, now: float) -> bool:
        """Charge a running request with tokens that it generated, and return whether it may generate as many again.

        Its reservation stays, for those next tokens. It may not generate them if more than two minutes' worth would
        then be charged and reserved. The key's only running answer always may.
        """
        if self._tokens is None or self.limits.tokens_per_minute is None:
            return True
        self._tokens.take(num_tokens, now)
        is_alone = self._num_sequences == 1
        return is_alone or not self._tokens.wait_s(self._num_reserved - self.limits.tokens_per_minute, now)

    def _count(self, wanted: Reservation, held: Reservation) -> None:
        self._num_sequences += wanted.num_sequences - held.num_sequences
        self._num_reserved += wanted.num_tokens - held.num_tokens

    def leave(self, num_tokens: int, now: float, held: Reservation = NOTHING) -> None:
        """Charge a request that has ended, for any reason, with the tokens that it used, and release what it held."""
        assert self.num_running, "more requests have ended than were admitted"
        self.num_running -= 1
        self._count(NOTHING, held)
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)


def _refuse(waits: list[tuple[float, str]]) -> None:
    """Raise RateLimited for the longest of these waits, if there are any."""
    if waits:
        wait_s, limit = max(waits)
        retry_after_s = max(1, ceil(wait_s))
        raise RateLimited(
            f"this API key has reached its limit of {limit}; try again in {retry_after_s} s",
            retry_after_s=retry_after_s,
        )


class RunningRequest:
    """A request that counts against its key's limits until its response ends, or until `end` is called earlier."""

    __slots__ = ("_allowance", "_held", "_num_charged")

    def __init__(self, allowance: Allowance) -> None:
        self._allowance: Allowance | None = allowance
        self._held = NOTHING
        self._num_charged = 0  # tokens, while it runs

    def reserve(self, num_sequences: int, max_tokens: int | None, num_prompt_tokens: int, now: float) -> None:
        """Reserve the answers that it asks for and the tokens that it may use, in place of an earlier reservation.

        `max_tokens` is the bound of each answer, if the client set one. Raises InvalidRequest or RateLimited.
        """
        if self._allowance is not None:
            each = OPEN_ANSWER_TOKENS if max_tokens is None else max_tokens
            wanted = Reservation(num_sequences, num_prompt_tokens + num_sequences * each)
            self._held = self._allowance.reserve(wanted, now, self._held)

    def extend(self, num_tokens: int, now: float) -> bool:
        """Charge tokens of an open answer, and return whether it may have as many again."""
        if self._allowance is None:
            return True
        self._num_charged += num_tokens
        return self._allowance.extend(num_tokens, now)

    def end(self, num_tokens: int, now: float) -> None:
        """Charge all of its tokens that are not charged yet, and release what the request held. Idempotent."""
        if self._allowance is not None:
            self._allowance.leave(num_tokens - self._num_charged, now, self._held)
            self._allowance = None


class OpenAnswer:
    """One answer whose length the client leaves open. It takes its tokens from the key's limit in slices."""

    __slots__ = ("_clock", "_num_left", "_request")

    def __init__(self, request: RunningRequest, clock: Callable[[], float]) -> None:
        """Count the tokens of an answer to `request`, which has reserved the first slice. `clock` gives seconds."""
        self._request = request
        self._clock = clock
        self._num_left = OPEN_ANSWER_TOKENS  # of the slice

    def count_token(self) -> bool:
        """Count a token that was generated. Returns whether the answer may have another one."""
        self._num_left -= 1
        if self._num_left:
            return True
        self._num_left = OPEN_ANSWER_TOKENS
        return self._request.extend(OPEN_ANSWER_TOKENS, self._clock())
