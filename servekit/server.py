"""The server process: bind, load, listen, and end in good order."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvicorn
import uvloop
from starlette.applications import Starlette

from servekit import __version__
from servekit.api import create_app, renew_keys
from servekit.api.access import WATCHING, is_loopback
from servekit.api.live import Feed
from servekit.caller import ANYBODY
from servekit.config import ServeConfig, doubts, non_default
from servekit.engine import LLMEngine
from servekit.errors import ConfigError, shutting_down
from servekit.http_protocol import LimitedHttpProtocol, limited_protocol
from servekit.keys import Key, parse_keys_file
from servekit.logs import configure_logging, fields, is_for_programs
from servekit.process_metrics import watch_event_loop, watch_processes
from servekit.processes import ignore_signals

if TYPE_CHECKING:
    from servekit.tracing import Tracing

log = logging.getLogger("servekit")

BACKLOG = 4096  # connections that the kernel has accepted for us; as many as Linux allows unless told otherwise
LAST_WORDS_TIMEOUT_S = 2  # to write what is left to be said when time is up
LAST_FRAME_TIMEOUT_S = 1  # for whoever watches to take it, which keeps nobody else


def serve(config: ServeConfig) -> int:
    """Serve until a signal or a failure; returns the exit code. Raises ServekitError."""
    configure_logging(config.log_level, config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config))


async def _serve(config: ServeConfig) -> int:
    keys_of_file = read_keys(config)
    tracing = _connect_tracing(config)
    listener = _bind(config)
    engine = LLMEngine(config)
    app = create_app(engine, keys_of_file, None if tracing is None else tracing.record)
    server = Server(
        uvicorn.Config(
            app,
            http=limited_protocol(config, engine.metrics.refused),
            ws="none",
            backlog=BACKLOG,
            lifespan="off",  # the engine's life is managed here, where its failure has an exit code
            log_config=None,
            log_level="warning",
            access_log=False,
        ),
        engine,
    )
    if config.api_keys_file is not None or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _on_hangup, app, server)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    supervisor = asyncio.create_task(_supervise(engine, server, listener))
    watch_processes(engine.metrics.registry, lambda: engine.worker_pid)
    watching = watch_event_loop(engine.metrics.event_loop_lag, engine.metrics.event_loop_tasks)
    lag = asyncio.create_task(watching, name="event loop lag")
    try:
        await http
    finally:
        ignore_signals()  # uvicorn's handlers are gone, and it is ending already
        lag.cancel()
        supervisor.cancel()
        await asyncio.wait([supervisor])
        await engine.stop(kindly=not server.force_exit)
        if tracing is not None:
            await tracing.close()
    if not supervisor.cancelled():
        supervisor.result()
    log.info("stopped")
    return 0


async def _supervise(engine: LLMEngine, server: Server, listener: socket.socket) -> None:
    """Start the engine and watch it; when it fails, so does the server. Raises what it failed of."""
    try:
        log.info("servekit %s loads %s", __version__, engine.config.model)
        await engine.start()
        await server.listen()
        _announce(engine, _url(listener))
        await engine.wait_until_failed()
        assert engine.failure is not None
        raise engine.failure
    finally:
        server.end()


class Server(uvicorn.Server):
    """uvicorn, except that a signal is an order to finish and not a reason to die of it afterwards.

    It listens while the model loads, so that /ready can say so. After the first signal it drains: it still listens, so
    that whoever comes is told so and balancers see it at /ready, but lets nobody in. When all answers are written, or
    `shutdown_timeout` is over and everybody was told, it ends. A second signal ends it at once. Nobody waits for those
    who watch: they are told that it drains, and who does not read that is cut off.

    Where servers share a port, the kernel is the balancer, and does not ask: whoever listens gets his share. There it
    listens from when its model is there until the signal, and refuses nobody before that has had its effect.
    """

    def __init__(self, config: uvicorn.Config, engine: LLMEngine) -> None:
        super().__init__(config)
        self._engine = engine
        self._feed: Feed = config.app.state.feed  # type: ignore[union-attr]
        self._loop = asyncio.get_running_loop()
        self._drains_until_s: float | None = None
        self._shares_port = engine.config.reuse_port
        self._may_go_on = asyncio.Event()  # the model is there, or never will be
        self._listens = asyncio.Event()

    async def listen(self) -> None:
        """The model is there; returns when whoever comes is heard."""
        self._may_go_on.set()
        await self._listens.wait()

    def end(self) -> None:
        self.should_exit = True
        self._may_go_on.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, if there is anything to listen for."""
        if self._shares_port:
            await self._may_go_on.wait()
        if self._shares_port and (self.should_exit or self._drains_until_s is not None):
            self.servers, self.started = [], True
        else:
            await super().startup(sockets)
        self._listens.set()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second, before and while it drains."""
        if self._drains_until_s is not None:
            if self._shares_port and self.servers:
                for listening in self.servers:
                    listening.close()  # those who are connected stay
                self.servers = []  # and who came last has until the next time to say what he wants
            elif self._engine.state != "draining":
                self._engine.drain()
            else:
                is_late = time.monotonic() >= self._drains_until_s
                self.should_exit = self.should_exit or is_late or not self._requests()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell everybody who is left, and close."""
        self._engine.fail_all(shutting_down())
        self._loop.call_later(LAST_FRAME_TIMEOUT_S, self._cut_viewers_off)
        # Answers are written within moments, but a client may not read: for it uvicorn waits no longer.
        self.config.timeout_graceful_shutdown = LAST_WORDS_TIMEOUT_S
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drains_until_s is None:
            timeout_s = self._engine.config.shutdown_timeout
            log.info(
                "draining: %d requests get %g s to finish; a second signal ends them now",
                len(self._requests()),
                timeout_s,
            )
            if not self._shares_port:
                self._engine.drain()
            self._drains_until_s = time.monotonic() + timeout_s
            self._loop.call_soon_threadsafe(self._may_go_on.set)  # a handler of signals may do no more
        else:
            self.force_exit = self.should_exit = True

    def _requests(self) -> set[asyncio.Task[None]]:
        """The tasks of those who are answered, without those who watch."""
        return self.server_state.tasks - self._feed.tasks

    def _cut_viewers_off(self) -> None:
        """Those who are left. A stream that waits for its reader can be ended by its connection's end only: were its
        task cancelled, the connection would still keep what was not read, and with it the server."""
        for connection in list(self.server_state.connections):
            assert isinstance(connection, LimitedHttpProtocol)
            cycle = connection._answering
            if cycle is not None and (cycle.scope["method"], cycle.scope["path"]) == WATCHING:
                connection.transport.abort()


def _on_hangup(app: Starlette, server: Server) -> None:
    """SIGHUP: read the keys file again. If there is none, a terminal is gone, and the server follows in good order."""
    engine: LLMEngine = app.state.engine
    if engine.config.api_keys_file is None:
        if engine.state != "draining":  # shell and kernel may both tell of it, which is no second signal
            server.handle_exit(signal.SIGHUP, None)
        return
    try:
        keys = read_keys(engine.config)
    except ConfigError as error:
        log.error("the keys stay as they are: %s", error.message)
        return
    renew_keys(app, keys)
    log.info("%s was read again and has %d keys now", engine.config.api_keys_file, len(keys))


def read_keys(config: ServeConfig) -> list[Key]:
    """Those in --api-keys-file. Raises ConfigError."""
    path = config.api_keys_file
    if path is None:
        if config.api_key is None and not is_loopback(config.host):
            log.warning(
                "whoever reaches %s may use this server: there is no --api-key and no --api-keys-file", config.host
            )
        return []
    try:
        keys = parse_keys_file(Path(path).read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"api_keys_file = {path!r}: {error.strerror}") from None
    if config.scheduling_policy != "priority" and any(key.min_priority != ANYBODY.min_priority for key in keys):
        log.warning("%s: min_priority has no effect, for scheduling_policy is %r", path, config.scheduling_policy)
    return keys


def _connect_tracing(config: ServeConfig) -> Tracing | None:
    """What sends traces to --otlp-endpoint, if that is given. Raises ConfigError where OpenTelemetry is missing."""
    if (endpoint := config.otlp_endpoint) is None:
        return None
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise ConfigError(f"otlp_endpoint = {endpoint!r} is no address; it looks like http://host:4318")
    try:
        from servekit.tracing import Tracing
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint = {endpoint!r} needs OpenTelemetry ({error}): pip install 'servekit[otel]', "
            "or leave --otlp-endpoint out"
        ) from None
    path = "" if address.path.strip("/") else "/v1/traces"  # as the SDK's own variable has it
    return Tracing(endpoint.rstrip("/") + path, config.model_name, __version__)


def _bind(config: ServeConfig) -> socket.socket:
    """The address is ours; uvicorn listens on it. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        if not config.reuse_port:
            return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
        listener = socket.socket(family)  # create_server would listen
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind((config.host, config.port))
        return listener
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}; choose another --port or --host"
        ) from None


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _announce(engine: LLMEngine, url: str) -> None:
    """Say that the server is up, and as what: to programs in one object, to people in lines."""
    config, worker = engine.config, engine.worker
    assert worker is not None
    for doubt in doubts(config):
        log.warning("%s", doubt)
    if not is_for_programs():
        for line in describe(engine, url):
            log.info("%s", line)
        return
    told = fields(
        settings=non_default(config),
        model=worker.model.architecture,
        dtype=worker.dtype,
        device=worker.device,
        num_kv_blocks=worker.num_blocks,
        block_size=config.block_size,
        kv_bytes_per_token=worker.kv_bytes_per_token,
        max_total_tokens=engine.manager.config.max_total_tokens,
    )
    log.info("ready at %s", url, extra=told)


def describe(engine: LLMEngine, url: str) -> Iterator[str]:
    """What a person wants to see when the server is up."""
    config, worker, manager = engine.config, engine.worker, engine.manager
    assert worker is not None
    changed = non_default(config)
    if changed:
        yield "settings that differ from their defaults:"
    for name, value in changed.items():
        yield f"  {name:<24} {value}"
    num_tokens = worker.num_blocks * config.block_size
    cache_mib = num_tokens * worker.kv_bytes_per_token / 2**20
    yield f"model: {worker.model.architecture}, {worker.dtype} on {worker.device}"
    yield "KV cache:"
    yield f"  {'blocks':<24} {worker.num_blocks:,} of {config.block_size} tokens"
    yield f"  {'tokens':<24} {num_tokens:,} of {worker.kv_bytes_per_token:,} bytes, {cache_mib:,.1f} MiB in all"
    longest = manager.config.max_total_tokens
    yield f"  {'longest sequences':<24} {num_tokens / longest:.1f} of {longest:,} tokens"
    if longest < worker.model.max_model_len:
        yield f"  that is less than the model's context of {worker.model.max_model_len:,}; more blocks would hold it"
    yield f"ready at {url}; try:"
    key = "" if config.api_key is None and config.api_keys_file is None else " -H 'Authorization: Bearer KEY'"
    yield f"""  curl {url}/generate{key} -d '{{"prompt": "What color is the sky?"}}'"""
