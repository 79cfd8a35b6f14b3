"""Run the engine process of a server with several API processes: start them, replace them, drain, and end.

The engine process has the parts that exist once: the listening sockets, the waiting queue, the limits, the router, the
managers, the workers, the metrics and the journal. It does not serve HTTP. See docs/design/api-processes.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from msgspec import Struct

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.api.auth.keys import Key
from servekit.api_processes import messages as ms
from servekit.api_processes.engine_session import EngineSession, SharedEngine
from servekit.config import ServeConfig
from servekit.engine.llm_engine import LLMEngine
from servekit.engine.make_engine import make_engine
from servekit.errors import InternalError, ServekitError
from servekit.observability.process_metrics import watch_api_processes
from servekit.protocol.child_process import ignore_signals
from servekit.server.keys_file import KeysReload, read_keys
from servekit.server.lifecycle import run_until_end, start_and_watch, watching
from servekit.server.listener import bind_all, url
from servekit.server.server import FINAL_WRITE_TIMEOUT_S

log = logging.getLogger("servekit")

STATUS_INTERVAL_S = 0.1  # how soon the API processes know that the engine's state has changed
MAX_FAILED_STARTS = 5  # failed starts in a row of one API process; then the server ends
FAILED_START_PAUSE_S = 1.0
AT_ONCE_TIMEOUT_S = 1.0  # for an API process to exit at once; it may be stopped, or its event loop blocked
EXIT_TIMEOUT_S = 10.0  # beyond the time to write the last answers: to end sandboxes and the trace exporter


class ApiProcessHandle:
    """One API process, from its start to its end."""

    def __init__(self, shared: SharedEngine, listener: socket.socket) -> None:
        self.is_serving = asyncio.Event()
        self.failure: ServekitError | None = None  # why it cannot serve
        self.ended = asyncio.Event()
        self.alive = ms.Alive(0, 0)  # the last one
        self._session = EngineSession(shared, self._receive, self.ended.set)
        self._listener = listener
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process, and connect to it. It waits for its settings. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_error:
            on_error.callback(ours.close)
            command = [sys.executable, "-P", "-m", "servekit.server.api_process", "--parent-pid", str(os.getpid())]
            command += ["--connection-fd", str(theirs.fileno()), "--listener-fd", str(self._listener.fileno())]
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._listener.fileno()),
                preexec_fn=os.setpgrp,  # Ctrl-C in a terminal must reach the engine process only
            )
            on_error.pop_all()
        await self._session.open(ours)

    def send(self, message: Struct) -> None:
        self._session.send(message)

    def note_tick(self) -> None:
        """Count an interval without a message, and kill a process that has been silent for too long.

        Ticks are counted, and no time is measured: a pause of this process says nothing about the other one.
        """
        self._session.num_silent_ticks += 1
        if self._session.num_silent_ticks * STATUS_INTERVAL_S > ms.SILENCE_TIMEOUT_S:
            log.error("API process %s sent no heartbeat for %g s", self.pid, ms.SILENCE_TIMEOUT_S)
            self.kill()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def reap(self) -> int:
        """Kill the process if it lives, and return its exit code; -1 if it was never started."""
        self._session.close()
        self.kill()
        return -1 if self._process is None else await self._process.wait()

    def _receive(self, message: Struct) -> None:
        match message:
            case ms.Alive():
                self.alive = message
            case ms.CannotServe():
                self.failure = message.failure.error()
                self.ended.set()
            case _:
                self.is_serving.set()


class ApiProcesses:
    """All API processes. One that ends is replaced, until the server drains."""

    def __init__(self, config: ServeConfig, engine: LLMEngine, keys: Sequence[Key]) -> None:
        """Bind the address. Raises ConfigError."""
        self._config = config
        self._shared = SharedEngine(engine)
        self._keys = list(keys)
        self._created_s = int(time.time())
        self._loaded: ms.Loaded | None = None
        self._listeners = bind_all(config)
        self._handles: list[ApiProcessHandle | None] = [None] * config.api_processes
        self._num_lines_dropped_before = 0  # by processes that have ended
        self._is_ending = False  # none is replaced any more
        self.url = url(self._listeners[0])

    def pids(self) -> list[int | None]:
        """The process ids, None for one that is being replaced."""
        return [None if handle is None else handle.pid for handle in self._handles]

    def num_tasks(self) -> int:
        """The tasks of all event loops, a second ago."""
        return sum(handle.alive.num_tasks for handle in self._handles if handle is not None)

    def num_dropped_log_lines(self) -> int:
        """The log lines that all processes have dropped since the server began, as far as they have told."""
        present = (handle.alive.num_dropped_log_lines for handle in self._handles if handle is not None)
        return self._num_lines_dropped_before + sum(present)

    async def run(self) -> None:
        """Keep all processes running until the server drains and all have ended. Raises the failure of one."""
        ticking = asyncio.create_task(self._send_status(), name="engine status")
        keeping = [
            asyncio.create_task(self._keep(index), name=f"API process {index}") for index in range(len(self._handles))
        ]
        try:
            await asyncio.gather(*keeping)
        finally:
            for task in (*keeping, ticking):
                task.cancel()
            await asyncio.gather(*keeping, ticking, return_exceptions=True)
            self._close_listeners()

    async def load(self, loaded: ms.Loaded) -> None:
        """Tell all processes that the model is loaded. Returns when all of them serve it."""
        self._loaded = loaded
        self._send_all(self._shared.status())
        self._send_all(loaded)
        while not all(each is not None and each.is_serving.is_set() for each in self._handles):  # noqa: ASYNC110
            await asyncio.sleep(STATUS_INTERVAL_S)
        self._shared.has_api = True

    def replace_keys(self, keys: Sequence[Key]) -> None:
        self._keys = list(keys)
        self._send_all(ms.ReplaceKeys(self._keys))

    def drain(self) -> None:
        """Let each process answer the requests that have begun, and exit."""
        self._is_ending = True
        self._close_listeners()
        self._send_all(self._shared.status())
        self._send_all(ms.Drain())

    def stop(self, at_once: bool) -> None:
        """Let each process fail its remaining requests, and exit; `at_once` soon kills those that have not exited."""
        self._is_ending = True
        self._close_listeners()
        self._send_all(ms.Stop(at_once))
        if at_once:
            asyncio.get_running_loop().call_later(AT_ONCE_TIMEOUT_S, self._kill_all)

    def _kill_all(self) -> None:
        for handle in self._handles:
            if handle is not None:
                handle.kill()

    def _send_all(self, message: Struct) -> None:
        for handle in self._handles:
            if handle is not None:
                handle.send(message)

    def _close_listeners(self) -> None:
        """Close this process's copies of the listening sockets, which keep clients while a process is replaced.

        The API processes close theirs when they stop listening.
        """
        for listener in self._listeners:
            listener.close()

    async def _send_status(self) -> None:
        """Send the engine's state when it has changed, and as a heartbeat."""
        sent, num_ticks = None, 0
        while True:
            status, num_ticks = self._shared.status(), num_ticks + 1
            if status != sent or num_ticks * STATUS_INTERVAL_S >= ms.HEARTBEAT_S:
                self._send_all(status)
                sent, num_ticks = status, 0
            for handle in self._handles:
                if handle is not None:
                    handle.note_tick()
            await asyncio.sleep(STATUS_INTERVAL_S)

    async def _keep(self, index: int) -> None:
        """Start a process, and another one when it has ended, until the server drains."""
        num_failed = 0
        while not self._is_ending:
            handle = ApiProcessHandle(self._shared, self._listeners[index])
            try:
                await handle.start()
                if self._is_ending:
                    return
                # Nothing waits from here to Start: keys that are replaced in between would reach no process.
                self._handles[index] = handle
                handle.send(ms.Start(self._config, self._keys, self._created_s, self._loaded is not None))
                handle.send(self._shared.status())
                if self._loaded is not None:
                    handle.send(self._loaded)
                await handle.ended.wait()
            except OSError as error:  # of `start`: the machine has no room for a process, a file or a socket
                log.error("API process %d cannot be started: %s", index, error)
            finally:
                self._handles[index] = None
                self._num_lines_dropped_before += handle.alive.num_dropped_log_lines
                pid, code = handle.pid, await handle.reap()
            if handle.failure is not None:
                raise handle.failure
            if self._is_ending:
                return
            if pid is not None:
                log.error("API process %d (process %d) ended with code %d; its connections are lost", index, pid, code)
            num_failed = 0 if handle.is_serving.is_set() else num_failed + 1
            if num_failed == MAX_FAILED_STARTS:
                raise InternalError(f"an API process failed {num_failed} times before it could serve; see the log")
            if num_failed:
                await asyncio.sleep(FAILED_START_PAUSE_S)


def serve(config: ServeConfig) -> int:
    """Serve until a signal or a failure. Returns the exit code. Raises ServekitError."""
    return run_until_end(lambda: _serve(config), config)


async def _serve(config: ServeConfig) -> int:
    keys = read_keys(config)
    engine = make_engine(config)
    assert isinstance(engine, LLMEngine), "others are refused with several API processes"
    processes = ApiProcesses(config, engine, keys)
    signals = _Signals(engine, processes)
    reload = KeysReload(processes.replace_keys, config)
    signals.handle(reload)
    watch_api_processes(engine.server_metrics.registry, processes.pids)
    running = asyncio.create_task(processes.run(), name="API processes")
    supervisor = asyncio.create_task(_supervise(engine, processes), name="supervisor")
    with watching(
        engine.server_metrics, lambda: engine.workers, reload, processes.num_dropped_log_lines, processes.num_tasks
    ):
        try:
            await asyncio.wait([running, supervisor], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():  # the engine has failed
                processes.stop(at_once=False)
            await _wait_at_most(running, FINAL_WRITE_TIMEOUT_S + EXIT_TIMEOUT_S)
        finally:
            ignore_signals()
            for task in (supervisor, running):
                task.cancel()
            await asyncio.gather(supervisor, running, return_exceptions=True)
            await engine.stop(graceful=not signals.is_forced)
    for task in (supervisor, running):
        if not task.cancelled():
            task.result()
    log.info("stopped")
    return 0


async def _wait_at_most(task: asyncio.Task[None], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with pause_tolerant_timeout(timeout_s):
            await asyncio.wait([task])


async def _supervise(engine: LLMEngine, processes: ApiProcesses) -> None:
    """Start the engine, let the API processes serve it, and return when it has ended. Raises its failure."""

    async def begin() -> str:
        await processes.load(loaded_model(engine))
        return processes.url

    await start_and_watch(engine, begin)


def loaded_model(engine: LLMEngine) -> ms.Loaded:
    """Return what API processes need to prepare requests."""
    assert engine.chat_template is not None
    return ms.Loaded(str(engine.model_path), engine.chat_template)


class _Signals:
    """SIGTERM and SIGINT drain the server; a second one ends it at once. SIGHUP reads the keys file again."""

    def __init__(self, engine: LLMEngine, processes: ApiProcesses) -> None:
        self.is_forced = False
        self._engine = engine
        self._processes = processes
        self._is_draining = False
        self._timeout: asyncio.TimerHandle | None = None

    def handle(self, reload: KeysReload) -> None:
        """Begin to handle them, on the event loop's thread."""
        loop, config = asyncio.get_running_loop(), self._engine.config
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_end)
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup sets this
        if config.api_keys_file is not None:
            loop.add_signal_handler(signal.SIGHUP, reload.request)
        elif not is_ignored:
            loop.add_signal_handler(signal.SIGHUP, self._drain)

    def _on_end(self) -> None:
        if self._is_draining:
            self.is_forced = True
            self._processes.stop(at_once=True)
        else:
            self._drain()

    def _drain(self) -> None:
        """Drain once; the shell and the kernel may each send a SIGHUP."""
        if self._is_draining:
            return
        self._is_draining = True
        config = self._engine.config
        log.info(
            "draining: running requests get %g s to finish (shutdown_timeout); a second signal ends them now",
            config.shutdown_timeout,
        )
        # With --reuse-port clients still send requests on open connections, which no other server can answer.
        self._engine.drain(admits_requests=config.reuse_port)
        self._processes.drain()
