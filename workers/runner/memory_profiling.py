"""Compute how much of a GPU's memory is left for the KV cache: the worker's share, less all other uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from servekit.errors import ConfigError
from servekit.protocol.messages import LoadModel, ScheduledChunk, SlotAssignment, StepPlan
from servekit.protocol.sampling_params import SamplingParams
from workers.device.memory import release_memory

CPU_KV_CACHE_BYTES = 2**30
# A share of what is left: allocators round up, no two steps of a size take the same memory, and the graphs that are
# captured later take some of the driver's, a few MiB each.
RESERVE = 0.02


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of a GPU with the weights on it, in bytes."""

    total: int
    free: int  # before anything was computed
    kept: int  # memory that stays allocated besides the cache after steps: graphs, logits, workspaces, the token table
    step: int  # what the largest step takes in addition, at its peak


class Device(Protocol):
    """A device whose memory can be measured, in bytes."""

    def free(self) -> int:
        """Return the free memory, with nothing kept for later."""

    def peak(self, compute: Callable[[], object]) -> int:
        """Return by how much the memory in use grew at its peak while `compute` ran."""


class Gpu:
    """The memory of a GPU, as its driver and torch report it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total: int = torch.cuda.mem_get_info(device)[1]

    def free(self) -> int:
        # The driver's figure and not torch's: it includes what libraries and graphs take without torch.
        torch.cuda.synchronize(self._device)
        release_memory()
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return free

    def peak(self, compute: Callable[[], object]) -> int:
        release_memory()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        compute()
        # Reserved and not allocated: fragments that are too small for any tensor are taken all the same.
        return torch.cuda.max_memory_reserved(self._device) - before


def measure_memory_use(
    device: Device, total: int, prepare: Callable[[], tuple[Callable[[], object], int]]
) -> MemoryUse:
    """Measure what serving takes besides the cache, by computing the largest step.

    `prepare` makes everything that serving needs. It returns a function that computes the largest step, and the bytes
    of the cache that it made for that step. What `prepare` makes exists while the step is computed, so what stays and
    what a step takes add up.
    """
    free = device.free()
    compute, cache_bytes = prepare()
    compute()  # once before: what the first step makes and keeps is not part of what a step takes
    kept = free - device.free() - cache_bytes
    return MemoryUse(total, free, max(kept, 0), device.peak(compute))


def kv_cache_bytes(use: MemoryUse, utilization: float) -> int:
    """Return what is left for the cache of the share `utilization` of all memory; negative if there is too little."""
    left = use.free - (1.0 - utilization) * use.total - use.kept - use.step
    return int(left - _reserve(left))


def _reserve(left: float) -> float:
    return RESERVE * max(left, 0.0)


def explain(use: MemoryUse, utilization: float) -> str:
    """Return the same as a sum in GiB, for the log."""
    taken, spared = use.total - use.free, (1.0 - utilization) * use.total
    parts = [
        ("total", use.total),
        ("weights and other processes", -taken),
        ("left free by --gpu-memory-utilization", -spared),
        ("graphs and tables", -use.kept),
        ("one step", -use.step),
    ]
    left = sum(size for _, size in parts)
    parts.append(("reserve", -_reserve(left)))
    sums = " ".join(f"{'-' if size < 0 else ''}{abs(size) / 2**30:.2f} ({name})" for name, size in parts)
    return f"{sums} = {max(kv_cache_bytes(use, utilization), 0) / 2**30:.2f} GiB for keys and values"


def num_blocks_in(num_bytes: int, bytes_per_block: int) -> int:
    """Return how many KV blocks the memory holds. Raises ConfigError if it does not hold one."""
    if num_bytes < bytes_per_block:
        raise ConfigError(
            f"the KV cache has {num_bytes} bytes, and one block takes {bytes_per_block}; raise "
            "--kv-cache-memory-bytes, or --gpu-memory-utilization if that is what limits it"
        )
    return num_bytes // bytes_per_block


def largest_step(settings: LoadModel, max_model_len: int) -> tuple[StepPlan, int]:
    """Return a step that needs as much memory as any, and how many blocks it writes to.

    Every slot samples, as many as the token budget allows, and with as many drafts: logits of many rows take the most
    memory.
    """
    most_rows = 1 + settings.speculative.max_drafts  # rows that a slot samples
    chunks, assignments, num_blocks = [], [], 0
    num_left = settings.max_num_batched_tokens
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, seed=0)
    for slot in range(settings.max_num_seqs):
        if num_left <= 0:
            break
        # The first slots get long chunks, and the others a token each with its drafts.
        for_others = (settings.max_num_seqs - 1 - slot) * most_rows
        num_tokens = min(max(min(most_rows, num_left), num_left - for_others), max_model_len)
        num_drafts = num_tokens - 1 if num_tokens <= most_rows else 0
        blocks = tuple(range(num_blocks, num_blocks + -(-num_tokens // settings.block_size)))
        chunks.append(ScheduledChunk(slot, 0, num_tokens, (0,) * num_tokens, blocks, True, num_drafts))
        assignments.append(SlotAssignment(slot=slot, sampling=sampling))
        num_blocks, num_left = num_blocks + len(blocks), num_left - num_tokens
    return StepPlan(0, 0, tuple(assignments), tuple(chunks)), num_blocks
