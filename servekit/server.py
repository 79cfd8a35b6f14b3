"""The server process: bind, load, listen, and end in good order."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from types import FrameType

import uvicorn
import uvloop
from sse_starlette.sse import AppStatus

from servekit import __version__
from servekit.api import create_app
from servekit.config import ServeConfig, doubts, non_default
from servekit.engine import LLMEngine
from servekit.errors import ConfigError, WorkerNotReady
from servekit.http_protocol import limited_protocol
from servekit.logs import configure_logging

log = logging.getLogger("servekit")


def serve(config: ServeConfig) -> int:
    """Serve until a signal or a failure; returns the exit code. Raises ServekitError."""
    configure_logging(config.log_level)
    # sse-starlette would cut every stream at the first signal; uvicorn lets them finish, up to shutdown_timeout.
    AppStatus.disable_automatic_graceful_drain()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config))


async def _serve(config: ServeConfig) -> int:
    listener = _bind(config)
    engine = LLMEngine(config)
    server = Server(
        uvicorn.Config(
            create_app(engine),
            http=limited_protocol(config, engine.metrics.refused),
            ws="none",
            lifespan="off",  # the engine's life is managed here, where its failure has an exit code
            log_config=None,
            log_level="warning",
            access_log=False,
        ),
        engine,
    )
    # The socket answers while the model loads, so that /ready can say so.
    http = asyncio.create_task(server.serve(sockets=[listener]))
    supervisor = asyncio.create_task(_supervise(engine, server, listener))
    try:
        await http
    finally:
        supervisor.cancel()
        await asyncio.wait([supervisor])
        await engine.stop()
    if not supervisor.cancelled():
        supervisor.result()
    log.info("stopped")
    return 0


async def _supervise(engine: LLMEngine, server: Server, listener: socket.socket) -> None:
    """Start the engine and watch it; when it fails, so does the server. Raises what it failed of."""
    try:
        log.info("servekit %s loads %s", __version__, engine.config.model)
        await engine.start()
        for line in describe(engine, _url(listener)):
            log.info("%s", line)
        await engine.wait_until_failed()
        assert engine.failure is not None
        raise engine.failure
    finally:
        server.should_exit = True


class Server(uvicorn.Server):
    """uvicorn, except that a signal is an order to finish and not a reason to die of it afterwards.

    Requests that run get `shutdown_timeout` to finish; after that each is told so, and its stream ends properly.
    """

    def __init__(self, config: uvicorn.Config, engine: LLMEngine) -> None:
        super().__init__(config)
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        error = WorkerNotReady("the server is shutting down; please send the request again", retry_after_s=5)
        timeout_s = self._engine.config.shutdown_timeout
        deadline = asyncio.get_running_loop().call_later(timeout_s, self._engine.fail_all, error)
        # Answers are written within moments of the deadline, but a client may not read: for it uvicorn waits no longer.
        self.config.timeout_graceful_shutdown = int(timeout_s) + 2
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            log.info(
                "shutting down: running requests get %g s to finish; a second signal ends them now",
                self._engine.config.shutdown_timeout,
            )
        self.force_exit = self.should_exit
        self.should_exit = True


def _bind(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}; choose another --port or --host"
        ) from None


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def describe(engine: LLMEngine, url: str) -> Iterator[str]:
    """What a person wants to see when the server is up."""
    config, worker, manager = engine.config, engine.worker, engine.manager
    assert worker is not None
    changed = non_default(config)
    if changed:
        yield "settings that differ from their defaults:"
    for name, value in changed.items():
        yield f"  {name:<24} {value}"
    for doubt in doubts(config):
        yield f"note: {doubt}"
    num_tokens = worker.num_blocks * config.block_size
    cache_mib = num_tokens * worker.kv_bytes_per_token / 2**20
    yield f"model: {worker.model.architecture}, {worker.dtype} on {worker.device}"
    yield "KV cache:"
    yield f"  {'blocks':<24} {worker.num_blocks:,} of {config.block_size} tokens"
    yield f"  {'tokens':<24} {num_tokens:,} of {worker.kv_bytes_per_token:,} bytes, {cache_mib:,.1f} MiB in all"
    longest = manager.max_total_tokens
    yield f"  {'longest sequences':<24} {num_tokens / longest:.1f} of {longest:,} tokens"
    if longest < worker.model.max_model_len:
        yield f"  that is less than the model's context of {worker.model.max_model_len:,}; more blocks would hold it"
    yield f"ready at {url}; try:"
    yield f"""  curl {url}/generate -d '{{"prompt": "What color is the sky?"}}'"""
