"""Implement what the engines of all remote models share: their state, their limits, and their descriptions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from servekit import __version__
from servekit.config import ServeConfig
from servekit.engine.caller import Caller
from servekit.engine.live_view import LiveView
from servekit.errors import InvalidRequest, ServekitError, shutting_down
from servekit.observability.live_frames import LiveState, LiveWorker
from servekit.observability.metrics import HttpMetrics, ModelMetrics
from servekit.remote.sender import Sender
from servekit.remote.server_client import ServerClient
from servekit.remote.settings import ServerSettings


class RemoteModel:
    """A model that another server runs. Subclasses send it requests."""

    kind: str
    failure: ServekitError | None = None  # why it has ended; None while it runs
    known_length: int | None = None  # tokens of the longest sequence, if the server has reported it
    worker_pids: list[int | None] = []  # noqa: RUF012  # there are none
    is_healthy = True

    def __init__(
        self,
        config: ServeConfig,
        settings: ServerSettings,
        clock: Callable[[], float] = time.monotonic,
        metrics: ModelMetrics | None = None,
        *,
        socket: str | None = None,
    ) -> None:
        """With `socket`, the server is asked over that socket file.

        Raises ConfigError if the API key or the HTTP package is missing.
        """
        self.config = config
        self.metrics = metrics or ModelMetrics(config)
        self.sender = Sender(config, settings, clock, self.metrics)
        self.server = ServerClient(config.model_name, settings, socket)
        self._clock = clock
        self._has_started = False
        self._is_draining = False
        self._rejects_requests = False
        self._ended = asyncio.Event()

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One of loading, ready, recovering, draining, failed."""
        if self.failure is not None:
            return "failed"
        if self._is_draining:
            return "draining"
        if not self._has_started:
            return "loading"
        return "recovering" if self.sender.refuses_requests else "ready"

    @property
    def stage(self) -> str:
        """What it is doing, as a text for people."""
        if self.sender.refuses_requests:
            return "sends no requests to its server for now, because that server failed too often in a row"
        return "serving"

    @property
    def has_free_slots(self) -> bool:
        """True: requests that are not urgent wait for a connection to this model only, not for other models."""
        return True

    @property
    def has_spare_connections(self) -> bool:
        return self.sender.has_spare_connections

    @property
    def http_counters(self) -> HttpMetrics:
        return self.metrics.http

    def now(self) -> float:
        return self._clock()

    async def probe_readiness(self) -> bool:
        """Whether requests are sent to the server. This call sends no request, because it could cost money."""
        return self.state == "ready"

    async def render_metrics(self) -> bytes:
        raise NotImplementedError("a remote model is one of several")

    async def live_view(self) -> LiveView:
        """One frame of the live view, without sequences and blocks."""
        name, workers = self.config.model_name, [LiveWorker(self.stage)]
        return LiveView(LiveState(self.now(), self.state, self.stage, name, __version__, workers, kind=self.kind))

    async def describe(self) -> dict[str, Any]:
        """What /info says of the server."""
        return {"replicas": [{"replica": 0, "state": self.stage, "breaker": self.sender.breaker.state}]}

    # -- start and stop -----------------------------------------------------------------------------------------------

    def drain(self, admits_requests: bool = False) -> None:
        """Begin to drain: admitted requests continue, and new ones are rejected unless `admits_requests` is set."""
        self._is_draining = True
        self._rejects_requests = not admits_requests
        self.metrics.engine.is_draining = True

    async def wait_until_failed(self) -> None:
        """Return when it has ended. It does not end because its server fails."""
        await self._ended.wait()

    # -- requests -----------------------------------------------------------------------------------------------------

    def check_admission(self, caller: Caller, num_answers: int, num_places: int) -> None:
        """Raise an error for a request that cannot be admitted: InvalidRequest, QueueFull or RemoteUnavailable."""
        if self._rejects_requests:
            raise shutting_down()
        if self.failure is not None:
            raise self.failure
        most = self.config.max_client_batch_size if caller.max_answers is None else caller.max_answers
        if num_answers > most:
            raise InvalidRequest(
                f"the request asks for {num_answers} answers; the limit is {most} (max_client_batch_size)"
            )
        self.sender.check_admission(caller.tenant, num_places)
