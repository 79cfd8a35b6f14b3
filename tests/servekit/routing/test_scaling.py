"""How many replicas are needed, and when their number changes."""

from __future__ import annotations

import pytest

from servekit.routing.scaling import ReplicaScaler, desired_replicas


@pytest.mark.parametrize(
    ("num_replicas", "wait_s", "load", "desired"),
    [
        (2, 3.0, 2.0, 3.0),  # half as long again as wanted
        (2, 60.0, 2.0, 4.0),  # not more than twice as many at once
        (3, 1.0, 2.1, 3),  # busy, and nobody waits for long
        (3, 0.0, 1.4, 2),
        (3, 0.0, 0.0, 1),
        (1, 0.0, 5.0, 1),  # full slots are no reason: only a wait is
    ],
)
def test_replicas_follow_the_wait_when_it_is_long_and_the_load_when_it_is_not(
    num_replicas: int, wait_s: float, load: float, desired: float
) -> None:
    assert desired_replicas(num_replicas, wait_s, load, target_wait_s=2.0) == desired


def test_the_number_changes_only_after_another_one_was_wanted_for_the_whole_delay() -> None:
    scaler = ReplicaScaler(1, 3, target_wait_s=2.0, up_delay_s=5.0, down_delay_s=60.0)
    assert scaler.decide(1, wait_s=9.0, load=1.0, now_s=0.0) == 1
    assert scaler.decide(1, wait_s=1.0, load=1.0, now_s=3.0) == 1, "the wish has ended"
    assert scaler.decide(1, wait_s=9.0, load=1.0, now_s=4.0) == 1
    assert scaler.decide(1, wait_s=9.0, load=1.0, now_s=8.9) == 1
    assert scaler.decide(1, wait_s=9.0, load=1.0, now_s=9.0) == 2
    assert scaler.decide(2, wait_s=9.0, load=2.0, now_s=10.0) == 2
    assert scaler.decide(2, wait_s=9.0, load=2.0, now_s=15.0) == 3, "not more than the maximum"
    assert scaler.decide(3, wait_s=9.0, load=3.0, now_s=30.0) == 3
    assert scaler.decide(3, wait_s=0.0, load=0.0, now_s=31.0) == 3
    assert scaler.decide(3, wait_s=0.0, load=0.0, now_s=91.0) == 1


def test_there_are_never_fewer_than_the_minimum() -> None:
    scaler = ReplicaScaler(2, 3, target_wait_s=2.0, up_delay_s=0.0, down_delay_s=0.0)
    assert scaler.decide(3, wait_s=0.0, load=0.0, now_s=0.0) == 2
    assert scaler.decide(2, wait_s=0.0, load=0.0, now_s=1.0) == 2
