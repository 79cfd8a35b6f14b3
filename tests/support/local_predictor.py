"""A predictor's engine whose worker is in this process: it computes for real, and tests decide when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from servekit.config import ServeConfig
from servekit.engine.predictor_engine import PredictorEngine
from servekit.errors import WorkerLost
from servekit.protocol.prediction import BatchResult, LoadPredictor, PredictBatch, PredictorKind, PredictorReady
from workers.prediction.predictor import Predictor, load_predictor


class LocalExecutor:
    """Computes batches when it is asked for their results. `hold` keeps them back, `lose` loses the worker."""

    def __init__(self) -> None:
        self.ready: PredictorReady | None = None
        self.is_ready = True
        self.stage = "serving"
        self.pid = None
        self.cause = "ended"
        self.sent: list[PredictBatch] = []
        self.sizes: list[int] = []  # of the batches that were sent, by which their time is limited
        self.hold = False
        self.start_failure: WorkerLost | None = None  # of the next replacement
        self._predictor: Predictor | None = None
        self._inbox: asyncio.Queue[PredictBatch | WorkerLost] = asyncio.Queue()

    async def start(self, load: LoadPredictor) -> PredictorReady:
        self._predictor, self.ready = load_predictor(load, lambda _: None)
        return self.ready

    def send(self, batch: PredictBatch, num_tokens: int) -> None:
        self.sent.append(batch)
        self.sizes.append(num_tokens)
        if not self.hold:
            self._inbox.put_nowait(batch)

    def release(self) -> None:
        """Compute what was sent and held back."""
        self.hold = False
        for batch in self.sent:
            self._inbox.put_nowait(batch)

    async def receive(self) -> BatchResult:
        message = await self._inbox.get()
        if isinstance(message, WorkerLost):
            raise message
        assert self._predictor is not None
        return self._predictor.predict(message)

    def lose(self) -> None:
        """Lose the worker, and what it was sent."""
        self.is_ready = False
        self.sent.clear()
        while not self._inbox.empty():
            self._inbox.get_nowait()
        self._inbox.put_nowait(WorkerLost("the model worker was lost by a test"))

    async def replace(self, on_failed_start: Callable[[str], None]) -> None:
        if self.start_failure is not None:
            on_failed_start(self.start_failure.message)
            raise self.start_failure
        self.is_ready = True

    async def stop(self, graceful: bool = True) -> None:
        self.is_ready = False


@asynccontextmanager
async def local_engine(
    folder: Path, kind: PredictorKind, **settings: Any
) -> AsyncIterator[tuple[PredictorEngine, LocalExecutor]]:
    """A started engine for the checkpoint in a folder."""
    engine, executor = PredictorEngine(ServeConfig(model=str(folder), **settings), kind), LocalExecutor()
    engine._executor = executor  # type: ignore[assignment]
    await engine.start()
    try:
        yield engine, executor
    finally:
        await engine.stop()
