"""How many workers a cluster is asked for. How many are needed is tested in tests/servekit/routing/test_scaling.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from servekit.config import ServeConfig
from servekit.engine.worker_scaling import WorkerScaling

CONFIG = ServeConfig(
    placement="ray", max_data_parallel_size=4, scale_target_wait=2.0, scale_up_delay=0.0, scale_down_delay=0.0
)
BUSY, IDLE = {"wait_s": 9.0, "num_running": 4}, {"wait_s": 0.0, "num_running": 0}


def core(wait_s: float, num_running: int) -> Any:
    manager = SimpleNamespace(num_running=num_running, num_waiting=0, config=SimpleNamespace(max_num_seqs=4))
    waiting_time = SimpleNamespace(seconds=lambda manager, num_ahead: wait_s)
    return SimpleNamespace(manager=manager, latency=SimpleNamespace(waiting_time=waiting_time))


def placed(cores: list[Any], num_placed: int) -> int:
    """The number of workers that is asked for after one decision."""
    pool = SimpleNamespace(num_placed=num_placed)
    WorkerScaling(CONFIG, cast(Any, pool), lambda: cores, lambda: 0.0)._decide()
    return pool.num_placed


def test_a_long_wait_asks_for_more_workers_and_an_idle_server_for_fewer() -> None:
    assert placed([core(**BUSY)], 1) == 2
    assert placed([core(**BUSY), core(**BUSY)], 2) == 4
    assert placed([core(**IDLE), core(**IDLE)], 2) == 1
    assert placed([core(wait_s=1.0, num_running=4)], 1) == 1
    assert placed([core(wait_s=9.0, num_running=4), core(wait_s=0.0, num_running=2)], 2) == 2, "the second has room"


def test_while_workers_are_to_come_no_more_are_asked_for() -> None:
    assert placed([core(**BUSY)], 2) == 2
    assert placed([core(**BUSY)], 4) == 4, "twice as many as now would be fewer than were asked for"
    assert placed([], 2) == 2


def test_workers_that_cannot_come_are_given_up_when_the_server_is_idle() -> None:
    assert placed([core(**IDLE), core(**IDLE)], 4) == 1


def test_workers_that_are_leaving_change_nothing() -> None:
    assert placed([core(**IDLE), core(**IDLE)], 1) == 1
