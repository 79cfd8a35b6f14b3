"""Serve a model with vLLM, in processes that this server starts and ends.

Requests go to it as to a remote server: through a socket file, by OpenAI's API with vLLM's parameters. This interface
stays the same in all releases of vLLM, and vLLM may need other versions of Python, torch or transformers than this
server. If vLLM ends by itself, this engine ends, and SeveralModels starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.config import ServeConfig
from servekit.errors import WorkerLost, WorkerNotReady
from servekit.observability.metrics import ModelMetrics
from servekit.remote.failure import Failure
from servekit.remote.remote_engine import RemoteEngine
from servekit.remote.settings import VllmSettings
from servekit.remote.vllm_process import VllmProcess

log = logging.getLogger("servekit")

LOOK_S = 0.25  # between two checks whether it listens


def visible_devices(devices: Sequence[str], own: str | None) -> str | None:
    """Return vLLM's CUDA_VISIBLE_DEVICES; None leaves it as it is.

    `own` is this server's value: this server's device numbers are positions in that list.
    """
    numbers = [int(device.removeprefix("cuda:")) for device in devices if device.startswith("cuda:")]
    visible = own.split(",") if own else []
    return ",".join(visible[number] if number < len(visible) else str(number) for number in numbers) or None


class VllmEngine(RemoteEngine):
    """Serves one model with vLLM. Call `start`, then `submit` any number of requests, then `stop`."""

    def __init__(
        self,
        config: ServeConfig,
        settings: VllmSettings,
        devices: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        metrics: ModelMetrics | None = None,
    ) -> None:
        """`devices` are those that vLLM may use, such as cuda:0."""
        self._process = VllmProcess()
        try:
            super().__init__(config, settings, clock, metrics, socket=self._process.socket)
        except BaseException:
            self._process.remove_folder()
            raise
        self._command = [*settings.command, "serve", config.model, "--uds", self._process.socket, *settings.arguments]
        self._environment = settings.environment
        self._visible_devices = visible_devices(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._is_stopping = False

    @property
    def stage(self) -> str:
        return super().stage if self._has_started else "vLLM loads the model"

    async def start(self) -> None:
        """Start vLLM, and wait until it has loaded the model. Raises WorkerError."""
        await self.server.start()
        await self._process.start(self._command, self._environment, self._visible_devices)
        try:
            async with pause_tolerant_timeout(self.config.load_timeout):
                await self._wait_until_it_listens()
        except TimeoutError:
            raise WorkerNotReady(
                f"vLLM did not load the model {self.config.model!r} within {self.config.load_timeout:g} s "
                "(load_timeout); its log is above"
            ) from None
        await self._begin()
        self._start_task(self._watch(), "watch vLLM")

    async def _wait_until_it_listens(self) -> None:
        while not self._process.has_ended:
            with contextlib.suppress(Failure):
                async with self.server.open("/models", None):
                    return
            await asyncio.sleep(LOOK_S)
        raise WorkerNotReady(
            f"vLLM {await self._process.wait()} before it had loaded the model {self.config.model!r}; its log is above"
        )

    async def _watch(self) -> None:
        """End this engine when vLLM ends."""
        how = await self._process.wait()
        if not self._is_stopping:
            self.failure = WorkerLost(f"vLLM, which serves the model {self.config.model_name!r}, {how}")
            log.error("%s; its log is above", self.failure.message)
            self.fail_all(self.failure)
            self._ended.set()

    async def stop(self, graceful: bool = True) -> None:
        """Fail the requests that still run, and end vLLM."""
        self._is_stopping = True
        await super().stop(graceful)
        await self._process.end(graceful)
