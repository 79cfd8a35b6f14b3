"""API processes that are silent, or cannot start, by calling what watches them."""

from __future__ import annotations

import asyncio
import errno
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.api.auth.keys import Key
from servekit.api_processes import messages as ms
from servekit.api_processes.engine_session import EngineSession
from servekit.config import ServeConfig
from servekit.engine.llm_engine import LLMEngine
from servekit.errors import ConfigError, InternalError
from servekit.server import engine_process
from servekit.server.engine_process import STATUS_INTERVAL_S, ApiProcesses, ApiProcessHandle

LIMIT_S = 60


class EndedProcess:
    """What `asyncio.create_subprocess_exec` returns for a process that has ended."""

    pid, returncode = 1, 0

    async def wait(self) -> int:
        return 0


ENDED_PROCESS = EndedProcess()


def make_processes() -> ApiProcesses:
    config = ServeConfig(port=0, api_processes=2)
    return ApiProcesses(config, LLMEngine(config), [])


async def test_a_process_that_gives_no_sign_of_life_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[bool] = []
    monkeypatch.setattr(ApiProcessHandle, "kill", lambda _: killed.append(True))
    handle = ApiProcessHandle(cast(Any, SimpleNamespace(engine=LLMEngine(ServeConfig()))), cast(Any, None))
    num_ticks = round(ms.SILENCE_TIMEOUT_S / STATUS_INTERVAL_S)
    for _ in range(num_ticks):
        handle.note_tick()
    assert not killed
    handle._session._receive(ms.Alive(5, 1))
    for _ in range(num_ticks):
        handle.note_tick()
    assert not killed
    handle.note_tick()
    assert killed


@pytest.mark.parametrize("is_config_error", [False, True])
async def test_a_process_that_cannot_start_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, is_config_error: bool
) -> None:
    """One that ends without a word is started five times; one that says why ends the server at once."""
    started: list[ApiProcessHandle] = []

    async def start(handle: ApiProcessHandle) -> None:
        started.append(handle)
        if is_config_error:
            handle._receive(ms.CannotServe(ms.Failure.of(ConfigError("no tokenizer"))))
        handle.ended.set()

    monkeypatch.setattr(ApiProcessHandle, "start", start)
    monkeypatch.setattr(engine_process, "FAILED_START_PAUSE_S", 0.0)
    processes = make_processes()
    async with asyncio.timeout(LIMIT_S):
        if is_config_error:
            with pytest.raises(ConfigError, match="no tokenizer"):
                await processes.run()
            assert len(started) <= 2
        else:
            with pytest.raises(InternalError, match="failed 5 times"):
                await processes.run()
            assert len(started) <= 2 * engine_process.MAX_FAILED_STARTS
    assert all(listener.fileno() == -1 for listener in processes._listeners)


async def test_failed_starts_are_counted_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth process serves before it ends, so the count begins again."""
    num_started = 0

    async def start(handle: ApiProcessHandle) -> None:
        nonlocal num_started
        num_started += 1
        if num_started == engine_process.MAX_FAILED_STARTS:
            handle._receive(ms.Serving())
        handle.ended.set()

    monkeypatch.setattr(ApiProcessHandle, "start", start)
    monkeypatch.setattr(engine_process, "FAILED_START_PAUSE_S", 0.0)
    processes = make_processes()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(InternalError, match="failed 5 times"):
            await processes._keep(0)
    processes._close_listeners()
    assert num_started == 2 * engine_process.MAX_FAILED_STARTS


async def test_the_server_is_loading_until_every_process_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = make_processes()
    sent: list[Any] = []
    handles = [SimpleNamespace(send=sent.append, is_serving=asyncio.Event()) for _ in range(2)]
    processes._handles[:] = cast(Any, handles)
    monkeypatch.setattr(LLMEngine, "state", property(lambda _: "ready"))
    loading = asyncio.create_task(processes.load(cast(Any, "loaded")))
    handles[0].is_serving.set()
    await asyncio.sleep(0)
    assert [each for each in sent if each == "loaded"] == ["loaded", "loaded"]
    assert processes._shared.status().state == "loading" and not await processes._shared.probe_readiness()
    handles[1].is_serving.set()
    async with asyncio.timeout(LIMIT_S):
        await loading
    assert processes._shared.status().state == "ready"
    processes.drain()
    assert isinstance(sent[-1], ms.Drain)


async def test_keys_that_are_replaced_while_a_process_starts_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = make_processes()
    revoked, valid = (Key(digest * 32, "tenant") for digest in (b"r", b"v"))
    processes._keys = [revoked]
    sent: list[Any] = []

    async def start_process(*_: Any, **__: Any) -> Any:
        processes.replace_keys([valid])
        return ENDED_PROCESS  # the other end of its connection is closed when this returns

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_process)
    monkeypatch.setattr(EngineSession, "send", lambda _, message: sent.append(message))
    monkeypatch.setattr(engine_process, "MAX_FAILED_STARTS", 1)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(InternalError, match="failed 1 times"):
            await processes._keep(0)
    processes._close_listeners()
    assert [each.keys for each in sent if isinstance(each, ms.Start | ms.ReplaceKeys)][-1] == [valid]
    assert isinstance(sent[0], ms.Start)


async def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have room for one more process a second later; until then nothing stays open."""
    pairs: list[tuple[socket.socket, socket.socket]] = []
    make_pair = socket.socketpair

    def record_pair() -> tuple[socket.socket, socket.socket]:
        pairs.append(make_pair())
        return pairs[-1]

    async def start_process(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(socket, "socketpair", record_pair)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_process)
    monkeypatch.setattr(engine_process, "FAILED_START_PAUSE_S", 0.0)
    processes = make_processes()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(InternalError, match="failed 5 times"):
            await processes._keep(0)
    processes._close_listeners()
    assert len(pairs) == engine_process.MAX_FAILED_STARTS
    assert all(each.fileno() == -1 for pair in pairs for each in pair)


async def test_tasks_and_dropped_log_lines_are_those_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has ended has no tasks, but the lines that it dropped stay counted."""
    handles: list[ApiProcessHandle] = []

    async def start(handle: ApiProcessHandle) -> None:
        handles.append(handle)

    monkeypatch.setattr(ApiProcessHandle, "start", start)
    processes = make_processes()
    running = asyncio.create_task(processes.run())
    async with asyncio.timeout(LIMIT_S):
        while len(handles) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        handles[0]._session._receive(ms.Alive(10, 3))
        handles[0]._session._receive(ms.Alive(11, 4))
        handles[1]._session._receive(ms.Alive(20, 1))
        assert (processes.num_tasks(), processes.num_dropped_log_lines()) == (31, 5)
        processes.drain()
        handles[0].ended.set()
        while processes.num_tasks() != 20:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert processes.num_dropped_log_lines() == 5
        handles[1].ended.set()
        await running
