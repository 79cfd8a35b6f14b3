"""Test client processes: they share one run, and no request is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop

from loadtest.errors import LoadTestError
from loadtest.planning.plan import Request
from loadtest.planning.planner import shares
from loadtest.record import STOPPED_BY_USER, Outcome
from loadtest.running import fleet, runner
from loadtest.running.clock import now_s
from loadtest.running.runner import Progress
from loadtest.self_test.reference_server import ReferenceServer, Schedule
from loadtest.target import ApiFormat, Target
from tests.loadtest.running.test_runner import conversation, evenly, outcomes, plan_of
from tests.support.timing import again_if_late, assert_on_time, assert_within


@contextmanager
def reference_server() -> Iterator[tuple[str, ReferenceServer]]:
    """In a thread: the fleet's parent has this one."""
    made: list[tuple[int, ReferenceServer, asyncio.AbstractEventLoop, asyncio.Event]] = []
    is_up = threading.Event()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        known = ReferenceServer(loop)
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


@again_if_late
@pytest.mark.usefixtures("quickly")
def test_two_processes_share_a_run() -> None:
    seen: list[Progress] = []
    plan = plan_of(*evenly(40, 0.003, num_tokens=5))
    with reference_server() as (url, known):
        assert fleet._model_of(Target([url], ApiFormat.CHAT)) == "known"
        result = fleet.run_fleet(
            Target([url], ApiFormat.CHAT, max_connections=40),
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
        assert record.started_s >= record.intended_s
        assert_within(0.1, record.started_s - record.intended_s, "they have one beginning")
    assert [len(lags_s) >= 12 for lags_s in result.lags_s] == [True, True]
    assert min(result.cpu_s) > 0 and min(result.max_rss_bytes) > 2**20
    assert seen[-1].num_ok == 40 and seen[-1].num_in_flight == 0 and seen[-1].num_tokens == 200
    assert sum(len(progress.first_s) for progress in seen) == 40
    assert result.scrapes[0][1]["servekit_num_requests_running"] >= 0


@again_if_late
@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("way", ["signal", "answer"])
def test_a_stopped_fleet_returns_all_records(way: str) -> None:
    slow = Schedule(first_s=0.005, gap_s=10.0)
    before = signal.getsignal(signal.SIGINT)

    def end(progress: Progress) -> bool:
        if progress.elapsed_s < 0.1:
            return False
        if way == "signal":
            os.kill(os.getpid(), signal.SIGINT)
        return way == "answer"

    with reference_server() as (url, _):
        plan = plan_of(*evenly(4, 0.01, slow), Request(4, 60.0, "x", 1))
        result = fleet.run_fleet(Target([url], ApiFormat.TGI), [plan], on_progress=end, scrapes=False)
    assert result.was_stopped and not result.errors
    assert signal.getsignal(signal.SIGINT) == before
    seen = [(record.outcome, record.num_output_tokens) for record in result.records]
    assert_on_time(seen == [(Outcome.CUT, 1)] * 4 + [(Outcome.SKIPPED, 0)], "four begin before the end")


@pytest.mark.usefixtures("quickly")
def test_a_run_stopped_during_preparation_has_a_record_of_each_request() -> None:
    endless = [Request(0, None, Schedule(first_s=60.0).prompt(), 1)]
    plan = plan_of(*evenly(5, 0.01), *conversation("a", "b", first=5))
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        while signal.getsignal(signal.SIGINT) == before:  # it would end the tests
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    with reference_server() as (url, known):
        threading.Thread(target=interrupt, daemon=True).start()
        began_s = now_s()
        result = fleet.run_fleet(Target([url], ApiFormat.TGI), shares(plan, 2), warm_up=endless, scrapes=False)
        assert now_s() - began_s < 50.0, "its preparation would take a minute"
    assert result.was_stopped and not result.errors and result.num_missing == 0
    assert [record.index for record in result.records] == list(range(7)) and len(known.written) <= 1
    assert {(record.outcome, record.error) for record in result.records} == {(Outcome.SKIPPED, STOPPED_BY_USER)}


@pytest.mark.usefixtures("quickly")
def test_a_client_process_that_dies_is_an_error_and_its_records_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Any] = []
    killed: list[Any] = []
    spawn = fleet._spawn

    async def note() -> Any:
        children.append(await spawn())
        return children[-1]

    def kill(progress: Progress) -> None:
        if progress.elapsed_s > 0.05 and not killed:
            killed.append(children[0].process)  # once: to kill a dead process takes its exit code away from asyncio
            killed[0].kill()

    monkeypatch.setattr(fleet, "_spawn", note)
    with reference_server() as (url, _):
        plan = plan_of(*evenly(20, 0.05))
        result = fleet.run_fleet(Target([url], ApiFormat.COMPLETIONS, model="m"), shares(plan, 2), on_progress=kill)
    assert result.errors == ["client process 0 ended with exit code -9; 10 records are missing"]
    assert result.num_missing == 10
    assert [record.index for record in result.records] == list(range(1, 20, 2))
    assert outcomes(result.records) == [Outcome.OK] * 10


def test_an_error_in_a_client_process_is_reported_as_a_usage_error() -> None:
    plan = plan_of(*evenly(2, 0.01))
    with pytest.raises(LoadTestError, match="none of 2 warm-up requests"):
        fleet.run_fleet(Target(["http://127.0.0.1:1"], ApiFormat.GENERATE), [plan], warm_up=plan.requests)
    with pytest.raises(LoadTestError, match="each process needs at least one"):
        fleet.run_fleet(Target(["http://127.0.0.1:1"], ApiFormat.GENERATE, max_connections=1), shares(plan, 2))
    assert runner.HEARTBEAT_S == 0.01, "which the readers of lags_s rely on"
