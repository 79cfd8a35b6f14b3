"""The circuit breaker: what it promises in any order of events, and how a server that fails and recovers is asked."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from servekit.remote.circuit_breaker import (
    MAX_COOLDOWN_S,
    TABLE,
    CircuitBreaker,
    Event,
    Outcome,
    Permit,
    State,
)

LIMIT, COOLDOWN_S = 3, 4.0


def test_each_state_is_reached_and_left() -> None:
    """Every pair of a state and an event that can meet is in the table, and no state is a dead end."""
    assert {before for before, _ in TABLE} == set(State) == set(TABLE.values())
    assert {event for _, event in TABLE} == set(Event)


class Breaker(RuleBasedStateMachine):
    """Requests begin and end in any order, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(LIMIT, COOLDOWN_S)
        self.now_s = 0.0
        self.running: list[tuple[Permit, State]] = []
        self.opened_s: float | None = None  # when it opened last
        self.failures: list[bool] = []  # of the requests that were begun and ended while it was closed, since then
        self.transitions: list[tuple[State, State]] = []

    def note(self, before: State) -> None:
        after = self.breaker.state
        if before is not after:
            assert after in {to for (state, _), to in TABLE.items() if state is before}
            self.transitions.append((before, after))
            self.failures = []
            self.running = [(permit, State.OPEN) for permit, _ in self.running]  # of an earlier epoch
            if after is State.OPEN:
                self.opened_s = self.now_s

    @rule(seconds=st.sampled_from([0.125, 1.0, COOLDOWN_S, 2 * COOLDOWN_S, MAX_COOLDOWN_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def begin(self) -> None:
        before = self.breaker.state
        permit = self.breaker.begin(self.now_s)
        self.note(before)
        if before is State.CLOSED:
            assert permit is not None, "a closed breaker permits every request"
        if permit is None:
            assert 1 <= self.breaker.retry_after_s(self.now_s) <= MAX_COOLDOWN_S
            return
        if before is State.OPEN:
            assert self.opened_s is not None and self.now_s - self.opened_s >= COOLDOWN_S
        self.running.append((permit, self.breaker.state))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from(Outcome))
    def end(self, data: Any, outcome: Outcome) -> None:
        permit, begun_in = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        before = self.breaker.state
        is_current = begun_in is before and before is not State.OPEN
        if is_current and before is State.CLOSED and outcome is not Outcome.UNKNOWN:
            self.failures.append(outcome is Outcome.FAILED)
        opens = len(self.failures) >= LIMIT and all(self.failures[-LIMIT:])
        self.breaker.end(permit, outcome, self.now_s)
        after = self.breaker.state
        if not is_current:
            assert after is before, "an outcome of an earlier epoch changes nothing"
        elif before is State.CLOSED:
            assert (after is State.OPEN) == opens
        else:
            expected = {Outcome.ANSWERED: State.CLOSED, Outcome.FAILED: State.OPEN, Outcome.UNKNOWN: State.HALF_OPEN}
            assert after is expected[outcome]
        self.note(before)

    @invariant()
    def at_most_one_probe_is_on_its_way(self) -> None:
        assert sum(state is State.HALF_OPEN for _, state in self.running) <= 1


TestBreaker = Breaker.TestCase


def test_server_that_fails_gets_single_probes_and_is_used_again_soon_after_it_recovers() -> None:
    """50 requests a second for ten minutes; the server fails from the first to the fifth minute."""
    breaker, random_ = CircuitBreaker(5, 5.0), random.Random(0)
    sent_in_outage: list[float] = []
    refused_after: list[float] = []
    running: list[tuple[float, Permit, Outcome]] = []
    for tick in range(600 * 50):
        now_s = tick / 50
        is_down = 60.0 <= now_s < 300.0
        while running and running[0][0] <= now_s:
            _, permit, outcome = running.pop(0)
            breaker.end(permit, outcome, now_s)
        permit_ = breaker.begin(now_s)
        if permit_ is None:
            refused_after += [now_s] if not is_down else []
            continue
        if is_down:
            sent_in_outage.append(now_s)
        outcome = Outcome.FAILED if is_down else random_.choice([Outcome.ANSWERED, Outcome.UNKNOWN])
        running.append((now_s + 0.3, permit_, outcome))
    # Until the fifth has failed, after 0.4 s; then probes after 5, 10, 20, 40 s, and then each minute.
    probes = [sent_s for sent_s in sent_in_outage if sent_s > 60.0 + 0.3 + 5 / 50]
    assert len(sent_in_outage) - len(probes) <= 21 and 3 <= len(probes) <= 7, sent_in_outage
    assert refused_after and max(refused_after) < 300.0 + MAX_COOLDOWN_S + 1.0


@pytest.mark.parametrize("num_failed_probes", [0, 1, 10])
def test_cooldown_doubles_with_each_failed_probe_up_to_a_minute(num_failed_probes: int) -> None:
    breaker, now_s, cooldown_s = CircuitBreaker(1, COOLDOWN_S), 0.0, COOLDOWN_S
    permit = breaker.begin(now_s)
    assert permit is not None
    breaker.end(permit, Outcome.FAILED, now_s)
    for _ in range(num_failed_probes):
        now_s += cooldown_s
        permit = breaker.begin(now_s)
        assert permit is not None
        breaker.end(permit, Outcome.FAILED, now_s)
        cooldown_s = min(2 * cooldown_s, MAX_COOLDOWN_S)
    assert breaker.begin(now_s + cooldown_s - 0.01) is None
    assert breaker.retry_after_s(now_s) == cooldown_s
    permit = breaker.begin(now_s + cooldown_s)
    assert permit is not None and breaker.begin(now_s + cooldown_s) is None
    assert breaker.retry_after_s(now_s + cooldown_s) == 1
    breaker.end(permit, Outcome.ANSWERED, now_s + cooldown_s)
    assert breaker.state is State.CLOSED and breaker._cooldown_s == COOLDOWN_S
