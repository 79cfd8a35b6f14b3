"""Ask the cluster for more workers while requests would wait for long, and for fewer while there is little to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from servekit.config import ServeConfig
from servekit.engine.engine_core import EngineCore
from servekit.joining.worker_pool import WorkerPool
from servekit.routing.scaling import ReplicaScaler

log = logging.getLogger("servekit")

INTERVAL_S = 1.0


class WorkerScaling:
    """Scales the workers that a cluster places. Everything runs on the event loop's thread."""

    def __init__(
        self,
        config: ServeConfig,
        pool: WorkerPool,
        read_cores: Callable[[], Sequence[EngineCore]],
        clock: Callable[[], float],
    ) -> None:
        """`read_cores` gives the cores whose replicas take sequences."""
        self._pool = pool
        self._read_cores = read_cores
        self._clock = clock
        min_workers = config.data_parallel_size or 1
        self._scaler = ReplicaScaler(
            min_workers,
            config.max_data_parallel_size or min_workers,
            config.scale_target_wait,
            config.scale_up_delay,
            config.scale_down_delay,
        )

    async def run(self) -> None:
        """Scale until this is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._decide()

    def _decide(self) -> None:
        cores, num_placed = self._read_cores(), self._pool.num_placed
        if not cores:
            return
        managers = [core.manager for core in cores]
        waits_s = [core.latency.waiting_time.seconds(core.manager, core.manager.num_waiting) for core in cores]
        load = sum((each.num_running + each.num_waiting) / each.config.max_num_seqs for each in managers)
        wait_s = min(waits_s)  # a new request goes there
        wanted = self._scaler.decide(len(cores), wait_s, load, self._clock())
        is_coming = len(cores) < num_placed  # what they bring is seen first, before more are asked for
        if wanted in (len(cores), num_placed) or (is_coming and wanted > len(cores)):
            return
        log.info(
            "the predicted wait is %.1f s, with %.1f sequences for each slot: %d workers in place of %d",
            *(wait_s, load / len(cores), wanted, num_placed),
        )
        self._pool.num_placed = wanted
