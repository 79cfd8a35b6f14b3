"""Use the store of files and batches from the event loop: one thread calls it. Bounds what tenants may store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from servekit.batches.records import FileRecord
from servekit.batches.store import BatchStore
from servekit.config import ServeConfig
from servekit.errors import StorageFailed
from servekit.shared_budget import SharedBudget

Result = TypeVar("Result")

MAX_FILES = 4_000  # of all tenants; one tenant may have half of them
MAX_BATCHES = 2_000


class BatchStorage:
    """The store of one process. `call` its methods."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises ConfigError if --batch-dir cannot be used."""
        assert config.batch_dir is not None
        self.config = config
        self.store = BatchStore(config.batch_dir)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")

    async def call(self, method: Callable[..., Result], *arguments: object) -> Result:
        """Return what a method of the store returns. Raises StorageFailed."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, method, *arguments)

    def now_s(self) -> int:
        """Return the time in whole seconds since 1970: what clients see, and what is compared after a restart."""
        return int(time.time())

    @property
    def files_expire_s(self) -> int:
        """When a file that is stored now is deleted."""
        return self.now_s() + int(self.config.batch_retention)

    async def check_room(self, tenant: str, num_files: int = 0, num_batches: int = 0, num_bytes: int = 0) -> None:
        """Raise StorageFailed if the tenant may not store so much more."""
        await self.call(self._check_room, tenant, num_files, num_batches, num_bytes)

    async def add_file(self, file: FileRecord) -> None:
        """Add a file if its tenant has room for it, whatever others store meanwhile. Raises StorageFailed."""
        await self.call(self.store.add_file, file, lambda: self._check_room(file.tenant, 1, 0, max(1, file.num_bytes)))

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

    def stop(self) -> None:
        """Close the store when its thread has done what it has to."""
        self._thread.submit(self.store.close)
        self._thread.shutdown(wait=True)
