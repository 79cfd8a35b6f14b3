"""Keep blocks outside the device's KV cache, and bring them back: in the host's memory, and on its disk.

A block's key is the hash of the whole prefix up to its end (`servekit/scheduler/prefix_cache.py`), so blocks with one
key hold the same. The workload manager decides which blocks are stored and loaded (`servekit/scheduler/kv_connector.py`
says why nothing has to wait for a transfer). The connector decides what it keeps: the blocks that were stored or loaded
last. It reports the keys that it drops.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from servekit.protocol.messages import StepPlan, TransferReport
from workers.kv_cache.disk_tier import DiskTier
from workers.kv_cache.pages import KVCache

MAX_KEYS = 2**16  # that a new worker announces: more would hold up the server


class KVConnector(Protocol):
    """Where a worker's blocks go to and come from, beside its own steps.

    A connector that hands sequences to another worker has the same two calls: there a store is what is sent, and the
    receiving worker's manager learns the keys as it learns those that a new worker finds on its disk.
    """

    def transfer(self, plan: StepPlan) -> TransferReport:
        """Store and load what the plan says, at the beginning of its step. Never raises for a block that is lost."""

    def keys(self) -> list[bytes]:
        """The blocks that can be loaded, the last ones those that were used last."""


class OffloadingConnector:
    """Keeps blocks in a buffer of the host's memory; with a disk tier, there as well.

    A row of the buffer has a block's keys and values of all layers, as they lie in the pages. Everything is written to
    the disk as soon as it is stored, so a block that is dropped from memory is still there.
    """

    def __init__(self, cache: KVCache, num_blocks: int, disk: DiskTier | None = None) -> None:
        """`num_blocks`: for how many the memory has room."""
        self._pages = [*cache.keys, *cache.values]
        self._sizes = [pages[0].nbytes for pages in self._pages]
        self._device = self._pages[0].device
        self._num_blocks = num_blocks
        self._disk = disk
        self._rows: OrderedDict[bytes, int] = OrderedDict()  # by key, the least recently used first
        self._free_rows = list(range(num_blocks))
        self._buffer = _make_buffer(num_blocks, sum(self._sizes), self._device)

    def transfer(self, plan: StepPlan) -> TransferReport:
        """Store and load what the plan says. Blocks that are loaded from the disk are in memory from then on."""
        for key, _ in plan.loads:  # so that the stores do not drop them
            self._touch(key)
        dropped: list[bytes] = []
        num_stored = self._store([each for each in plan.stores if not self._touch(each[1])], dropped)
        failed, num_from_disk = self._load(plan.loads, dropped)
        disk = self._disk
        if disk is not None:
            dropped += disk.take_dropped()
        return TransferReport(
            failed_loads=tuple(failed),
            dropped_keys=tuple(key for key in dropped if key not in self._rows and (disk is None or key not in disk)),
            num_stored=num_stored,
            num_loaded_from_memory=len(plan.loads) - len(failed) - num_from_disk,
            num_loaded_from_disk=num_from_disk,
            num_unwritten=0 if disk is None else disk.take_num_unwritten(),
            num_in_memory=len(self._rows),
            num_on_disk=0 if disk is None else len(disk),
            block_bytes=self._buffer.shape[1],
        )

    def keys(self) -> list[bytes]:
        """The blocks that can be loaded, the last ones those that were used last."""
        on_disk = [] if self._disk is None else self._disk.keys()
        return [*(key for key in on_disk if key not in self._rows), *self._rows][-MAX_KEYS:]

    def _touch(self, key: bytes) -> bool:
        """Note that a key is used. False if it is not in memory."""
        if key not in self._rows:
            return False
        self._rows.move_to_end(key)
        return True

    def _store(self, stores: list[tuple[int, bytes]], dropped: list[bytes]) -> int:
        dropped += [key for _, key in stores[: -self._num_blocks]]  # there is no room for more
        stores = stores[-self._num_blocks :]
        if not stores:
            return 0
        contents = self._read_pages([block for block, _ in stores])
        keys = [key for _, key in stores]
        self._keep(keys, contents, dropped)
        if self._disk is not None:
            for key, row in zip(keys, contents, strict=True):
                if key not in self._disk:
                    self._disk.write(key, row.numpy().tobytes())
        return len(stores)

    def _load(self, loads: tuple[tuple[bytes, int], ...], dropped: list[bytes]) -> tuple[list[int], int]:
        """Return the indices of loads that failed, and the number of blocks that came from the disk."""
        if not loads:
            return [], 0
        contents = torch.empty((len(loads), self._buffer.shape[1]), dtype=torch.uint8)
        rows = [self._rows.get(key) for key, _ in loads]
        in_memory = [index for index, row in enumerate(rows) if row is not None]
        contents[in_memory] = self._buffer[[row for row in rows if row is not None]]
        elsewhere = [index for index, row in enumerate(rows) if row is None]
        read = {} if self._disk is None else self._disk.read([loads[index][0] for index in elsewhere])
        from_disk = [index for index in elsewhere if loads[index][0] in read]
        for index in from_disk:
            contents[index] = torch.frombuffer(read[loads[index][0]], dtype=torch.uint8)
        loaded = sorted([*in_memory, *from_disk])
        if loaded:
            self._write_pages([loads[index][1] for index in loaded], contents[loaded])
        if from_disk:
            kept = from_disk[-self._num_blocks :]
            self._keep([loads[index][0] for index in kept], contents[kept], dropped)
        return [index for index in elsewhere if loads[index][0] not in read], len(from_disk)

    def _keep(self, keys: list[bytes], contents: Tensor, dropped: list[bytes]) -> None:
        """Put blocks into memory that are not there, in the place of the least recently used ones."""
        while len(self._free_rows) < len(keys):
            key, row = self._rows.popitem(last=False)
            self._free_rows.append(row)
            dropped.append(key)
        rows = [self._free_rows.pop() for _ in keys]
        self._buffer[rows] = contents
        self._rows.update(zip(keys, rows, strict=True))

    def _read_pages(self, blocks: list[int]) -> Tensor:
        """Return bytes [num_blocks, bytes of a block] on the host."""
        index = torch.tensor(blocks, device=self._device)
        parts = [pages[index].view(torch.uint8).reshape(len(blocks), -1) for pages in self._pages]
        return torch.cat(parts, dim=1).cpu()

    def _write_pages(self, blocks: list[int], contents: Tensor) -> None:
        """Write bytes [num_blocks, bytes of a block] to the pages."""
        index, on_device, first = torch.tensor(blocks, device=self._device), contents.to(self._device), 0
        for pages, size in zip(self._pages, self._sizes, strict=True):
            part = on_device[:, first : first + size].contiguous()
            pages[index] = part.view(pages.dtype).view(len(blocks), *pages.shape[1:])
            first += size


def _make_buffer(num_rows: int, num_bytes: int, device: torch.device) -> Tensor:
    """Return the memory for blocks. Beside a CPU it is taken page by page at first use; for a GPU it is pinned."""
    if device.type == "cuda":
        return torch.empty((num_rows, num_bytes), dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.zeros((num_rows, num_bytes), dtype=np.uint8))


def block_bytes(cache: KVCache) -> int:
    """Return the bytes of one block's keys and values, in all layers."""
    return sum(math.prod(pages.shape[1:]) * pages.itemsize for pages in (*cache.keys, *cache.values))
