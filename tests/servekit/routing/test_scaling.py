"""How many replicas are needed, and when their number changes."""

from __future__ import annotations

import pytest

from servekit.routing.scaling import Demand, ReplicaScaler, desired_replicas, replica_load

IDLE = Demand(wait_s=0.0, num_waiting=0, load=0.0)


def busy(wait_s: float, load: float = 1.0, num_waiting: float = 3) -> Demand:
    return Demand(wait_s, num_waiting, load)


@pytest.mark.parametrize(
    ("num_replicas", "wait_s", "load", "desired"),
    [
        (2, 3.0, 2.0, 3.0),  # half as long again as wanted
        (2, 60.0, 2.0, 4.0),  # not more than twice as many at once
        (3, 1.0, 2.1, 3),  # busy, and no request waits for long
        (3, 0.0, 1.4, 2),
        (3, 0.0, 1.5, 3),
        (3, 0.0, 0.0, 2),  # not more than one less at once
        (1, 0.0, 0.0, 1),
        (1, 0.0, 5.0, 1),  # full slots are no reason: only a wait is
    ],
)
def test_replicas_follow_the_wait_when_it_is_long_and_the_load_when_it_is_not(
    num_replicas: int, wait_s: float, load: float, desired: float
) -> None:
    assert desired_replicas(num_replicas, busy(wait_s, load), target_wait_s=2.0) == desired


def test_a_replica_is_full_when_its_slots_or_its_kv_blocks_are() -> None:
    assert replica_load(20, 256, kv_usage=0.95) == 0.95
    assert replica_load(300, 256, kv_usage=0.2) == 300 / 256


def test_a_wait_that_ends_with_the_step_is_none() -> None:
    assert not IDLE.has_wait(target_wait_s=2.0)
    assert not Demand(wait_s=0.03, num_waiting=0.3, load=0.1).has_wait(target_wait_s=2.0)
    assert Demand(wait_s=1.5, num_waiting=0, load=0.1).has_wait(target_wait_s=2.0)
    assert Demand(wait_s=0.0, num_waiting=1, load=0.1).has_wait(target_wait_s=2.0), "it is not known for how long"


def test_the_number_changes_only_after_another_one_was_wanted_for_the_whole_delay() -> None:
    scaler = ReplicaScaler(1, 3, target_wait_s=2.0, up_delay_s=5.0, down_delay_s=60.0)
    assert scaler.decide(1, busy(9.0), now_s=0.0) == 1 and scaler.wants_more
    assert scaler.decide(1, busy(1.0), now_s=3.0) == 1 and not scaler.wants_more, "the wish has ended"
    assert scaler.decide(1, busy(9.0), now_s=4.0) == 1
    assert scaler.decide(1, busy(9.0), now_s=8.9) == 1
    assert scaler.decide(1, busy(9.0), now_s=9.0) == 2
    assert scaler.decide(2, busy(9.0, load=2.0), now_s=10.0) == 2
    assert scaler.decide(2, busy(9.0, load=2.0), now_s=15.0) == 3, "not more than the maximum"
    assert scaler.decide(3, busy(9.0, load=3.0), now_s=30.0) == 3 and not scaler.wants_more
    assert scaler.decide(3, IDLE, now_s=31.0) == 3
    assert scaler.decide(3, IDLE, now_s=91.0) == 2
    assert scaler.decide(2, IDLE, now_s=92.0) == 2, "the next one has a delay of its own"
    assert scaler.decide(2, IDLE, now_s=152.0) == 1


def test_no_replica_is_removed_at_a_moment_at_which_requests_wait() -> None:
    scaler = ReplicaScaler(1, 4, target_wait_s=2.0, up_delay_s=5.0, down_delay_s=60.0)
    assert scaler.decide(4, IDLE, now_s=0.0) == 4
    assert scaler.decide(4, busy(1.5, num_waiting=0), now_s=60.0) == 4
    assert scaler.decide(4, busy(0.0, num_waiting=1), now_s=61.0) == 4
    assert scaler.decide(4, IDLE, now_s=62.0) == 3


def test_replicas_whose_kv_blocks_are_full_are_kept() -> None:
    scaler = ReplicaScaler(1, 4, target_wait_s=2.0, up_delay_s=5.0, down_delay_s=0.0)
    full = Demand(wait_s=0.0, num_waiting=0, load=4 * replica_load(20, 256, kv_usage=0.95))
    assert scaler.decide(4, full, now_s=0.0) == 4


def test_there_are_never_fewer_than_the_minimum() -> None:
    scaler = ReplicaScaler(2, 3, target_wait_s=2.0, up_delay_s=0.0, down_delay_s=0.0)
    assert scaler.decide(3, IDLE, now_s=0.0) == 2
    assert scaler.decide(2, IDLE, now_s=1.0) == 2
