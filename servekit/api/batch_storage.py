"""Use the store of files and batches from the event loop: one thread calls it. Bounds what tenants may store.

Tenants take turns with this thread, and each call is short. What may take long is done in other threads (`add_file`) or
in many calls (`delete_file`). So a tenant with large files delays its own calls, and those of others by one call only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from servekit.aio.round_robin_executor import ExecutorShutDown, RoundRobinExecutor
from servekit.batches.records import FileRecord
from servekit.batches.store import BatchStore
from servekit.config import ServeConfig
from servekit.errors import StorageFailed, shutting_down
from servekit.shared_budget import SharedBudget

Result = TypeVar("Result")

MAX_FILES = 4_000  # of all tenants; one tenant may have half of them
MAX_BATCHES = 2_000
# The tenant of the server's own calls: those that look at all batches, or store answers of several tenants.
SERVER = ""
STOP_TIMEOUT_S = 30.0  # `stop` waits so long for the call that runs


class BatchStorage:
    """The store of one process. `call` its methods."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises ConfigError if --batch-dir cannot be used."""
        assert config.batch_dir is not None
        self.config = config
        self.store = BatchStore(config.batch_dir)
        self._thread = RoundRobinExecutor("batches", num_threads=1, max_submitted=1, max_per_tenant=1)
        self._sync_threads = RoundRobinExecutor("batches-sync", num_threads=2, max_submitted=2, max_per_tenant=1)

    async def call(self, tenant: str, method: Callable[..., Result], *arguments: object) -> Result:
        """Call a method of the store when it is this tenant's turn, and return its result. Raises StorageFailed."""
        return await self._run(self._thread, tenant, partial(method, *arguments))

    async def _run(self, threads: RoundRobinExecutor, tenant: str, work: Callable[[], Result]) -> Result:
        try:
            return await threads.run(tenant, work)
        except ExecutorShutDown:
            raise shutting_down() from None

    def now_s(self) -> int:
        """Return the time in whole seconds since 1970: what clients see, and what is compared after a restart."""
        return int(time.time())

    @property
    def files_expire_s(self) -> int:
        """When a file that is stored now is deleted."""
        return self.now_s() + int(self.config.batch_retention)

    async def check_room(self, tenant: str, num_files: int = 0, num_batches: int = 0, num_bytes: int = 0) -> None:
        """Raise StorageFailed if the tenant may not store so much more."""
        await self.call(tenant, self._check_room, tenant, num_files, num_batches, num_bytes)

    async def add_file(self, file: FileRecord) -> None:
        """Add a file if its tenant has room for it, whatever others store meanwhile. Raises StorageFailed."""
        await self._run(self._sync_threads, file.tenant, partial(self.store.sync_content, file.id))

        def check_room() -> None:
            self._check_room(file.tenant, 1, 0, max(1, file.num_bytes))

        await self.call(file.tenant, self.store.add_file, file, check_room)

    async def delete_file(self, file: FileRecord) -> None:
        """Delete a file. It is hidden first, and its answers are deleted a few at a time. Raises StorageFailed."""
        await self.call(file.tenant, self.store.hide_file, file)
        while await self.call(file.tenant, self.store.delete_some_results, file.batch_id, file.is_error):
            pass
        await self.call(file.tenant, self.store.delete_file, file)

    def _check_room(self, tenant: str, num_files: int, num_batches: int, num_bytes: int) -> None:
        own, total = self.store.usage(tenant), self.store.usage()
        for what, limit, amount, held, used in (
            ("files", MAX_FILES, num_files, own.num_files, total.num_files),
            ("batches", MAX_BATCHES, num_batches, own.num_batches, total.num_batches),
            ("bytes", self.config.batch_max_total_bytes, num_bytes, own.num_bytes, total.num_bytes),
        ):
            if amount and SharedBudget(limit).num_missing(tenant, amount, held, used):
                raise StorageFailed(
                    f"there is no room for {amount} more {what}: you have {held}, and all tenants together have {used} "
                    f"of {limit} (batch_max_total_bytes for bytes); delete files that you do not need"
                )

    async def stop(self) -> None:
        """Let the call that runs end, then close the store. Calls that wait for their turn fail."""
        self._thread.shutdown()
        self._sync_threads.shutdown()
        if await self._thread.wait_ended(STOP_TIMEOUT_S):
            self.store.close()
