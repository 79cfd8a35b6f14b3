"""Run the server process: bind, load the model, listen, drain, and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette

from servekit import __version__
from servekit.api import app as api
from servekit.api.app import create_app, replace_keys
from servekit.config import ServeConfig
from servekit.engine.interface import Service
from servekit.engine.make_engine import AnyEngine, make_engine
from servekit.errors import ConfigError, shutting_down
from servekit.models.model_file import ModelFile
from servekit.models.several_models import SeveralModels
from servekit.observability.metrics import Metrics, SeveralModelsMetrics
from servekit.protocol.child_process import ignore_signals
from servekit.server.http_protocol import LimitedHttpProtocol, limited_protocol
from servekit.server.keys_file import KeysReload, read_keys
from servekit.server.lifecycle import run_until_end, start_and_watch, watching
from servekit.server.listener import BACKLOG, bind, stop_connecting, url

if TYPE_CHECKING:
    from servekit.observability.tracing import Tracing

log = logging.getLogger("servekit")

DRAIN_TICK_S = 0.05  # how often a draining server checks whether all requests are answered
# To send the last errors, answers and frames when the drain is over. Clients that do not read are cut off earlier.
FINAL_WRITE_TIMEOUT_S = 5


def serve(config: ServeConfig, model_file: ModelFile | None = None) -> int:
    """Serve one model, or those of `model_file`, until a signal or a failure. Returns the exit code.

    Raises ServekitError.
    """
    return run_until_end(lambda: _serve(config, model_file), config)


async def _serve(config: ServeConfig, model_file: ModelFile | None) -> int:
    keys_of_file = read_keys(config)
    tracing = connect_tracing(config)
    listener = bind(config)
    engine: AnyEngine | SeveralModels  # each is the `Models` of the server
    if model_file is None:
        engine = make_engine(config)
        metrics: Metrics | SeveralModelsMetrics = engine.server_metrics
    else:
        engine = SeveralModels(config, model_file)
        metrics = engine.metrics
    app = create_app(engine, keys_of_file, None if tracing is None else tracing.record)
    server = Server(app, engine)
    replace_models = engine.replace_file if isinstance(engine, SeveralModels) else None
    reload = KeysReload(partial(replace_keys, app), config, replace_models)
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup sets this
    if reload.has_file or not is_ignored:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _on_hangup, server, reload)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    supervisor = asyncio.create_task(_supervise(engine, app, server, listener))
    with watching(metrics, lambda: engine.workers, reload):
        try:
            await http
        finally:
            ignore_signals()  # uvicorn has removed its handlers, and the server is ending already
            supervisor.cancel()
            await asyncio.wait([supervisor])
            await api.stop(app)
            await engine.stop(graceful=not server.force_exit)
            if tracing is not None:
                await tracing.close()
    if not supervisor.cancelled():
        supervisor.result()
    log.info("stopped")
    return 0


async def _supervise(
    engine: AnyEngine | SeveralModels, app: Starlette, server: Server, listener: socket.socket
) -> None:
    """Start the engine and listen, and end the server when the engine fails. Raises the engine's failure."""

    async def begin() -> str:
        await api.start(app)
        await server.listen()
        return url(listener)

    try:
        await start_and_watch(engine, begin)
    finally:
        server.end()


class Server(uvicorn.Server):
    """uvicorn's server, with a drain between the first signal and the end.

    It listens while the model loads, so that /ready can report that. After the first signal it drains: it admits no
    new requests, but still listens, so that clients get a proper refusal and load balancers see the drain at /ready.
    Each connection closes after its next answer, and idle ones after a moment. The drain ends when the admitted
    requests are answered, however many others are refused meanwhile; or when `shutdown_timeout` is over and every open
    request got an error. A second signal ends it at once. It does not wait for viewers of the live feed: they get a
    last frame.

    With --reuse-port the kernel distributes connections among servers and does not check readiness. So there it listens
    only from the moment the model is loaded until the signal. It then still admits requests on open connections:
    another server cannot answer these, and no client should notice that this server ends.
    """

    def __init__(self, app: Starlette, engine: Service, listens_late: bool = False) -> None:
        """`listens_late`: listen when the model is loaded, as with --reuse-port."""
        protocol = limited_protocol(engine.config, engine.http_counters.request_refused)
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            backlog=BACKLOG,
            lifespan="off",  # the engine is started and stopped by _serve, where its failure has an exit code
            log_config=None,
            log_level="warning",
            access_log=False,
        )
        super().__init__(config)
        self._engine = engine
        self._shared = protocol.shared
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self.is_stopping = False  # the first signal has come
        self._drain_task: asyncio.Task[None] | None = None
        self._shares_port = engine.config.reuse_port
        self._listens_late = listens_late or self._shares_port
        self._has_loaded = asyncio.Event()  # or loading has failed
        self._is_listening = asyncio.Event()

    async def listen(self) -> None:
        """Listen now that the model is loaded. Returns when the server accepts connections."""
        self._has_loaded.set()
        await self._is_listening.wait()

    def end(self, at_once: bool = False) -> None:
        """End without a drain; `at_once` also without waiting until the last errors are written."""
        self.should_exit = True
        self.force_exit = self.force_exit or at_once
        self._has_loaded.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; with --reuse-port only when the model is loaded, and not if a signal came before."""
        if self._listens_late:
            await self._has_loaded.wait()
        if self._listens_late and (self.should_exit or self.is_stopping):
            self.servers, self.started = [], True
        else:
            await super().startup(sockets)
            self._listeners = sockets or []
        self._is_listening.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.is_stopping:
            self.force_exit = self.should_exit = True
        else:
            self.is_stopping = True
            self._loop.call_soon_threadsafe(self.start_drain)  # the only loop method that a signal handler may call

    def start_drain(self) -> None:
        """Begin to drain, on the event loop's thread."""
        self.is_stopping = True
        self._has_loaded.set()
        self._drain_task = self._loop.create_task(self._drain(), name="drain")

    async def _drain(self) -> None:
        """Let the server exit when the drain is over."""
        timeout_s = self._engine.config.shutdown_timeout
        log.info(
            "draining: %d requests get %g s to finish (shutdown_timeout); a second signal ends them now",
            sum(connection.is_answering for connection in self._connections()),
            timeout_s,
        )
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    if self._shares_port:
                        # This comes first: clients that have to reconnect must reach another server.
                        await self._stop_listening()
                    self._engine.drain(admits_requests=self._shares_port)
                    self._shared.is_draining, self._shared.is_refusing = True, not self._shares_port
                    for connection in self._connections():
                        connection.drain()
                    while any(each.delays_exit for each in self._connections()):  # noqa: ASYNC110  # many things end that
                        await asyncio.sleep(DRAIN_TICK_S)
            await self._stop_listening()
        finally:
            self.should_exit = True

    async def _stop_listening(self) -> None:
        if self._listeners:
            await stop_connecting(self._listeners)
        for server in self.servers:
            server.close()  # this closes the socket; open connections stay
        self.servers, self._listeners = [], []

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Fail the requests that are left, and close all connections."""
        if self._drain_task is not None:
            self._drain_task.cancel()
        self._engine.fail_all(shutting_down())
        # The errors are written at once. This bounds the wait for clients that read slowly.
        self.config.timeout_graceful_shutdown = FINAL_WRITE_TIMEOUT_S
        await super().shutdown(sockets)

    def _connections(self) -> list[LimitedHttpProtocol]:
        return [cast(LimitedHttpProtocol, connection) for connection in self.server_state.connections]


def _on_hangup(server: Server, reload: KeysReload) -> None:
    """Handle SIGHUP: read the files of keys and models again. Without any, the terminal was closed: drain."""
    if reload.has_file:
        reload.request()
    elif not server.is_stopping:  # the shell and the kernel may each send one; that is no second signal
        server.handle_exit(signal.SIGHUP, None)


def connect_tracing(config: ServeConfig) -> Tracing | None:
    """Return the trace exporter for --otlp-endpoint, if set. Raises ConfigError if OpenTelemetry is missing."""
    endpoint = config.otlp_endpoint
    if endpoint is None:
        return None
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise ConfigError(f"otlp_endpoint = {endpoint!r} is not an HTTP address; use one like http://host:4318")
    try:
        from servekit.observability.tracing import Tracing
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint = {endpoint!r} needs OpenTelemetry ({error}): in the checkout of servekit run "
            "pip install '.[otel]', or leave --otlp-endpoint out"
        ) from None
    path = "" if address.path.strip("/") else "/v1/traces"  # as the SDK's own environment variable does
    return Tracing(endpoint.rstrip("/") + path, config.model_name, __version__)
