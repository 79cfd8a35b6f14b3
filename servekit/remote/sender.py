"""Send requests to the server of a remote model: connections in turn, retries with a budget, and a circuit breaker.

The same code serves all APIs of remote servers. It bounds the requests that wait (`max_num_queued_reqs`), the
connections (`max_connections`; tenants take turns), the wait for a connection, the retries of one request, and the
retries of a tenant's requests together. If a server keeps failing at a tenant's requests, it gets no requests of this
tenant for a while (`TenantBreakers`). Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import ceil

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.aio.round_robin_semaphore import RoundRobinSemaphore
from servekit.config import ServeConfig
from servekit.errors import QueueFull, RemoteFailed, RemoteUnavailable, RequestError
from servekit.observability.metrics import ModelMetrics, RemoteStats
from servekit.protocol.logging import fields
from servekit.remote.circuit_breaker import CircuitBreaker, Outcome, Permit, State
from servekit.remote.failure import Failure
from servekit.remote.settings import ServerSettings
from servekit.remote.tenant_breakers import TenantBreakers
from servekit.shared_budget import SharedBudget

log = logging.getLogger("servekit")

FIRST_BACKOFF_S = 0.1  # before the first retry; doubled for each further one, less a random part of up to half
MAX_WAIT_S = 2.0  # the longest wait that a server may ask for; if it asks for more, the client must retry
RETRY_AFTER_S = 5
SPARED_SHARE = 8  # of so many connections, a tenant leaves one to others


class Attempt:
    """One request to the server. Its outcome is reported once."""

    def __init__(self, sender: Sender, tenant: str, permit: Permit) -> None:
        self.has_delivered = False  # whether the client has a part of the answer, so that it cannot be sent again
        self._sender = sender
        self._tenant = tenant
        self._permit: Permit | None = permit  # None when the outcome is reported

    def note_answering(self) -> None:
        """Note that an answer has begun. This ends a probe, because other requests must not wait for a long answer."""
        if self._permit is not None:
            self._sender.note_answering(self._tenant, self._permit)

    def hand_over(self) -> Attempt:
        """Return an attempt in place of this one, whose end is reported later: the answer is there, and not read."""
        permit, self._permit = self._permit, None
        assert permit is not None, "how it ended is reported"
        return Attempt(self._sender, self._tenant, permit)

    def report(self, outcome: Outcome, result: str) -> None:
        """Report how it ended. Only the first report counts."""
        permit, self._permit = self._permit, None
        if permit is not None:
            self._sender.note_outcome(self._tenant, permit, outcome, result)


class Sender:
    """Decides when requests may be sent to one server, and which ones are sent again."""

    def __init__(
        self, config: ServeConfig, settings: ServerSettings, clock: Callable[[], float], metrics: ModelMetrics
    ) -> None:
        self._breakers = TenantBreakers(settings.failures_to_open, settings.cooldown, settings.retry_ratio)
        self.places = SharedBudget(config.max_num_queued_reqs)  # of requests that wait for a connection
        self.num_connections = 0
        self.num_waiting = 0
        self._config = config
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        # A tenant with slow answers leaves some connections to others; without API keys there are no others.
        most = max(1, settings.max_connections - ceil(settings.max_connections / SPARED_SHARE))
        self._slots = RoundRobinSemaphore(settings.max_connections, most, anonymous_may_hold_all=True)

    @property
    def breaker(self) -> CircuitBreaker:
        """The circuit breaker that readiness and metrics show. Each tenant has its own (`TenantBreakers.shown`)."""
        return self._breakers.shown

    @property
    def refuses_requests(self) -> bool:
        """Whether the shown breaker is open. False when its cooldown is over: then a request is needed as the probe."""
        return self._refuses(self.breaker)

    def _refuses(self, breaker: CircuitBreaker) -> bool:
        return breaker.state is State.OPEN and breaker.retry_after_s(self._clock()) > 1

    @property
    def has_spare_connections(self) -> bool:
        """Whether two connections are free, besides those for requests that wait."""
        return self.num_connections + self.num_waiting + 2 <= self._settings.max_connections

    def stats(self) -> RemoteStats:
        """The state at this moment."""
        return RemoteStats(self.breaker.state, self.num_connections, self.num_waiting)

    # -- before a request ---------------------------------------------------------------------------------------------

    def check_admission(self, tenant: str, num_places: int) -> None:
        """Raise RemoteUnavailable if no request is sent at present, and QueueFull if there are too few places."""
        budget = self.places
        if self._refuses(self._breakers.of(tenant)):
            self._metrics.remote.rejected()
            raise self._breaker_open_error(tenant)
        if not budget.has_room(tenant, num_places):
            raise QueueFull(
                f"the queue is full: {budget.total} requests wait for the server of the model "
                f"{self._config.model_name!r}{budget.describe_share(tenant)}, and the request adds {num_places}; the "
                f"limit is {budget.limit} (max_num_queued_reqs). Please try again later.",
                retry_after_s=RETRY_AFTER_S,
            )

    def _breaker_open_error(self, tenant: str) -> RemoteUnavailable:
        retry_after_s = self._breakers.of(tenant).retry_after_s(self._clock())
        yours = " of yours" if tenant else ""
        return RemoteUnavailable(
            f"the server of the model {self._config.model_name!r} has failed {self._settings.failures_to_open} times "
            f"or more in a row (failures_to_open){' at requests of yours' if tenant else ''}, so no request{yours} is "
            f"sent to it for about {retry_after_s} s; please try again later",
            retry_after_s=retry_after_s,
        )

    @asynccontextmanager
    async def connection(self, tenant: str, leave_queue: Callable[[], None]) -> AsyncIterator[None]:
        """Wait for one of the connections, and hold it. `leave_queue` is called when the wait ends, however it does.

        Raises RemoteUnavailable if none becomes free in time.
        """
        settings, timeout_s = self._settings, self._settings.first_answer_timeout_s
        self.num_waiting += 1
        try:
            async with pause_tolerant_timeout(timeout_s):
                await self._slots.acquire(tenant)
        except TimeoutError:
            raise RemoteUnavailable(
                f"all {settings.max_connections} connections to the server of the model "
                f"{self._config.model_name!r} were in use for {timeout_s:g} s; send fewer requests at a time, or let "
                f"the operator raise max_connections or {settings.first_answer_setting} in the model file",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        finally:
            self.num_waiting -= 1
            leave_queue()
        self.num_connections += 1
        try:
            yield
        finally:
            self.num_connections -= 1
            self._slots.release(tenant)

    # -- a request ----------------------------------------------------------------------------------------------------

    async def send(self, tenant: str, exchange: Callable[[Attempt], Awaitable[None]]) -> None:
        """Send a request, and retry if it fails before any part of the answer has come. Call it with a connection.

        `exchange` sends it once. It reports ANSWERED itself, or hands the attempt over. It raises Failure, RequestError
        if the server refuses it later than with a status, or RemoteFailed for an invalid answer. This raises
        ServekitError: that of the last failure, or RemoteUnavailable if the request must not be sent.
        """
        self._breakers.retries(tenant).request_began()
        for number in itertools.count():
            try:
                await self._try(tenant, exchange)
                return
            except Failure as failure:
                if not self._may_repeat(tenant, failure, number):
                    raise failure.error from None
                backoff_s = FIRST_BACKOFF_S * 2**number * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(backoff_s, failure.wait_s))

    async def _try(self, tenant: str, exchange: Callable[[Attempt], Awaitable[None]]) -> None:
        permit = self._breakers.of(tenant).begin(self._clock())
        if permit is None:
            self._metrics.remote.rejected()
            raise self._breaker_open_error(tenant)
        attempt = Attempt(self, tenant, permit)
        try:
            await exchange(attempt)
        except Failure as failure:
            failure.may_repeat &= not attempt.has_delivered
            attempt.report(failure.outcome, failure.result)
            raise
        except RequestError:  # the server works, but refuses the request
            attempt.report(Outcome.ANSWERED, "refused")
            raise
        except RemoteFailed as error:  # the server sent an invalid answer
            attempt.report(Outcome.FAILED, "failed")
            raise Failure(error, "failed") from None
        finally:
            attempt.report(Outcome.UNKNOWN, "aborted")

    def _may_repeat(self, tenant: str, failure: Failure, number: int) -> bool:
        if not failure.may_repeat or failure.wait_s > MAX_WAIT_S or number >= self._settings.max_retries:
            return False
        if self._breakers.of(tenant).state is not State.CLOSED:
            return False
        if not self._breakers.retries(tenant).take():
            self._metrics.remote.retry_refused()
            return False
        self._metrics.remote.retried()
        return True

    def note_answering(self, tenant: str, permit: Permit) -> None:
        """End a probe, if this request is one."""
        if self._breakers.of(tenant).state is State.HALF_OPEN:
            self._breakers.end(tenant, permit, Outcome.ANSWERED, self._clock())

    def note_outcome(self, tenant: str, permit: Permit, outcome: Outcome, result: str) -> None:
        """Note how a request to the server has ended."""
        metrics = self._metrics.remote
        has_opened = self._breakers.end(tenant, permit, outcome, self._clock())
        metrics.request_ended(result)
        if has_opened:
            metrics.breaker_opened()
            log.warning(
                "the server of the model %s (%s) has failed too often in a row (failures_to_open: %d) at requests of "
                "one tenant: it gets no request of this tenant for %d s; check that it runs",
                self._config.model_name,
                self._settings.url,
                self._settings.failures_to_open,
                self._breakers.of(tenant).retry_after_s(self._clock()),
                extra=fields(tenant=tenant),
            )
