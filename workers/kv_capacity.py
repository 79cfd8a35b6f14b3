"""How much of a device's memory is left for the KV cache: what the worker may use, less what everything else takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from servekit.errors import ConfigError
from servekit.messages import LoadModel, Row, Seat, StepPlan
from servekit.sampling_params import SamplingParams
from workers.pieces import release_memory

CPU_KV_CACHE_BYTES = 2**30
# Of what is left: allocators round up, no two steps of a size take the same memory, and the graphs that are captured
# later take some of the driver's, a few MiB each.
RESERVE = 0.02


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Of a GPU with the weights on it, in bytes."""

    total: int
    free: int  # when nothing was computed yet
    kept: int  # what stays beside the cache once steps were computed: graphs, logits, workspaces, the token table
    step: int  # what the largest step takes besides, at most


class Device(Protocol):
    """What there is to ask of a device's memory, in bytes."""

    def free(self) -> int:
        """With nothing kept for later."""

    def peak(self, compute: Callable[[], object]) -> int:
        """How much more than now was taken at any time while that was computed."""


class Gpu:
    """A GPU's memory, as its driver and torch know it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total: int = torch.cuda.mem_get_info(device)[1]

    def free(self) -> int:
        # The driver's word and not torch's: it counts what libraries and graphs take behind torch's back, too.
        torch.cuda.synchronize(self._device)
        release_memory()
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return free

    def peak(self, compute: Callable[[], object]) -> int:
        release_memory()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        compute()
        # Reserved and not allocated: pieces of memory that are too small for anything are taken all the same.
        return torch.cuda.max_memory_reserved(self._device) - before


def rehearse(device: Device, total: int, make: Callable[[], tuple[Callable[[], object], int]]) -> MemoryUse:
    """See what memory is taken by all that serves but the cache.

    `make` makes ready to serve: it returns what computes the largest step, and the bytes of the cache that it made for
    it. What `make` leaves behind is there while a step is computed, so what stays and what a step takes add up.
    """
    free = device.free()
    compute, cache = make()
    compute()  # once before: whatever is made for the first step and stays is no part of what a step takes
    kept = free - device.free() - cache
    return MemoryUse(total, free, max(kept, 0), device.peak(compute))


def kv_cache_bytes(use: MemoryUse, utilization: float) -> int:
    """What `utilization` of all memory leaves, may be less than nothing."""
    left = use.free - (1.0 - utilization) * use.total - use.kept - use.step
    return int(left - _reserve(left))


def _reserve(left: float) -> float:
    return RESERVE * max(left, 0.0)


def explain(use: MemoryUse, utilization: float) -> str:
    """The same as a sum that a person can check, in GiB."""
    taken, spared = use.total - use.free, (1.0 - utilization) * use.total
    parts = [
        ("in all", use.total),
        ("weights and others", -taken),
        ("to be left free", -spared),
        ("graphs and tables", -use.kept),
        ("a step", -use.step),
    ]
    left = sum(size for _, size in parts)
    parts.append(("reserve", -_reserve(left)))
    sums = " ".join(f"{'-' if size < 0 else ''}{abs(size) / 2**30:.2f} ({name})" for name, size in parts)
    return f"{sums} = {max(kv_cache_bytes(use, utilization), 0) / 2**30:.2f} GiB for keys and values"


def num_blocks_in(memory: int, bytes_per_block: int) -> int:
    """Raises ConfigError if there is not one."""
    if memory < bytes_per_block:
        raise ConfigError(
            f"{memory} bytes are left for the KV cache, and one block takes {bytes_per_block}; raise "
            "kv_cache_memory_bytes, or gpu_memory_utilization where that decides"
        )
    return memory // bytes_per_block


def largest_step(settings: LoadModel, max_model_len: int) -> tuple[StepPlan, int]:
    """A step that needs as much memory as any, and how many blocks it writes to."""
    rows, seats, num_blocks = [], [], 0
    left = settings.max_num_batched_tokens
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, seed=0)
    for slot in range(settings.max_num_seqs):
        # All seats sample, the last of them of whatever is left; logits of many rows are what takes most.
        num_tokens = max(1, min(left - (settings.max_num_seqs - 1 - slot), max_model_len))
        if left <= 0:
            break
        blocks = tuple(range(num_blocks, num_blocks + -(-num_tokens // settings.block_size)))
        rows.append(Row(slot, 0, num_tokens, (0,) * num_tokens, blocks, samples=True))
        seats.append(Seat(slot=slot, sampling=sampling))
        num_blocks, left = num_blocks + len(blocks), left - num_tokens
    return StepPlan(0, 0, tuple(seats), tuple(rows)), num_blocks
