"""How much of a device's memory is left for the KV cache: what the worker may use, less what everything else takes."""

from __future__ import annotations

from dataclasses import dataclass

from servekit.errors import ConfigError
from servekit.messages import LoadModel, Row, Seat, StepPlan
from servekit.sampling_params import SamplingParams

CPU_KV_CACHE_BYTES = 2**30
# Of what is left: allocators round up, and no two steps of a size take the same memory.
RESERVE = 0.02


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Of a GPU with the weights on it, in bytes."""

    total: int
    free: int  # when nothing was computed yet
    step: int  # what the largest step, and the largest graph, took at most


def kv_cache_bytes(use: MemoryUse, utilization: float) -> int:
    """What `utilization` of all memory leaves, may be less than nothing."""
    left = use.free - (1.0 - utilization) * use.total - use.step
    return int(left - RESERVE * max(left, 0.0))


def explain(use: MemoryUse, utilization: float) -> str:
    """The same as a sum that a person can check, in GiB."""
    taken, kept = use.total - use.free, (1.0 - utilization) * use.total
    parts = [("in all", use.total), ("weights and others", -taken), ("to be left free", -kept), ("a step", -use.step)]
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
