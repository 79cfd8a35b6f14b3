"""Send the blocks that a prefill worker computes to decode workers on the same machine, through memory that all map."""

from __future__ import annotations

import logging

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from servekit.protocol.block_ring import BlockRing
from servekit.protocol.messages import StepPlan, TransferReport
from workers.kv_cache.kv_connector import BATCH_BLOCKS, MAX_DROPPED, MAX_KEYS, split_rows
from workers.kv_cache.pages import KVCache

log = logging.getLogger("servekit.worker")


class TransferConnector:
    """Sends to one ring, or loads from all of them.

    What is copied between a GPU and the rings waits for the device. A worker that sends does so behind its step.
    """

    def __init__(self, cache: KVCache, rings: list[BlockRing], own: BlockRing | None = None) -> None:
        """`own` is the ring that a prefill worker sends to; `rings` are those that blocks are loaded from.

        A worker that joined has both, and its manager decides which it uses: what is in its own one, too, it reports as
        loadable.
        """
        self._pages = [*cache.keys, *cache.values]
        self._device = self._pages[0].device
        self._rings = rings
        self._own = own
        self._dropped: list[bytes] = []  # keys that are not reported yet
        self._is_sending = own is not None

    @property
    def num_transfer_blocks(self) -> int:
        """How many of the blocks that it has sent can be loaded at the most; 0 if it sends none."""
        return 0 if self._own is None else self._own.max_readable

    def transfer(self, plan: StepPlan) -> TransferReport:
        """Load what the plan says."""
        for ring in self._rings:
            self._dropped += ring.refresh()
        failed = self._load(plan.loads) if plan.loads else []
        reported, self._dropped = self._dropped[:MAX_DROPPED], self._dropped[MAX_DROPPED:]
        return TransferReport(
            failed_loads=tuple(failed),
            dropped_keys=tuple(key for key in reported if not any(key in ring for ring in self._rings)),
            num_received=len(plan.loads) - len(failed),
        )

    def send(self, plan: StepPlan, report: TransferReport) -> TransferReport:
        """Send what the plan says, and return the report of `transfer` with it."""
        ring = self._own
        if ring is None or not plan.sends:
            return report
        if not self._is_sending:  # the manager takes it for sent, and others must not ask for it
            return replace(report, dropped_keys=(*report.dropped_keys, *(key for _, key in plan.sends)))
        num_at_once = min(BATCH_BLOCKS, ring.max_append)
        rows = torch.from_numpy(ring.rows)
        parts = split_rows(rows, self._pages)
        for first in range(0, len(plan.sends), num_at_once):
            batch = plan.sends[first : first + num_at_once]
            index = torch.tensor(ring.next_rows(len(batch)))
            blocks = torch.tensor([block for block, _ in batch], device=self._device)
            for pages, part in zip(self._pages, parts, strict=True):
                part.index_copy_(0, index, pages.index_select(0, blocks).cpu())
            ring.append([key for _, key in batch])
            self._dropped += ring.refresh()
        return replace(report, num_sent=len(plan.sends), block_bytes=ring.rows.shape[1])

    def keys(self) -> list[bytes]:
        """The blocks that can be loaded: a worker that is started again finds what was there before."""
        return [key for ring in self._rings for key in ring.list_keys()][-MAX_KEYS:]

    def stop_writing(self) -> None:
        """Send nothing from now on."""
        if self._is_sending:
            log.warning(
                "a LoRA adapter has failed, so KV blocks may be wrong: this worker sends none from now on, and long "
                "prompts are also decoded here; restart the server once the adapter's files are right"
            )
        self._is_sending = False

    def _load(self, loads: tuple[tuple[bytes, int], ...]) -> list[int]:
        """Return the indices of loads that failed."""
        found: dict[int, list[int]] = {number: [] for number in range(len(self._rings))}
        failed = []
        for index, (key, _) in enumerate(loads):
            number = next((number for number, ring in enumerate(self._rings) if key in ring), None)
            if number is None:
                failed.append(index)
            else:
                found[number].append(index)
        for number, indices in found.items():
            for first in range(0, len(indices), BATCH_BLOCKS):
                batch = indices[first : first + BATCH_BLOCKS]
                copies, is_right = self._rings[number].read([loads[index][0] for index in batch])
                self._fill_pages(copies, [loads[index][1] for index in batch])
                failed += [index for index, right in zip(batch, is_right.tolist(), strict=True) if not right]
        return sorted(failed)

    def _fill_pages(self, copies: NDArray[np.uint8], blocks: list[int]) -> None:
        """Copy rows to blocks. A block whose row is wrong is never used: its load has failed."""
        index = torch.tensor(blocks, device=self._device)
        for pages, part in zip(self._pages, split_rows(torch.from_numpy(copies), self._pages), strict=True):
            pages.index_copy_(0, index, part.to(self._device))
