"""How many workers a cluster is asked for. How many are needed is tested in tests/servekit/routing/test_scaling.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.engine import worker_scaling
from servekit.engine.worker_scaling import WorkerScaling

CONFIG = ServeConfig(
    placement="ray", max_data_parallel_size=4, scale_target_wait=2.0, scale_up_delay=0.0, scale_down_delay=0.0
)
BUSY: dict[str, Any] = {"wait_s": 9.0, "num_running": 4}
IDLE: dict[str, Any] = {"wait_s": 0.0, "num_running": 0}


def core(wait_s: float, num_running: int, num_waiting: int = 0, kv_usage: float = 0.0, is_known: bool = True) -> Any:
    manager = SimpleNamespace(
        num_running=num_running,
        num_waiting=num_waiting,
        config=SimpleNamespace(max_num_seqs=4),
        kv_cache=SimpleNamespace(pool=SimpleNamespace(num_blocks=100, num_available=round(100 * (1 - kv_usage)))),
    )
    waiting_time = SimpleNamespace(is_known=is_known, seconds=lambda manager, num_ahead: wait_s)
    return SimpleNamespace(manager=manager, latency=SimpleNamespace(waiting_time=waiting_time))


def placed(cores: list[Any], num_placed: int) -> int:
    """The number of workers that is asked for after one decision."""
    pool = SimpleNamespace(num_placed=num_placed)
    WorkerScaling(CONFIG, cast(Any, pool), lambda: cores, lambda: 0.0)._decide()
    return pool.num_placed


def test_a_long_wait_asks_for_more_workers_and_an_idle_server_for_one_less() -> None:
    assert placed([core(**BUSY)], 1) == 2
    assert placed([core(**BUSY), core(**BUSY)], 2) == 4
    assert placed([core(**IDLE), core(**IDLE)], 2) == 1
    assert placed([core(**IDLE) for _ in range(4)], 4) == 3
    assert placed([core(wait_s=1.0, num_running=4)], 1) == 1
    assert placed([core(wait_s=9.0, num_running=4), core(wait_s=0.0, num_running=2)], 2) == 2, "the second has room"


def test_workers_whose_kv_blocks_are_full_stay_although_slots_are_free() -> None:
    assert placed([core(wait_s=1.5, num_running=1, num_waiting=1, kv_usage=0.97) for _ in range(4)], 4) == 4
    assert placed([core(wait_s=0.0, num_running=1, kv_usage=0.97) for _ in range(4)], 4) == 4
    assert placed([core(wait_s=0.0, num_running=1, kv_usage=0.3) for _ in range(4)], 4) == 3


def test_no_worker_leaves_while_requests_wait_everywhere() -> None:
    assert placed([core(wait_s=0.5, num_running=0, num_waiting=1) for _ in range(4)], 4) == 4
    assert placed([core(wait_s=0.0, num_running=0, num_waiting=1, is_known=False) for _ in range(4)], 4) == 4


def test_a_wait_that_is_not_known_yet_does_not_count_as_none() -> None:
    unknown = core(wait_s=0.0, num_running=4, num_waiting=3, is_known=False)
    assert placed([core(**BUSY), unknown], 2) == 4
    assert placed([unknown, unknown], 2) == 2, "nothing is known"
    assert placed([core(**BUSY), core(**IDLE, is_known=False)], 2) == 2, "the new worker has room"


def test_while_workers_are_to_come_no_more_are_asked_for() -> None:
    assert placed([core(**BUSY)], 2) == 2
    assert placed([core(**BUSY)], 4) == 4, "twice as many as now would be fewer than were asked for"
    assert placed([], 2) == 2


def test_workers_that_cannot_come_are_given_up_when_the_server_is_idle() -> None:
    assert placed([core(**IDLE), core(**IDLE)], 4) == 1


def test_workers_that_do_not_come_are_given_up_when_those_that_are_there_have_been_enough_for_the_delay() -> None:
    now_s, wait_s, pool = 0.0, 1.0, SimpleNamespace(num_placed=4)
    config = replace(CONFIG, scale_down_delay=60.0)
    scaling = WorkerScaling(
        config, cast(Any, pool), lambda: [core(wait_s, num_running=4) for _ in range(2)], lambda: now_s
    )

    def at(seconds: float, wait: float) -> int:
        nonlocal now_s, wait_s
        now_s, wait_s = seconds, wait
        scaling._decide()
        return pool.num_placed

    assert at(0.0, wait=1.0) == 4
    assert at(59.0, wait=1.0) == 4
    assert at(61.0, wait=1.0) == 2

    pool.num_placed = 4
    assert at(70.0, wait=1.0) == 4
    assert at(100.0, wait=9.0) == 4, "they are wanted again"
    assert at(131.0, wait=1.0) == 4
    assert at(191.0, wait=1.0) == 2


def test_never_fewer_workers_than_the_minimum_are_asked_for() -> None:
    pool = SimpleNamespace(num_placed=3)
    config = replace(CONFIG, data_parallel_size=3)
    WorkerScaling(config, cast(Any, pool), lambda: [core(**IDLE)], lambda: 0.0)._decide()
    assert pool.num_placed == 3


def test_workers_that_are_leaving_change_nothing() -> None:
    assert placed([core(**IDLE), core(**IDLE)], 1) == 1


async def test_an_error_does_not_end_the_scaling(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_scaling, "INTERVAL_S", 0.0)
    errors = iter([ValueError("first"), ValueError("again"), BrokenPipeError("the process has ended")])
    done = asyncio.Event()

    def read_cores() -> list[Any]:
        error = next(errors, None)
        if error is None:
            done.set()
            return []
        raise error

    scaling = WorkerScaling(CONFIG, cast(Any, SimpleNamespace(num_placed=1)), read_cores, lambda: 0.0)
    task = asyncio.create_task(scaling.run())
    await asyncio.wait_for(done.wait(), 60)
    task.cancel()
    assert [type(each.exc_info[1]) for each in caplog.records if each.exc_info] == [ValueError, BrokenPipeError]
