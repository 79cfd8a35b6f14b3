"""Keep KV blocks outside the device's KV cache, in the host's memory and on its disk, and load them again.

A block's key is the hash of the whole prefix up to its end (`servekit/scheduler/prefix_cache.py`), so blocks with one
key hold the same. The workload manager decides which blocks are stored and loaded (`servekit/scheduler/kv_connector.py`
says why nothing has to wait for a transfer). The connector decides what it keeps: the blocks that were stored or loaded
last. It reports the keys that it drops.

Beside a GPU, a launch does not wait for a transfer. The device copies between its pages and memory of the host that is
pinned, in the one stream that computes the steps. So a block is stored as the steps before have left it, and is loaded
before the step that reads it; and a block that is stored and loaded again at once is copied in that order. Only where
the host itself reads or writes the memory, for the disk, it waits for these copies.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from servekit.protocol.messages import StepPlan, TransferReport
from workers.device.transfer import DeviceEvent, to_device
from workers.kv_cache.disk_tier import Bytes, DiskTier
from workers.kv_cache.pages import KVCache

MAX_KEYS = 2**16  # keys that a new worker announces; more would delay the server
MAX_DROPPED = 2**14  # keys in one report: a message has a bound
BATCH_BLOCKS = 64  # blocks that are copied or read at once; the copies take memory besides the buffer
PINNING_LIMITS = (2, 304)  # cudaErrorMemoryAllocation and cudaErrorOperatingSystem: too much memory to be pinned
# A copy in the host's memory. It keeps the GIL: to release and acquire it again would take longer than the copy.
_move = ctypes.PyDLL(None).memmove
_move.argtypes, _move.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
STAGED_BYTES = 16 * 2**20  # of a GPU's memory, through which copies pass; the reserve of memory_profiling.py has room


class KVConnector(Protocol):
    """Stores blocks of a worker outside its KV cache, and loads them again.

    `transfer_connector.py` has one that sends blocks to other workers. One that sends them to another machine would
    have the same calls.
    """

    def transfer(self, plan: StepPlan) -> TransferReport:
        """Store and load what the plan says, at the beginning of its step. Never raises for a block that is lost."""

    def send(self, plan: StepPlan, report: TransferReport) -> TransferReport:
        """Send what the plan says to other workers, behind its step. `report` is what `transfer` returned."""

    def keys(self) -> list[bytes]:
        """The blocks that can be loaded, the last ones those that were used last."""

    def stop_writing(self) -> None:
        """From now on, store nothing that others may load, or that exists longer than the worker.

        A LoRA adapter has failed. Rows that were computed without it have blocks under its name, and only this worker
        knows that the adapter is not served any more.
        """


class OffloadingConnector:
    """Keeps blocks in a buffer of the host's memory; with a disk tier, there as well.

    A row of the buffer has a block's keys and values of all layers, as they lie in the pages. Each block is written to
    the disk as soon as it is stored, so a block that is dropped from memory is still on the disk.

    Blocks that are read from the disk go to memory first. On a CPU, those that are in the kernel's page cache do not:
    they are read directly into the pages. The page cache is in the host's memory, too. So these blocks are not copied
    to memory when they leave the pages, either.
    """

    def __init__(self, cache: KVCache, num_blocks: int, disk: DiskTier | None = None) -> None:
        """`num_blocks`: for how many the memory has room."""
        self._pages = [*cache.keys, *cache.values]
        self._device = self._pages[0].device
        self._num_blocks = num_blocks
        self._disk = disk
        self._rows: OrderedDict[bytes, int] = OrderedDict()  # by key, the least recently used first
        self._free_rows = list(range(num_blocks))
        self._dropped: list[bytes] = []  # keys that are not reported yet
        self._is_writing = disk is not None
        self._read_to_pages: dict[int, bytes] = {}  # by block, the keys that were read directly into the pages
        self._block_bytes = block_bytes(cache)
        self._buffer = _make_buffer(num_blocks, self._block_bytes, self._device)
        self._memory = list(self._buffer.numpy())  # of each row
        self._copies: _HostCopies | _DeviceCopies
        if self._device.type == "cpu":
            self._copies = _HostCopies(self._pages, self._memory)
        else:
            self._copies = _DeviceCopies(self._pages, self._buffer)

    def transfer(self, plan: StepPlan) -> TransferReport:
        """Store and load what the plan says. Blocks that are loaded from the disk are in memory from then on."""
        for key, _ in plan.loads:  # so that the stores do not drop them
            self._touch(key)
        dropped = self._dropped
        stores = [each for each in plan.stores if not self._touch(each[1]) and not self._was_read_to_pages(*each)]
        stores = self._without_short_lived(stores, plan.loads)
        num_stored = self._store(stores, dropped)
        num_from_disk, failed = self._load(plan.loads, dropped) if plan.loads else (0, [])
        disk = self._disk
        if disk is not None:
            if plan.prefetches:
                loaded = {key for key, _ in plan.loads}  # a sequence may be admitted in the step in which it arrives
                disk.prefetch([key for key in plan.prefetches if key not in self._rows and key not in loaded])
            dropped += disk.take_dropped()
        reported, self._dropped = dropped[:MAX_DROPPED], dropped[MAX_DROPPED:]
        return TransferReport(
            failed_loads=tuple(failed),
            dropped_keys=tuple(key for key in reported if key not in self._rows and (disk is None or key not in disk)),
            num_stored=num_stored,
            num_loaded_from_memory=len(plan.loads) - len(failed) - num_from_disk,
            num_loaded_from_disk=num_from_disk,
            num_unwritten=0 if disk is None else disk.take_num_unwritten(),
            num_in_memory=len(self._rows),
            num_on_disk=0 if disk is None else len(disk),
            block_bytes=self._block_bytes,
        )

    def send(self, plan: StepPlan, report: TransferReport) -> TransferReport:
        """Send nothing: it keeps blocks for this worker only."""
        return report

    def keys(self) -> list[bytes]:
        """The blocks that can be loaded, the last ones those that were used last."""
        on_disk = [] if self._disk is None else self._disk.keys()
        return [*(key for key in on_disk if key not in self._rows), *self._rows][-MAX_KEYS:]

    def stop_writing(self) -> None:
        """Store in memory only from now on."""
        self._is_writing = False

    def _touch(self, key: bytes) -> bool:
        """Note that a key is used. False if it is not in memory."""
        if key not in self._rows:
            return False
        self._rows.move_to_end(key)
        return True

    def _was_read_to_pages(self, block: int, key: bytes) -> bool:
        """Return whether a block that leaves the pages was read directly into them, and still has its file.

        Forgets that it was, because another block may be in the same place afterwards.
        """
        return self._read_to_pages.pop(block, None) == key and self._disk is not None and key in self._disk

    def _without_short_lived(
        self, stores: list[tuple[int, bytes]], loads: tuple[tuple[bytes, int], ...]
    ) -> list[tuple[int, bytes]]:
        """Leave out blocks on the disk that the loads of the same plan may drop from memory again."""
        disk = self._disk
        if disk is None:
            return stores
        num_loads = sum(key not in self._rows for key, _ in loads)
        num_short_lived = max(0, len(stores) - max(0, self._num_blocks - num_loads))
        short_lived = [store for store in stores[:num_short_lived] if store[1] not in disk]
        return short_lived + stores[num_short_lived:]

    def _store(self, stores: list[tuple[int, bytes]], dropped: list[bytes]) -> int:
        """Return how many blocks were stored. Keys that are not in memory any more are appended to `dropped`."""
        dropped += [key for _, key in stores[: -self._num_blocks]]  # there is no room for more
        stores = stores[-self._num_blocks :]
        if not stores:
            return 0
        for first in range(0, len(stores), BATCH_BLOCKS):
            batch = stores[first : first + BATCH_BLOCKS]
            rows = self._claim_rows(len(batch), dropped)
            self._copies.store([block for block, _ in batch], rows)
            self._keep([key for _, key in batch], rows)
            if self._disk is not None and self._is_writing:
                self._copies.wait()
                for (_, key), row in zip(batch, rows, strict=True):
                    if key not in self._disk:
                        self._disk.write(key, self._memory[row].tobytes())
        return len(stores)

    def _load(self, loads: tuple[tuple[bytes, int], ...], dropped: list[bytes]) -> tuple[int, list[int]]:
        """Return the number of blocks that came from the disk, and the indices of loads that failed."""
        in_memory = [(self._rows[key], block) for key, block in loads if key in self._rows]
        elsewhere = [index for index, (key, _) in enumerate(loads) if key not in self._rows]
        for first in range(0, len(in_memory), BATCH_BLOCKS):
            self._fill_pages(in_memory[first : first + BATCH_BLOCKS])
        if self._disk is None:
            return 0, elsewhere
        num_from_disk = len(elsewhere)
        elsewhere = self._read_from_page_cache(self._disk, loads, elsewhere)
        failed: list[int] = []
        batch_blocks = min(BATCH_BLOCKS, self._num_blocks)  # not more at once than the memory has room for
        for first in range(0, len(elsewhere), batch_blocks):
            batch = elsewhere[first : first + batch_blocks]
            keys = [loads[index][0] for index in batch]
            rows = self._claim_rows(len(batch), dropped)
            self._copies.wait()  # the rows may be on their way to the pages, or from them
            copies = [(row, loads[index][1]) for index, row in zip(batch, rows, strict=True)]
            were_read = self._disk.read(
                keys,
                self._memory,
                rows,
                lambda some, copies=copies: self._fill_pages([copies[number] for number in some]),  # type: ignore[misc]
                num_used_at_once=self._copies.num_at_once,
                may_replace=self._device.type == "cpu",  # for a GPU, the buffer is pinned, and copied from
            )
            self._keep([key if was_read else None for key, was_read in zip(keys, were_read, strict=True)], rows)
            failed += [index for index, was_read in zip(batch, were_read, strict=True) if not was_read]
        return num_from_disk - len(failed), failed

    def _read_from_page_cache(
        self, disk: DiskTier, loads: tuple[tuple[bytes, int], ...], indices: list[int]
    ) -> list[int]:
        """Read these loads directly into the pages, if they are in host memory. Returns the indices that remain."""
        if not isinstance(self._copies, _HostCopies):  # a file cannot be read into a GPU's pages
            return indices
        keys, blocks = [loads[index][0] for index in indices], [loads[index][1] for index in indices]
        were_read = disk.read_cached(keys, map(self._copies.parts_of, blocks))
        self._read_to_pages.update(
            (block, key) for block, key, was_read in zip(blocks, keys, were_read, strict=True) if was_read
        )
        return [index for index, was_read in zip(indices, were_read, strict=True) if not was_read]

    def _claim_rows(self, num_rows: int, dropped: list[bytes]) -> list[int]:
        """Return free rows, if necessary in the place of the keys that were used least recently.

        They stay free until `_keep`, so that a key never has a row which was not filled: to copy a device's pages may
        fail for want of memory, and the worker lives on then.
        """
        while len(self._free_rows) < num_rows:
            key, row = self._rows.popitem(last=False)
            self._free_rows.append(row)
            dropped.append(key)
        return self._free_rows[len(self._free_rows) - num_rows :]

    def _keep(self, keys: Sequence[bytes | None], rows: list[int]) -> None:
        """Give keys the rows that were claimed last, and have been filled since. Rows without a key stay free."""
        pairs = list(zip(keys, rows, strict=True))
        self._free_rows[len(self._free_rows) - len(rows) :] = [row for key, row in pairs if key is None]
        self._rows.update((key, row) for key, row in pairs if key is not None)

    def _fill_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy rows of the buffer to blocks; `copies` are (row, block)."""
        if copies:
            self._copies.load([row for row, _ in copies], [block for _, block in copies])


class _HostCopies:
    """Copies between pages and a buffer that are both in the host's memory.

    A layer's part of a block is one copy. Torch would gather such parts in other memory first, and scatter them from
    there.
    """

    num_at_once = 1  # of the blocks that come from files: a processor's cache still has them

    def __init__(self, pages: list[Tensor], memory: list[Bytes]) -> None:
        """`memory` has the memory of each row. It is read for each copy, because an entry may be replaced."""
        assert all(each.is_contiguous() for each in pages)
        self._pages, self._memory = pages, memory
        self._num_blocks = len(pages[0])
        # For each layer's keys or values: their address, and the bytes of a block.
        self._parts = [(each.data_ptr(), math.prod(each.shape[1:]) * each.itemsize) for each in pages]
        self._bytes = [each.view(len(each), -1).view(torch.uint8).numpy() for each in pages]

    def parts_of(self, block: int) -> list[memoryview]:
        """Return the memory of a block in the pages: one part for each layer's keys or values."""
        self._check([block])
        return [each[block].data for each in self._bytes]

    def store(self, blocks: list[int], rows: list[int]) -> None:
        """Copy blocks of the pages to rows of the buffer."""
        self._check(blocks)
        for block, row in zip(blocks, map(self._address, rows), strict=True):
            for pages, num_bytes in self._parts:
                _move(row, pages + block * num_bytes, num_bytes)
                row += num_bytes

    def load(self, rows: list[int], blocks: list[int]) -> None:
        """Copy rows of the buffer to blocks of the pages."""
        self._check(blocks)
        for block, row in zip(blocks, map(self._address, rows), strict=True):
            for pages, num_bytes in self._parts:
                _move(pages + block * num_bytes, row, num_bytes)
                row += num_bytes

    def _check(self, blocks: list[int]) -> None:
        """Raise IndexError for blocks that the pages do not have."""
        if not 0 <= min(blocks) <= max(blocks) < self._num_blocks:
            raise IndexError(f"there are {self._num_blocks} blocks, and the plan names {blocks}")

    def _address(self, row: int) -> int:
        return self._memory[row].ctypes.data

    def wait(self) -> None:
        """Return once the host may read and write the buffer: here at once."""


class _DeviceCopies:
    """Copies between a GPU's pages and a pinned buffer, in the stream of the steps; none of them waits.

    A row of the buffer is one copy, a few megabytes of a usual model. The device gathers the parts of a row from all
    layers, and scatters them: copied one by one, they would be hundreds of small copies for each block.
    """

    num_at_once = 8  # of the blocks that come from files: the device launches a copy for each layer

    def __init__(self, pages: list[Tensor], buffer: Tensor) -> None:
        self._pages, self._buffer = pages, buffer
        self._device = pages[0].device
        self._num_staged = max(1, STAGED_BYTES // buffer.shape[1])  # blocks
        self._copied: DeviceEvent | None = None  # after the newest copy

    def store(self, blocks: list[int], rows: list[int]) -> None:
        """Copy blocks of the pages to rows of the buffer."""
        with self._followed_by_event():
            for first in range(0, len(rows), self._num_staged):
                some = slice(first, first + self._num_staged)
                staged, parts, index = self._stage(blocks[some])
                for pages, part in zip(self._pages, parts, strict=True):
                    part.copy_(pages.index_select(0, index))
                for row, block in zip(rows[some], staged, strict=True):
                    self._buffer[row].copy_(block, non_blocking=True)

    def load(self, rows: list[int], blocks: list[int]) -> None:
        """Copy rows of the buffer to blocks of the pages."""
        with self._followed_by_event():
            for first in range(0, len(rows), self._num_staged):
                some = slice(first, first + self._num_staged)
                staged, parts, index = self._stage(blocks[some])
                for row, block in zip(rows[some], staged, strict=True):
                    block.copy_(self._buffer[row], non_blocking=True)
                for pages, part in zip(self._pages, parts, strict=True):
                    pages.index_copy_(0, index, part)

    def wait(self) -> None:
        """Return once the host may read and write the buffer."""
        if self._copied is not None:
            self._copied.wait()

    @contextmanager
    def _followed_by_event(self) -> Iterator[None]:
        """Let `wait` wait for the copies within the context, also where memory is too small for the later ones."""
        try:
            yield
        finally:
            self._copied = DeviceEvent(self._device)

    def _stage(self, blocks: list[int]) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return the device's memory for whole blocks, its views for each layer's pages, and the blocks' numbers."""
        staged = torch.empty((len(blocks), self._buffer.shape[1]), dtype=torch.uint8, device=self._device)
        (index,) = to_device([np.array(blocks, dtype=np.int64)], self._device)
        return staged, split_rows(staged, self._pages), index


def split_rows(buffer: Tensor, all_pages: list[Tensor]) -> list[Tensor]:
    """Return views of the buffer's columns, one for each layer's keys or values: [num_rows, *shape of a block]."""
    parts, first = [], 0
    for pages in all_pages:
        size = math.prod(pages.shape[1:]) * pages.itemsize
        parts.append(buffer[:, first : first + size].view(pages.dtype).view(len(buffer), *pages.shape[1:]))
        first += size
    return parts


def _make_buffer(num_rows: int, num_bytes: int, device: torch.device) -> Tensor:
    """Return the memory for blocks. Beside a CPU it is taken page by page at first use; for a GPU it is pinned now.

    Raises RuntimeError if it cannot be pinned. `is_out_of_memory` tells where that is because there is too little.
    """
    memory = np.zeros((num_rows, num_bytes), dtype=np.uint8)
    if device.type == "cuda":
        # Not by `pin_memory`: torch rounds what it pins up to a power of two, so that 33 GiB would take 64.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        if error:
            reason = "out of memory that can be pinned" if error in PINNING_LIMITS else "the memory cannot be pinned"
            raise RuntimeError(f"{reason} (cudaHostRegister returned {error})")
        # Otherwise the driver would take whatever has these addresses later for pinned memory. When the process ends,
        # the driver does it itself.
        weakref.finalize(memory, _unpin, memory.ctypes.data).atexit = False
    return torch.from_numpy(memory)


def _unpin(address: int) -> None:
    # A forked process has a copy of the memory, and no device.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # copies may be under way
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def block_bytes(cache: KVCache) -> int:
    """Return the bytes of one block's keys and values, in all layers."""
    return sum(math.prod(pages.shape[1:]) * pages.itemsize for pages in (*cache.keys, *cache.values))
