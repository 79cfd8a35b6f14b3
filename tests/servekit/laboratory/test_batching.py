"""Claims about the gates of the ways of batching."""

from __future__ import annotations

import pytest

from servekit.laboratory.batching import MODES, Gate
from servekit.scheduler.sequence import NEVER


def gate(mode: str) -> Gate:
    return Gate(MODES[mode], num_slots=4, max_delay_s=0.1)


@pytest.mark.parametrize("mode", ["continuous", "chunked"])
def test_a_continuous_gate_lets_every_request_in_at_once(mode: str) -> None:
    assert gate(mode).num_admitted([0.0, 0.1, 0.2, 0.3, 0.4], 7, True, 0.4) == 5


@pytest.mark.parametrize("mode", ["one-by-one", "static", "dynamic"])
def test_no_batch_begins_before_the_last_one_has_ended(mode: str) -> None:
    assert gate(mode).num_admitted([0.0] * 9, 1, True, 100.0) == 0


def test_a_static_batch_waits_until_it_is_full() -> None:
    static = gate("static")
    assert static.num_admitted([0.0] * 3, 0, True, 100.0) == 0 and static.opens_s([0.0]) == NEVER
    assert static.num_admitted([0.0] * 9, 0, True, 0.0) == 4


def test_the_last_static_batch_begins_although_it_is_not_full() -> None:
    assert gate("static").num_admitted([0.0] * 3, 0, False, 0.0) == 3
    assert gate("static").num_admitted([], 0, False, 0.0) == 0


def test_a_dynamic_batch_begins_when_its_oldest_request_has_waited_for_the_maximum_delay() -> None:
    dynamic = gate("dynamic")
    assert dynamic.num_admitted([1.0, 1.05], 0, True, 1.09) == 0
    assert dynamic.opens_s([1.0, 1.05]) == pytest.approx(1.1) and dynamic.opens_s([]) == NEVER
    assert dynamic.num_admitted([1.0, 1.05], 0, True, dynamic.opens_s([1.0, 1.05])) == 2
    assert dynamic.num_admitted([1.0] * 4, 0, True, 1.0) == 4


def test_one_by_one_is_a_batch_of_one() -> None:
    assert gate("one-by-one").num_admitted([0.0] * 3, 0, True, 0.0) == 1
