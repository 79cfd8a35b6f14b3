"""Claims about the processes of the client: that they share one run, and that none of its requests is forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop

from loadtest import fleet, runner
from loadtest.clock import now_s
from loadtest.errors import LoadTestError
from loadtest.known_server import KnownServer, Schedule
from loadtest.planned import Request
from loadtest.planning import shares
from loadtest.record import Outcome
from loadtest.runner import Progress
from loadtest.target import Door, Target
from tests.loadtest.test_runner import conversation, evenly, outcomes, plan_of


@contextmanager
def known_server() -> Iterator[tuple[str, KnownServer]]:
    """In a thread: the fleet's parent has this one."""
    made: list[tuple[int, KnownServer, asyncio.AbstractEventLoop, asyncio.Event]] = []
    is_up = threading.Event()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        known = KnownServer(loop)
        server = await loop.create_server(known, "127.0.0.1", 0)
        made.append((server.sockets[0].getsockname()[1], known, loop, ended))
        is_up.set()
        await ended.wait()
        server.close()
        known.close()

    thread = threading.Thread(target=uvloop.run, args=(serve(),))
    thread.start()
    assert is_up.wait(5)
    port, known, loop, ended = made[0]
    try:
        yield f"http://127.0.0.1:{port}", known
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "HEAD_START_S", 0.02)
    monkeypatch.setattr(fleet, "PROGRESS_S", 0.02)


@pytest.mark.usefixtures("quickly")
def test_two_processes_share_a_run() -> None:
    seen: list[Progress] = []
    plan = plan_of(*evenly(40, 0.003, num_tokens=5))
    with known_server() as (url, known):
        assert fleet._model_of(Target([url], Door.CHAT)) == "known"
        result = fleet.run_fleet(
            Target([url], Door.CHAT, max_connections=40),
            shares(plan, 2),
            warm_up=[Request(number, None, Schedule(1000 + number).prompt(), 2) for number in range(3)],
            on_progress=lambda progress: seen.append(progress),
        )
    assert not result.errors and not result.was_stopped and result.num_missing == 0
    assert [record.index for record in result.records] == list(range(40))
    assert Counter(record.process for record in result.records) == {0: 20, 1: 20}
    assert len(known.written) == 40 + 3, "it was warmed up, which nobody writes down"
    for record in result.records:
        assert (record.outcome, record.num_output_tokens) == (Outcome.OK, 5)
        assert 0 <= record.started_s - record.intended_s < 0.1, "they have one beginning"
    assert [len(lags_s) >= 12 for lags_s in result.lags_s] == [True, True]
    assert min(result.cpu_s) > 0 and min(result.max_rss_bytes) > 2**20
    assert seen[-1].num_ok == 40 and seen[-1].num_in_flight == 0 and seen[-1].num_tokens == 200
    assert sum(len(progress.first_s) for progress in seen) == 40
    assert result.scrapes[0][1]["servekit_num_requests_running"] >= 0


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("way", ["signal", "answer"])
def test_a_fleet_that_is_stopped_gives_back_all_that_it_knows(way: str) -> None:
    slow = Schedule(first_s=0.005, gap_s=10.0)
    before = signal.getsignal(signal.SIGINT)

    def end(progress: Progress) -> bool:
        if progress.elapsed_s < 0.1:
            return False
        if way == "signal":
            os.kill(os.getpid(), signal.SIGINT)
        return way == "answer"

    with known_server() as (url, _):
        plan = plan_of(*evenly(4, 0.01, slow), Request(4, 60.0, "x", 1))
        result = fleet.run_fleet(Target([url], Door.TGI), [plan], on_progress=end, scrapes=False)
    assert result.was_stopped and not result.errors
    assert outcomes(result.records) == [Outcome.CUT] * 4 + [Outcome.SKIPPED]
    assert [record.num_output_tokens for record in result.records] == [1, 1, 1, 1, 0]
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.usefixtures("quickly")
def test_who_stops_while_it_is_being_prepared_gets_a_record_of_each_request() -> None:
    endless = [Request(0, None, Schedule(first_s=60.0).prompt(), 1)]
    plan = plan_of(*evenly(5, 0.01), *conversation("a", "b", first=5))
    timer = threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT))
    with known_server() as (url, known):
        timer.start()
        began_s = now_s()
        result = fleet.run_fleet(Target([url], Door.TGI), shares(plan, 2), warm_up=endless, scrapes=False)
        assert now_s() - began_s < 5.0
    assert result.was_stopped and not result.errors and result.num_missing == 0
    assert [record.index for record in result.records] == list(range(7)) and len(known.written) <= 1
    assert {(record.outcome, record.error) for record in result.records} == {(Outcome.SKIPPED, runner.STOPPED)}


@pytest.mark.usefixtures("quickly")
def test_a_process_that_dies_is_told_and_its_records_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Any] = []
    spawn = fleet._spawn

    async def note() -> Any:
        children.append(await spawn())
        return children[-1]

    def kill(progress: Progress) -> None:
        if progress.elapsed_s > 0.05 and children[0].process.returncode is None:
            children[0].process.kill()

    monkeypatch.setattr(fleet, "_spawn", note)
    with known_server() as (url, _):
        plan = plan_of(*evenly(20, 0.01))
        result = fleet.run_fleet(Target([url], Door.COMPLETIONS, model="m"), shares(plan, 2), on_progress=kill)
    assert result.errors == ["process 0 of the client ended with -9; 10 records are missing"]
    assert result.num_missing == 10
    assert [record.index for record in result.records] == list(range(1, 20, 2))
    assert outcomes(result.records) == [Outcome.OK] * 10


def test_what_a_process_refuses_is_told_as_the_users_mistake() -> None:
    plan = plan_of(*evenly(2, 0.01))
    with pytest.raises(LoadTestError, match="none of 2 requests to warm up"):
        fleet.run_fleet(Target(["http://127.0.0.1:1"], Door.GENERATE), [plan], warm_up=plan.requests)
    with pytest.raises(LoadTestError, match="each needs at least one"):
        fleet.run_fleet(Target(["http://127.0.0.1:1"], Door.GENERATE, max_connections=1), shares(plan, 2))
    assert runner.HEARTBEAT_S == 0.01, "which the readers of lags_s rely on"
