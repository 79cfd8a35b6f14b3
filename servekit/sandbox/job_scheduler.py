"""Decide which job a sandbox runs next: a multilevel feedback queue of two levels, with least attained service first.

The time of a job is not known before it runs. Each job begins in the quick lane. A job that has used up a quantum is
demoted. If the slow lane has a place for its tenant, it continues there. Otherwise it is stopped, waits for such a
place, and begins again. So a slow job delays others by one quantum at most, and a quick job never waits for a slow one.
In each lane the next job is the oldest one of the tenant that has used the sandbox least lately. One place of each lane
is always left for another tenant.

What waits, and the bytes of all jobs, are bounded, and shared among the tenants (`SharedBudget`).

This module is pure: times are arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from servekit.shared_budget import SharedBudget

HALF_LIFE_S = 10.0  # after this time, attained service counts half


class Lane(Enum):
    QUICK = "quick"
    SLOW = "slow"


@dataclass(eq=False, slots=True)
class JobTicket:
    """One job's place. `lane` is where it runs or waits."""

    tenant: str
    num_bytes: int
    lane: Lane = Lane.QUICK
    started_s: float | None = None  # None while it waits


@dataclass(slots=True)
class _AttainedService:
    """How long a tenant's jobs had had places at `counted_s`."""

    service_s: float = 0.0
    counted_s: float = 0.0

    def at(self, now_s: float) -> float:
        return self.service_s * math.pow(0.5, (now_s - self.counted_s) / HALF_LIFE_S)


class JobScheduler:
    """Owns the places of both lanes, the jobs that wait for one, and what each tenant has used.

    Add a ticket, then call `start_next` until it returns None, again whenever a place may have become free.
    """

    def __init__(self, num_quick: int, num_slow: int, max_waiting: int, max_bytes: int) -> None:
        self._places = {Lane.QUICK: num_quick, Lane.SLOW: num_slow}
        self._num_waiting = SharedBudget(max_waiting)
        self._num_bytes = SharedBudget(max_bytes)  # of waiting and running jobs
        self._waiting: dict[Lane, dict[JobTicket, None]] = {lane: {} for lane in Lane}  # oldest first
        self._running: dict[Lane, dict[JobTicket, None]] = {lane: {} for lane in Lane}
        self._attained: dict[str, _AttainedService] = {}  # by tenant: each one that the keys files have ever had

    @property
    def num_waiting(self) -> int:
        return self._num_waiting.total

    @property
    def num_running(self) -> int:
        return sum(map(len, self._running.values()))

    @property
    def num_bytes(self) -> int:
        return self._num_bytes.total

    def has_room(self, tenant: str, num_bytes: int) -> bool:
        """Whether a tenant may add a job of this size."""
        return self._num_waiting.has_room(tenant, 1) and self._num_bytes.has_room(tenant, num_bytes)

    def add(self, ticket: JobTicket) -> None:
        """Add a waiting job. Requires `has_room`."""
        self._num_bytes.take(ticket.tenant, ticket.num_bytes)
        self._wait(ticket)

    def start_next(self, now_s: float) -> JobTicket | None:
        """Give the next job a place and return it; None if no place is free that a waiting job may take."""
        for lane in Lane:
            if len(self._running[lane]) < self._places[lane]:
                ticket = self._first(self._eligible(lane), now_s)
                if ticket is not None:
                    self._stop_waiting(ticket)
                    self._run(ticket, lane, now_s)
                    return ticket
        return None

    def is_slow_place_free_for(self, ticket: JobTicket) -> bool:
        is_free = len(self._running[Lane.SLOW]) < self._places[Lane.SLOW]
        return is_free and self._may_run_one_more(ticket.tenant, Lane.SLOW)

    def move_to_slow_lane(self, ticket: JobTicket, now_s: float) -> None:
        """Continue a running job in the slow lane, which must have a place for it."""
        assert self.is_slow_place_free_for(ticket)
        self._stop_running(ticket, now_s)
        self._run(ticket, Lane.SLOW, now_s)

    def requeue_in_slow_lane(self, ticket: JobTicket, now_s: float) -> None:
        """Stop a running job: it waits for a place in the slow lane, and begins again there."""
        self._stop_running(ticket, now_s)
        ticket.lane, ticket.started_s = Lane.SLOW, None
        self._wait(ticket)

    def remove(self, ticket: JobTicket, now_s: float) -> None:
        """Remove a job that has ended, or that no request waits for."""
        if ticket.started_s is None:
            self._stop_waiting(ticket)
        else:
            self._stop_running(ticket, now_s)
        self._num_bytes.release(ticket.tenant, ticket.num_bytes)

    def service_s(self, tenant: str, now_s: float) -> float:
        """Return a tenant's attained service in seconds, including the time of its running jobs."""
        attained = self._attained.get(tenant)
        running_s = [
            now_s - ticket.started_s
            for ticket in (*self._running[Lane.QUICK], *self._running[Lane.SLOW])
            if ticket.tenant == tenant and ticket.started_s is not None
        ]
        return sum(running_s) + (0.0 if attained is None else attained.at(now_s))

    def _eligible(self, lane: Lane) -> dict[str, JobTicket]:
        """The oldest waiting job of each tenant that may run one more in this lane."""
        oldest: dict[str, JobTicket] = {}
        for ticket in self._waiting[lane]:
            if ticket.tenant not in oldest and self._may_run_one_more(ticket.tenant, lane):
                oldest[ticket.tenant] = ticket
        return oldest

    def _first(self, tickets: dict[str, JobTicket], now_s: float) -> JobTicket | None:
        tenant = min(tickets, key=lambda name: self.service_s(name, now_s), default=None)
        return None if tenant is None else tickets[tenant]

    def _may_run_one_more(self, tenant: str, lane: Lane) -> bool:
        """Whether the tenant may have one more place: no tenant gets all places of a lane."""
        num_running = sum(each.tenant == tenant for each in self._running[lane])
        return num_running + 1 < self._places[lane]

    def _wait(self, ticket: JobTicket) -> None:
        self._waiting[ticket.lane][ticket] = None
        self._num_waiting.take(ticket.tenant, 1)

    def _stop_waiting(self, ticket: JobTicket) -> None:
        del self._waiting[ticket.lane][ticket]
        self._num_waiting.release(ticket.tenant, 1)

    def _run(self, ticket: JobTicket, lane: Lane, now_s: float) -> None:
        ticket.lane, ticket.started_s = lane, now_s
        self._running[lane][ticket] = None

    def _stop_running(self, ticket: JobTicket, now_s: float) -> None:
        """Take the job's place, and count the time for which the job had it."""
        assert ticket.started_s is not None
        del self._running[ticket.lane][ticket]
        attained = self._attained.setdefault(ticket.tenant, _AttainedService())
        attained.service_s = attained.at(now_s) + now_s - ticket.started_s
        attained.counted_s = now_s
