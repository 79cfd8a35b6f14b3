"""Tests of the order of jobs, in virtual time: a simulated sandbox runs what the scheduler decides."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from servekit.sandbox.job_scheduler import HALF_LIFE_S, JobScheduler, JobTicket, Lane

QUANTUM_S = 0.05
NUM_QUICK, NUM_SLOW = 3, 2


@dataclass
class SimulatedSandbox:
    """Runs jobs of known durations in virtual time, as `Sandbox` does with processes."""

    scheduler: JobScheduler = field(default_factory=lambda: JobScheduler(NUM_QUICK, NUM_SLOW, 512, 2**26))
    now_s: float = 0.0
    durations_s: dict[JobTicket, float] = field(default_factory=dict)
    arrived_s: dict[JobTicket, float] = field(default_factory=dict)
    ended_s: dict[JobTicket, float] = field(default_factory=dict)
    num_starts: int = 0
    _events: list[tuple[float, int, str, JobTicket, float]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def arrive(self, at_s: float, tenant: str, duration_s: float) -> JobTicket:
        ticket = JobTicket(tenant, 100)
        self.durations_s[ticket] = duration_s
        self._schedule(at_s, "arrive", ticket, 0.0)
        return ticket

    def run(self, until_s: float = float("inf")) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event, ticket, started_s = heapq.heappop(self._events)
            if event == "arrive":
                self.arrived_s[ticket] = self.now_s
                if self.scheduler.has_room(ticket.tenant, ticket.num_bytes):
                    self.scheduler.add(ticket)
            elif started_s == self._runs.get(ticket):
                if event == "end":
                    self._end(ticket)
                elif ticket.lane is Lane.QUICK:
                    self._demote(ticket)
            self._start_jobs()
            self._check()

    def __post_init__(self) -> None:
        self._runs: dict[JobTicket, float] = {}  # when each running job began

    def _end(self, ticket: JobTicket) -> None:
        del self._runs[ticket]
        self.scheduler.remove(ticket, self.now_s)
        self.ended_s[ticket] = self.now_s

    def _demote(self, ticket: JobTicket) -> None:
        if self.scheduler.is_slow_place_free_for(ticket):
            self.scheduler.move_to_slow_lane(ticket, self.now_s)
        else:
            del self._runs[ticket]
            self.scheduler.requeue_in_slow_lane(ticket, self.now_s)

    def _start_jobs(self) -> None:
        while (ticket := self.scheduler.start_next(self.now_s)) is not None:
            self.num_starts += 1
            self._runs[ticket] = self.now_s
            self._schedule(self.now_s + self.durations_s[ticket], "end", ticket, self.now_s)
            self._schedule(self.now_s + QUANTUM_S, "demote", ticket, self.now_s)

    def _schedule(self, at_s: float, event: str, ticket: JobTicket, started_s: float) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), event, ticket, started_s))

    def _check(self) -> None:
        lanes = [ticket.lane for ticket in self._runs]
        assert lanes.count(Lane.QUICK) <= NUM_QUICK and lanes.count(Lane.SLOW) <= NUM_SLOW
        for lane, num_places in ((Lane.QUICK, NUM_QUICK), (Lane.SLOW, NUM_SLOW)):
            tenants = Counter(ticket.tenant for ticket in self._runs if ticket.lane is lane)
            assert max(tenants.values(), default=0) < num_places, "one place is left for another tenant"
        assert self.scheduler.num_running == len(self._runs)

    def wait_s(self, ticket: JobTicket) -> float:
        """From arrival to end, less the time that the job takes alone."""
        return self.ended_s[ticket] - self.arrived_s[ticket] - self.durations_s[ticket]


def test_quick_jobs_of_another_tenant_do_not_wait() -> None:
    sandbox = SimulatedSandbox()
    for number in range(200):
        sandbox.arrive(0.01 * number, "attacker", 2.0)
    victims = [sandbox.arrive(0.1 + 0.037 * number, "victim", 0.005) for number in range(100)]
    sandbox.run(until_s=5.0)
    assert max(map(sandbox.wait_s, victims)) < 1e-6


def test_quick_jobs_wait_for_no_slow_job_of_their_own_tenant_either() -> None:
    sandbox = SimulatedSandbox()
    for _ in range(6):
        sandbox.arrive(0.0, "", 2.0)
    quick = [sandbox.arrive(0.5 + 0.05 * number, "", 0.005) for number in range(20)]
    sandbox.run(until_s=3.0)
    assert max(map(sandbox.wait_s, quick)) <= 4 * QUANTUM_S


def test_a_slow_job_of_another_tenant_waits_for_no_slow_job_of_one_that_floods() -> None:
    sandbox = SimulatedSandbox()
    for number in range(100):
        sandbox.arrive(0.01 * number, "attacker", 2.0)
    victims = [sandbox.arrive(1.0 + 2.5 * number, "victim", 0.3) for number in range(4)]
    sandbox.run()
    assert max(map(sandbox.wait_s, victims)) < 1e-6


def test_with_more_slow_tenants_than_places_each_is_served_in_turn() -> None:
    sandbox = SimulatedSandbox()
    tenants = {name: [sandbox.arrive(0.0, name, 1.0) for _ in range(10)] for name in "abcde"}
    sandbox.run(until_s=10.0)
    num_ended = [sum(ticket in sandbox.ended_s for ticket in tickets) for tickets in tenants.values()]
    assert max(num_ended) - min(num_ended) <= 1 and sum(num_ended) >= 18


def test_every_job_ends_and_begins_twice_at_most() -> None:
    rng = random.Random(7)
    sandbox = SimulatedSandbox()
    tickets = [
        sandbox.arrive(rng.uniform(0, 20), rng.choice("abcd"), rng.choice([0.001, 0.02, 0.07, 0.5, 2.0]))
        for _ in range(300)
    ]
    sandbox.run()
    assert set(sandbox.ended_s) == set(tickets)
    assert sandbox.num_starts <= 2 * len(tickets)
    assert (sandbox.scheduler.num_waiting, sandbox.scheduler.num_running, sandbox.scheduler.num_bytes) == (0, 0, 0)


def test_the_next_job_is_of_the_tenant_that_has_used_the_least_lately() -> None:
    scheduler = JobScheduler(2, 2, 64, 1000)
    used, other = JobTicket("heavy", 1), JobTicket("other", 1)
    for ticket in (used, other):
        scheduler.add(ticket)
        assert scheduler.start_next(0.0) is ticket
    waiting = [JobTicket("heavy", 1), JobTicket("light", 1), JobTicket("light", 1)]
    for ticket in waiting:
        scheduler.add(ticket)
    assert scheduler.start_next(1.0) is None, "both places are taken"
    scheduler.remove(used, 3.0)
    assert scheduler.service_s("heavy", 3.0) == pytest.approx(3.0)
    assert scheduler.service_s("heavy", 3.0 + HALF_LIFE_S) == pytest.approx(1.5), "long ago counts less"
    order = []
    for number in range(3):
        started = scheduler.start_next(3.0 + number)
        assert started is not None
        order.append(started)
        scheduler.remove(started, 4.0 + number)
    assert order == [waiting[1], waiting[2], waiting[0]], "the oldest of the tenant with less"


def test_one_tenant_never_has_all_places_of_a_lane() -> None:
    scheduler = JobScheduler(3, 2, 64, 1000)
    for _ in range(4):
        scheduler.add(JobTicket("a", 1))
    first, second = scheduler.start_next(0.0), scheduler.start_next(0.0)
    assert first is not None and second is not None and scheduler.start_next(0.0) is None
    other = JobTicket("b", 1)
    scheduler.add(other)
    assert scheduler.start_next(0.0) is other
    scheduler.move_to_slow_lane(first, 0.1)
    assert not scheduler.is_slow_place_free_for(second) and scheduler.is_slow_place_free_for(other)


def test_a_flooding_tenant_fills_only_its_own_share() -> None:
    scheduler = JobScheduler(2, 2, max_waiting=100, max_bytes=10_000)

    def fill(tenant: str, num_bytes: int) -> int:
        count = 0
        while scheduler.has_room(tenant, num_bytes):
            scheduler.add(JobTicket(tenant, num_bytes))
            count += 1
        return count

    assert fill("a", 1) == 50, "half of what is free"
    assert fill("b", 1) == 25
    assert fill("c", 1) == 12
    assert scheduler.has_room("d", 1)
    assert not scheduler.has_room("a", 1)


def test_a_tenants_bytes_are_bounded_while_its_jobs_wait_and_run() -> None:
    scheduler = JobScheduler(2, 2, max_waiting=100, max_bytes=1000)
    running = JobTicket("a", 500)
    assert scheduler.has_room("a", 500)
    scheduler.add(running)
    assert scheduler.start_next(0.0) is running
    assert not scheduler.has_room("a", 1) and scheduler.has_room("b", 250) and not scheduler.has_room("b", 501)
    scheduler.remove(running, 1.0)
    assert scheduler.has_room("a", 500)


def test_a_job_that_is_taken_back_leaves_nothing_behind() -> None:
    scheduler = JobScheduler(2, 2, 64, 1000)
    waiting, running = JobTicket("a", 10), JobTicket("a", 10)
    scheduler.add(running)
    scheduler.add(waiting)
    assert scheduler.start_next(0.0) is running
    scheduler.remove(waiting, 0.5)
    scheduler.remove(running, 0.5)
    assert scheduler.start_next(1.0) is None and scheduler.num_bytes == 0
