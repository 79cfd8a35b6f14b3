"""Hold the parts of one replica: its engine core, the executor of its steps, and where its worker runs."""

from __future__ import annotations

from typing import Any

from servekit.engine.engine_core import EngineCore
from servekit.executor.model_executor import ModelExecutor
from servekit.executor.placement import Placement
from servekit.protocol.messages import LoadModel, WorkerReady
from servekit.scheduler.kv_connector import ReplicaRole


class Replica:
    """One engine core, the executor of its steps, and where its worker runs."""

    def __init__(
        self,
        index: int,
        executor: ModelExecutor,
        placement: Placement | None,
        role: ReplicaRole = ReplicaRole.BOTH,
    ) -> None:
        """`placement` is where the server starts its worker; None if its workers join."""
        self.index = index
        self.executor = executor
        self.placement = placement
        self.role = role
        self.is_vacated = False  # it has no worker and awaits none: the last one left, or could not be replaced
        self.waited_s = 0.0  # for a worker, in intervals of rebalancing: a pause of this process says nothing
        self._core: EngineCore | None = None

    @property
    def is_joined(self) -> bool:
        """Whether its workers are not started by this server."""
        return self.placement is None

    @property
    def has_core(self) -> bool:
        """Whether its first worker has been ready."""
        return self._core is not None

    @property
    def worker(self) -> WorkerReady | None:
        """What its worker reported; None before there is a core."""
        return None if self._core is None else self.executor.ready

    @property
    def transfer_addresses(self) -> tuple[str, ...]:
        """Where the agents of other workers fetch its blocks; none if they cannot."""
        return () if self.executor.ready is None else self.executor.ready.transfer_addresses

    @property
    def core(self) -> EngineCore:
        """Its core; there is one when the first worker is ready."""
        assert self._core is not None
        return self._core

    @core.setter
    def core(self, core: EngineCore) -> None:
        self._core = core

    @property
    def state(self) -> str:
        """One of loading, ready, recovering, vacated."""
        if self.is_vacated:
            return "vacated"
        if self._core is None:
            return "loading"
        return "ready" if self.is_ready else "recovering"

    @property
    def is_ready(self) -> bool:
        """Whether its worker executes steps, as far as is known."""
        return self._core is not None and self.executor.is_ready and not self.executor.is_leaving

    @property
    def takes_sequences(self) -> bool:
        """Whether a new sequence can run here at once: not while one is there that is suspected of crashing workers."""
        return self.is_ready and not self.core.manager.quarantine

    def wake(self) -> None:
        """Let its core see that the worker is lost or leaves. Does nothing before there is a core."""
        if self._core is not None:
            self._core.wake()

    async def start(self, load: LoadModel) -> WorkerReady:
        """Start its first worker, or wait until one joins. Raises ConfigError or WorkerError."""
        return await self.executor.start(load if self.placement is None else self.placement.apply(load))

    def info(self) -> dict[str, Any]:
        """What /info says of it."""
        worker = self.worker
        return {
            "state": self.state,
            "role": self.role.value,
            "worker": self.executor.worker_name,
            "host": self.executor.host or None,
            "device": None if worker is None else worker.device,
            "num_blocks": None if worker is None else worker.num_blocks,
            "ranks": [] if worker is None else worker.ranks,
            "latency_model": None if self._core is None else self._core.latency.model.info(),
            "kv_connector": self._kv_connector_info(),
        }

    def _kv_connector_info(self) -> dict[str, int] | None:
        connector = None if self._core is None else self._core.manager.kv_connector
        if connector is None or not connector.is_on:
            return None
        return {
            "num_blocks": connector.num_keys,
            "num_loaded_blocks": connector.num_loaded_blocks,
            "num_failed_loads": connector.num_failed_loads,
            "num_sent_blocks": connector.num_sent_blocks,
        }

    def describe(self) -> str:
        """Return a text for log lines: its worker, and where that runs. There is one."""
        worker = self.worker
        assert worker is not None
        return f"worker {self.executor.worker_name}: {worker.place}"

    def fits(self, max_length: int) -> bool:
        """Whether a sequence of so many tokens can run here alone."""
        return max_length <= self.core.manager.config.max_total_tokens
