"""Count requests against the limits of their API keys.

`KeyAccounts` is what the API needs. `LocalKeyAccounts` counts in this process. With `--api-processes` the engine
process counts for all of them, so there the same calls ask that process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from servekit.api.auth.rate_limits import Allowance, Limits, OpenAnswer, RunningRequest
from servekit.engine.request_state import RequestState


class RequestAccount(Protocol):
    """One request that counts against its key's limits until it ends."""

    async def reserve(self, num_sequences: int, max_tokens: int | None, num_prompt_tokens: int) -> None:
        """Reserve the answers that it asks for and the tokens that it may use, in place of an earlier reservation.

        `max_tokens` is the bound of each answer, if the client set one. Raises InvalidRequest or RateLimited.
        """

    def charge(self, state: RequestState) -> None:
        """Charge the tokens of this admitted request to the key: when it ends, or earlier if its length is open."""

    def charge_tokens(self, num_tokens: int) -> None:
        """Charge so many tokens to the key when the request ends: those of a prediction."""

    def end(self) -> None:
        """Charge what is not charged yet, and release what the request held. Idempotent."""


class KeyAccounts(Protocol):
    """The accounts of all API keys."""

    async def enter(self, digest: bytes, limits: Limits) -> RequestAccount:
        """Admit a request of the key with this digest. Raises RateLimited."""


class LocalKeyAccounts:
    """Counts in this process. Keys that were removed keep their accounts: so adding one again does not reset it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._allowances: dict[bytes, Allowance] = {}  # by digest

    async def enter(self, digest: bytes, limits: Limits) -> LocalRequestAccount:
        return self.admit(digest, limits)

    def admit(self, digest: bytes, limits: Limits) -> LocalRequestAccount:
        """Like `enter`."""
        now_s = self._clock()
        allowance = self._allowances.get(digest)
        if allowance is None or allowance.limits != limits:  # it survives a reload of the keys, unless limits changed
            allowance = self._allowances[digest] = Allowance(limits, now_s)
        allowance.enter(now_s)
        return LocalRequestAccount(RunningRequest(allowance), self._clock)


class LocalRequestAccount:
    """A request that is counted in this process."""

    __slots__ = ("_clock", "_num_tokens", "_running", "_state")

    def __init__(self, running: RunningRequest, clock: Callable[[], float]) -> None:
        self._running = running
        self._clock = clock
        self._state: RequestState | None = None
        self._num_tokens = 0  # of a prediction

    async def reserve(self, num_sequences: int, max_tokens: int | None, num_prompt_tokens: int) -> None:
        self.reserve_now(num_sequences, max_tokens, num_prompt_tokens)

    def reserve_now(self, num_sequences: int, max_tokens: int | None, num_prompt_tokens: int) -> None:
        """Like `reserve`."""
        self._running.reserve(num_sequences, max_tokens, num_prompt_tokens, self._clock())

    def charge(self, state: RequestState) -> None:
        self._state = state
        if state.request.max_tokens is None:
            for output in state.outputs:
                output.count_token = OpenAnswer(self._running, self._clock).count_token

    def charge_tokens(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def end(self) -> None:
        state = self._state
        num_tokens = state.num_prompt_tokens + state.num_generated_tokens if state else self._num_tokens
        self._running.end(num_tokens, self._clock())
