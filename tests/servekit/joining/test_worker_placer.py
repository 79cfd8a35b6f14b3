"""Tests of the process that places workers, which `tests.support.fake_placer` stands in for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.joining import worker_placer
from servekit.joining.settings import listener_settings
from servekit.joining.worker_placer import check_placement
from servekit.joining.worker_pool import WorkerPool
from tests.servekit.joining.clients import ENOUGH_S, LOAD


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_placer, "MODULES", {"ray": "tests.support.fake_placer"})
    monkeypatch.setattr(worker_placer, "find_spec", lambda _: object())
    monkeypatch.setattr(worker_placer, "RESTART_DELAY_S", 0.05)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # -P leaves the current directory out


@contextlib.asynccontextmanager
async def placing(**settings: Any) -> AsyncIterator[WorkerPool]:
    config = ServeConfig(model="sim:step=1ms", placement="ray", listen_workers="tcp://127.0.0.1:0", **settings)
    pool = WorkerPool(config)
    pool.start(replace(LOAD, model_path="sim:step=1ms", num_kv_blocks=None))
    try:
        yield pool
    finally:
        await pool.stop()
        await pool.stop_placing()


async def test_placed_workers_join_with_a_key_that_the_server_makes() -> None:
    async with placing(data_parallel_size=2) as pool, asyncio.timeout(ENOUGH_S):
        assert pool.stage == "waiting for a worker that ray places"
        first, second = await pool.next_worker(), await pool.next_worker()
        assert first.offer.host == second.offer.host == "a node of the cluster"
        assert first.offer.pid != second.offer.pid
        assert pool.num_placed == 2
        pool.num_placed = 3
        third = await pool.next_worker()
        await asyncio.gather(*(each.connection.end() for each in (first, second, third)))


@pytest.mark.parametrize(
    ("how", "message"),
    [("refuse", "there is no cluster"), ("crash", "the process that places workers ended with code 3")],
)
async def test_a_placement_that_fails_before_a_worker_has_joined_fails_the_start(
    how: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PLACER", how)
    async with placing() as pool, asyncio.timeout(ENOUGH_S):
        with pytest.raises(ConfigError, match=message):
            await pool.next_worker()


async def test_a_placing_process_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    async with placing() as pool, asyncio.timeout(ENOUGH_S):
        with pytest.raises(ConfigError, match=r"places workers did not start .* temporarily unavailable"):
            await pool.next_worker()
        assert pool._placer is not None and not pool._placer._running.done()


async def test_nothing_is_written_to_a_placing_process_that_is_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: bytes) -> None:
        raise BrokenPipeError

    async with placing() as pool, asyncio.timeout(ENOUGH_S):
        worker = await pool.next_worker()
        assert pool._placer is not None and pool._placer._process is not None
        stdin = pool._placer._process.stdin
        assert stdin is not None
        stdin.close()
        monkeypatch.setattr(stdin, "write", fail)
        pool.num_placed = 2
        assert pool.num_placed == 2
        await worker.connection.end()


async def test_a_placing_process_that_ends_later_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with placing() as pool, asyncio.timeout(ENOUGH_S):
        first = await pool.next_worker()
        assert pool._placer is not None and pool._placer._process is not None
        pool._placer._process.kill()
        second = await pool.next_worker()
        assert first.offer.pid != second.offer.pid
        await asyncio.gather(first.connection.end(), second.connection.end())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": "cuda:0"}, "devices = 'cuda:0' .* the cluster chooses"),
        ({"data_parallel_size": 3, "max_data_parallel_size": 2}, "max_data_parallel_size = 2 is less than"),
        ({"placement": "local", "max_data_parallel_size": 2}, "has no effect with placement = 'local'"),
        ({"ray_nodes_per_replica": 2}, "ray_nodes_per_replica = 2 does not divide the 1 ranks of a replica"),
        ({"placement": "local", "ray_nodes_per_replica": 2}, "ray_nodes_per_replica = 2 has no effect with"),
        ({"device": "cuda:1"}, "device = 'cuda:1' .* use --device cuda or --device cpu"),
    ],
)
def test_settings_that_a_cluster_cannot_have_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_placement(ServeConfig(**{"placement": "ray", **settings}))


def test_without_ray_the_server_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_placer, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed; .* pip install '.\[ray\]'"):
        check_placement(ServeConfig(placement="ray"))
    check_placement(ServeConfig())


def test_workers_on_other_nodes_can_reach_the_server_without_further_settings() -> None:
    settings = listener_settings(ServeConfig(placement="ray"))
    assert settings is not None and str(settings.address) == "tcp://0.0.0.0:0" and len(settings.key) == 64
    other = listener_settings(ServeConfig(placement="ray"))
    assert other is not None and other.key != settings.key


def test_the_model_is_named_so_that_other_machines_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    names = [
        worker_placer.model_anywhere(ServeConfig(**settings))
        for settings in ({"model": "model"}, {"model": "demo"}, {"model": "o/n", "revision": "r"}, {"model": "o/n@r"})
    ]
    assert names == [str(tmp_path / "model"), "demo", "o/n@r", "o/n@r"]
