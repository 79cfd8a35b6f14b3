"""Check that the server generates tokens: one was sampled recently, or one is sampled for this check.

A running process, an open port and a worker that reports itself ready are weaker evidence: each has been seen on
servers that could not serve any request. The check samples at most one token at a time, and only if no request's steps
prove readiness anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

from servekit.errors import ServekitError
from servekit.observability.observer import Observer, StepSummary
from servekit.protocol.messages import StepResult

VALID_FOR_S = 30.0
TIMEOUT_S = 5.0


class ReadinessProbe:
    """Learns from finished steps of any replica that the engine works; otherwise it calls `generate_token`."""

    def __init__(self, generate_token: Callable[[], Coroutine[None, None, None]], clock: Callable[[], float]) -> None:
        self._generate_token = generate_token
        self._clock = clock
        self._proven_s: float | None = None
        self._task: asyncio.Task[None] | None = None

    def of_replica(self) -> Observer:
        """What listens to the events of one replica."""
        return _ReplicaProof(self)

    def prove(self, now_s: float) -> None:
        """Note that a replica works."""
        self._proven_s = now_s

    @property
    def _is_proven(self) -> bool:
        return self._proven_s is not None and self._clock() - self._proven_s < VALID_FOR_S

    async def check(self) -> bool:
        """Whether the engine works. Takes at most TIMEOUT_S. Concurrent checks share one token."""
        if not self._is_proven:
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run(), name="servekit readiness probe")
            await asyncio.wait([self._task])
        return self._is_proven

    async def _run(self) -> None:
        with contextlib.suppress(ServekitError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await self._generate_token()

    def stop(self) -> None:
        """Cancel a check that is under way."""
        if self._task is not None:
            self._task.cancel()


class _ReplicaProof(Observer):
    """Tells the probe of each step of one replica."""

    def __init__(self, probe: ReadinessProbe) -> None:
        self._probe = probe
        self._epoch: int | None = None  # epoch of the newest step; results of earlier epochs do not count

    def worker_ready(self, recovery_time_s: float | None, now_s: float) -> None:
        self._probe.prove(now_s)  # a worker that loads a model compares its logits with transformers'

    def step_sent(self, step: StepSummary, is_alone: bool, now_s: float) -> None:
        self._epoch = step.epoch

    def step_done(self, result: StepResult, num_tokens: int, loop_time_s: float, now_s: float) -> None:
        if result.epoch == self._epoch:
            self._probe.prove(now_s)
