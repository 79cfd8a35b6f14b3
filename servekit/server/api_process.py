"""`python -m servekit.server.api_process`: serve HTTP in one of several processes for one engine process.

It is a child of the engine process, which sends its settings and keys, tells it when the model is loaded and when to
drain, and replaces it if it ends. The kernel ends it when the engine process ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator, Sequence

import uvloop
from msgspec import Struct
from starlette.applications import Starlette

from servekit.api import app as api
from servekit.api.app import create_app, replace_keys
from servekit.api_processes import messages as ms
from servekit.api_processes.engine_client import EngineClient
from servekit.api_processes.frame_connection import FrameConnection
from servekit.api_processes.remote_key_accounts import RemoteKeyAccounts
from servekit.errors import ServekitError
from servekit.observability.process_metrics import event_loop_lags
from servekit.protocol.child_process import die_with_parent, ignore_signals
from servekit.protocol.logging import configure_logging, num_dropped_lines
from servekit.server.lifecycle import tune_garbage_collector
from servekit.server.server import Server, connect_tracing

log = logging.getLogger("servekit")

DESCRIPTION = "Serve HTTP for an engine process. `servekit serve --api-processes N` starts N of these."


class ApiServer(Server):
    """The HTTP server of an API process. Signals go to the engine process, which tells when to drain and to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiProcess:
    """The parts of one API process. The first message makes them; it comes before any client is served."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._connection: FrameConnection[ms.FromEngine] | None = None
        self._start: asyncio.Future[ms.Start] = asyncio.get_running_loop().create_future()
        self._client: EngineClient
        self._app: Starlette
        self._server: ApiServer | None = None
        self._loading: asyncio.Task[None] | None = None
        self._is_ended = False  # the engine process has said so, or is gone
        self._early: list[Struct] = []  # messages that came before the server was made

    async def run(self, connected: socket.socket) -> int:
        """Serve until the engine process says so. Returns the exit code."""
        self._connection = await FrameConnection.open(connected, ms.FromEngine, self._receive, self._on_lost)
        start = await self._start  # without a timeout: the engine process sends it at once, or has ended
        config = start.config
        configure_logging(config.log_level, config.log_format)
        try:
            tracing = connect_tracing(config)
        except ServekitError as error:
            self._connection.send(ms.CannotServe(ms.Failure.of(error)))
            self._connection.close()
            return 1
        client = self._client = EngineClient(config, self._connection.send)
        record = None if tracing is None else tracing.record
        self._app = create_app(client, start.keys, record, RemoteKeyAccounts(client), start.created_s)
        self._server = server = ApiServer(self._app, client, start.is_replacement)
        for message in self._early:
            self._receive(message)
        if self._is_ended:
            server.end(at_once=True)
        tasks = [
            asyncio.create_task(self._send_signs_of_life(), name="signs of life"),
            asyncio.create_task(event_loop_lags(lambda lag_s: client.send(ms.EventLoopLag(lag_s))), name="lag"),
        ]
        try:
            await server.serve(sockets=[self._listener])
        finally:
            for task in (*tasks, self._loading):
                if task is not None:
                    task.cancel()
            await api.stop(self._app)
            await client.stop()
            if tracing is not None:
                await tracing.close()
            self._connection.close()
        return 0

    def _receive(self, message: Struct) -> None:
        if self._server is None:
            if isinstance(message, ms.Start):
                self._start.set_result(message)
            else:
                self._early.append(message)  # a few, because the server is made in the same turn of the event loop
            return
        match message:
            case ms.Loaded():
                self._loading = asyncio.create_task(self._load(message), name="loading")
            case ms.ReplaceKeys():
                replace_keys(self._app, message.keys)
            case ms.Drain():
                self._server.start_drain()
            case ms.Stop():
                self._end(message.at_once)
            case _:
                self._client.receive(message)

    async def _load(self, loaded: ms.Loaded) -> None:
        """Get ready to serve the loaded model."""
        assert self._connection is not None and self._server is not None
        try:
            await self._client.load(loaded)
            await api.start(self._app)
        except Exception as error:
            if not isinstance(error, ServekitError):
                log.exception("an API process cannot serve")
            self._connection.send(ms.CannotServe(ms.Failure.of(error)))
            return
        tune_garbage_collector()
        await self._server.listen()
        self._connection.send(ms.Serving())

    async def _send_signs_of_life(self) -> None:
        assert self._connection is not None
        while True:
            self._connection.send(ms.Alive(len(asyncio.all_tasks()), num_dropped_lines()))
            await asyncio.sleep(ms.HEARTBEAT_S)

    def _on_lost(self) -> None:
        """The engine process has ended, or this one has closed the connection."""
        if not self._start.done():
            self._start.set_exception(SystemExit(1))
        self._end(at_once=True)

    def _end(self, at_once: bool) -> None:
        self._is_ended = True
        if self._server is not None:
            self._server.end(at_once)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve HTTP until the engine process says that this ends."""
    parser = argparse.ArgumentParser(prog="python -m servekit.server.api_process", description=DESCRIPTION)
    parser.add_argument("--parent-pid", type=int, required=True, help="the engine process; this exits with it")
    parser.add_argument("--connection-fd", type=int, required=True, help="an end of a socket pair with it")
    parser.add_argument("--listener-fd", type=int, required=True, help="the bound socket to serve HTTP on")
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent_pid)
    ignore_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    connected = socket.socket(fileno=arguments.connection_fd)
    listener = socket.socket(fileno=arguments.listener_fd)
    for each in (connected, listener):
        # Otherwise child processes of this one inherit them. Then clients would wait at a socket that no process serves
        # any more, and the engine process would not see the end of this process.
        each.set_inheritable(False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(connected, listener))


async def _run(connected: socket.socket, listener: socket.socket) -> int:
    return await ApiProcess(listener).run(connected)


if __name__ == "__main__":
    raise SystemExit(main())
