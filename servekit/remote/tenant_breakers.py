"""Keep a circuit breaker and a budget of retries for each tenant, so that no tenant's requests stop those of others.

A server may fail at one tenant's requests only: at a prompt that its model cannot take, or that takes too long. Then
only that tenant's breaker opens. If the server fails at all requests, the breaker of each tenant opens after
`failures_to_open` failures of its own requests. Like the breaker, this is pure: times are arguments.
"""

from __future__ import annotations

from servekit.remote.circuit_breaker import CircuitBreaker, Outcome, Permit, State
from servekit.remote.retry_budget import RetryBudget


class TenantBreakers:
    """Permits the requests of tenants to one server, or refuses them. Requests without an API key are one tenant."""

    def __init__(self, failures_to_open: int, cooldown_s: float, retry_ratio: float) -> None:
        self._failures_to_open, self._cooldown_s, self._retry_ratio = failures_to_open, cooldown_s, retry_ratio
        self._breakers: dict[str, CircuitBreaker] = {}
        self._retries: dict[str, RetryBudget] = {}
        self._shown = self._new_breaker()

    @property
    def shown(self) -> CircuitBreaker:
        """The breaker that opened last; or, if a tenant was answered since then, that tenant's breaker.

        Readiness and metrics show it as the state of the server. It refuses no request of another tenant.
        """
        return self._shown

    def of(self, tenant: str) -> CircuitBreaker:
        """Return the breaker of a tenant."""
        return self._breakers.get(tenant) or self._breakers.setdefault(tenant, self._new_breaker())

    def retries(self, tenant: str) -> RetryBudget:
        """Return the budget of retries of a tenant."""
        return self._retries.get(tenant) or self._retries.setdefault(tenant, RetryBudget(self._retry_ratio))

    def end(self, tenant: str, permit: Permit, outcome: Outcome, now_s: float) -> bool:
        """Report how a permitted request ended. Returns whether this opened the tenant's breaker."""
        breaker = self.of(tenant)
        before = breaker.state
        breaker.end(permit, outcome, now_s)
        has_opened = breaker.state is State.OPEN and before is not State.OPEN
        if has_opened or (outcome is Outcome.ANSWERED and breaker.state is State.CLOSED):
            self._shown = breaker
        return has_opened

    def _new_breaker(self) -> CircuitBreaker:
        return CircuitBreaker(self._failures_to_open, self._cooldown_s)
