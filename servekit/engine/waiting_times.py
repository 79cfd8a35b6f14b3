"""Limit how long requests wait, by the waiting time that is predicted for each replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from math import ceil

from servekit.config import ServeConfig
from servekit.engine.engine_core import EngineCore
from servekit.engine.queue_limits import MAX_RETRY_AFTER_S
from servekit.errors import QueueFull
from servekit.scheduler.policy import SHORT_SHARE

log = logging.getLogger("servekit")

REFRESH_INTERVAL_S = 1.0
# The predictions of a long line are corrected by playing a copy of the manager forward. Each slice holds the event loop
# for about a millisecond, and all of them take less than a twentieth of its time.
MAX_SLICE_S = 1e-3
PAUSE_S = 0.025


class WaitingTimes:
    """Refuses requests that would wait too long. Everything runs on the event loop's thread."""

    def __init__(
        self, config: ServeConfig, read_cores: Callable[[], Sequence[EngineCore]], clock: Callable[[], float]
    ) -> None:
        """`read_cores` gives the cores whose replicas take sequences."""
        # A request of a high priority starts before all others, however long the line is.
        self._limit_s = config.max_predicted_wait if config.scheduling_policy != "priority" else 0.0
        self._policy = config.scheduling_policy
        self._read_cores = read_cores
        self._clock = clock
        self._logged: set[type[Exception]] = set()  # kinds of errors that are in the log

    def check(self, tenant: str, num_preparing: int, num_own_preparing: int, prompt_tokens: int | None = None) -> None:
        """Raise QueueFull if a request would wait for longer than the limit.

        `num_preparing` counts the sequences that come before it and are not in a queue yet, `num_own_preparing` those
        of its tenant. `prompt_tokens` is the length of its longest prompt, once it is known. Under `shortest`, it
        decides, and before it is known nothing is refused. Under the other policies a request is checked before
        that only, so that a refusal costs next to nothing.

        A request that finds nothing waiting is never refused. Nor is one under `priority`, or where drafts may be
        verified: how many tokens a step yields is not in the prediction.
        """
        if (prompt_tokens is not None) != (self._policy == "shortest"):
            return
        cores = self._read_cores()
        if not self._limit_s or not cores or any(core.manager.config.max_drafts for core in cores):
            return
        wait_s = min(
            self._wait_s(core, tenant, num_preparing // len(cores), num_own_preparing, prompt_tokens) for core in cores
        )
        if wait_s > self._limit_s:
            retry_after_s = min(MAX_RETRY_AFTER_S, max(1, ceil(wait_s - self._limit_s)))
            raise QueueFull(
                f"the request would wait about {wait_s:.0f} s before it starts; the limit is {self._limit_s:g} s "
                "(max_predicted_wait). Please try again later.",
                retry_after_s=retry_after_s,
            )

    def _wait_s(
        self, core: EngineCore, tenant: str, num_preparing: int, num_own_preparing: int, prompt_tokens: int | None
    ) -> float:
        manager = core.manager
        num_ahead, ahead = manager.num_waiting + num_preparing, None
        if self._policy == "fair":
            # Tenants take turns: before each sequence of this one, at most one of each other one starts.
            num_own = manager.queued.of(tenant).num_sequences + num_own_preparing
            num_tenants = len(manager.queued.by_tenant().keys() | {tenant})
            num_ahead = min(num_ahead, (num_own + 1) * num_tenants - 1)
        elif prompt_tokens is not None:
            # Longer prompts wait, but for the share of the oldest ones.
            ahead = manager.queued.not_longer(prompt_tokens)
            num_ahead = min(num_ahead, ceil(ahead.num_sequences / SHORT_SHARE))
        return core.latency.waiting_time.seconds(manager, num_ahead, ahead) if num_ahead else 0.0

    async def keep_current(self) -> None:
        """Correct the predictions, from time to time, until this is cancelled."""
        while self._limit_s:
            await asyncio.sleep(REFRESH_INTERVAL_S)
            for core in self._read_cores():
                try:
                    await self._refresh(core)
                except Exception as error:  # serving must not depend on a prediction
                    self._log_once(error)

    def _log_once(self, error: Exception) -> None:
        """Log an error, unless one of its kind was: it may come back each second."""
        if type(error) not in self._logged:
            self._logged.add(type(error))
            log.error(
                "the predicted waiting time could not be corrected; the uncorrected formula is used. Further errors of "
                "this kind are not logged",
                exc_info=error,
            )

    async def _refresh(self, core: EngineCore) -> None:
        began_s = self._clock()
        for _ in core.latency.refresh_waiting_time(core.manager, began_s):
            if self._clock() - began_s >= MAX_SLICE_S:
                await asyncio.sleep(PAUSE_S)
                began_s = self._clock()
