"""Ask the cluster for more workers while requests would wait for long, and for fewer while there is little to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from servekit.config import ServeConfig
from servekit.engine.engine_core import EngineCore
from servekit.joining.worker_pool import WorkerPool
from servekit.routing.scaling import Demand, ReplicaScaler, replica_load
from servekit.scheduler.workload_manager import WorkloadManager

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
        self._logged: set[type[Exception]] = set()  # kinds of errors that are in the log
        min_workers = config.data_parallel_size or 1
        self._give_up_after_s = config.scale_down_delay
        self._missing_since_s: float | None = None  # since when workers are missing that are not needed any more
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
            try:
                self._decide()
            except Exception as error:  # serving must not depend on it, and the next decision may succeed
                self._log_once(error)

    def _log_once(self, error: Exception) -> None:
        """Log an error, unless one of its kind was: it may come back each second."""
        if type(error) not in self._logged:
            self._logged.add(type(error))
            log.error(
                "the number of workers could not be decided; it stays as it is until a decision succeeds. Further "
                "errors of this kind are not logged",
                exc_info=error,
            )

    def _decide(self) -> None:
        cores, num_placed, now_s = self._read_cores(), self._pool.num_placed, self._clock()
        if not cores:
            return
        demand = demand_of(cores)
        wanted = self._scaler.decide(len(cores), demand, now_s)
        is_coming = len(cores) < num_placed  # what they bring is seen first, before more are asked for
        if not is_coming or self._scaler.wants_more:
            self._missing_since_s = None
        elif self._missing_since_s is None:
            self._missing_since_s = now_s
        are_given_up = self._missing_since_s is not None and now_s - self._missing_since_s >= self._give_up_after_s
        if wanted == num_placed or (wanted == len(cores) and not are_given_up) or (is_coming and wanted > len(cores)):
            return
        log.info(
            "the predicted wait is %.1f s, and the load of each worker %.0f %%: %d workers in place of %d",
            *(demand.wait_s, 100.0 * demand.load / len(cores), wanted, num_placed),
        )
        self._pool.num_placed = wanted
        self._missing_since_s = None


def demand_of(cores: Sequence[EngineCore]) -> Demand:
    """Return what these replicas, at least one, have to do.

    A full replica whose wait cannot be predicted yet, which the prediction takes for 0, does not count for the wait.
    """
    managers = [core.manager for core in cores]
    waits_s = [
        core.latency.waiting_time.seconds(core.manager, core.manager.num_waiting)
        for core in cores
        if core.latency.waiting_time.is_known or _has_room(core.manager)
    ]
    return Demand(min(waits_s, default=0.0), min(each.num_waiting for each in managers), sum(map(_load, managers)))


def _has_room(manager: WorkloadManager) -> bool:
    return not manager.num_waiting and manager.num_running < manager.config.max_num_seqs


def _load(manager: WorkloadManager) -> float:
    pool = manager.kv_cache.pool
    kv_usage = 1.0 - pool.num_available / pool.num_blocks
    return replica_load(manager.num_running + manager.num_waiting, manager.config.max_num_seqs, kv_usage)
