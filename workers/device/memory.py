"""Tell failed allocations from other errors, give memory back, and say how much memory a device has."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from servekit.errors import ConfigError
from workers.device.heap import anonymous_bytes

CUDA_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation, CUDA's code for it
# Messages of errors that torch raises as a plain RuntimeError, without a type of their own. In this order: its CPU
# allocator (c10/core/impl/alloc_cpu.cpp); cuBLAS, cuDNN and their like (CUBLAS_STATUS_ALLOC_FAILED); the CUDA driver's
# API and Triton's launcher ("CUDA driver error: out of memory").
OUT_OF_MEMORY_WORDS = ("DefaultCPUAllocator: can't allocate memory", "_STATUS_ALLOC_FAILED", "out of memory")
# Limits of a container, of cgroups version 2 and 1, in bytes; "max" is no limit.
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, by the error's type and code where torch gives them.

    torch.OutOfMemoryError comes from the GPU allocator, MemoryError from Python and numpy, torch.AcceleratorError with
    an error code from CUDA's runtime. Everything else, also on the CPU, is a RuntimeError that only
    its words distinguish.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == CUDA_MEMORY_ALLOCATION
    return type(error) is RuntimeError and any(words in str(error) for words in OUT_OF_MEMORY_WORDS)


def release_memory() -> None:
    """Give back the memory of tensors that nothing refers to, as far as torch keeps it for later."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def cpu_memory() -> int:
    """Return the bytes of memory that this machine, or its container, has for processes on the CPU."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in CGROUP_LIMITS if path.is_file()]
    return min([machine, *(int(limit) for limit in limits if limit.isdecimal())])


def held_bytes(device: torch.device, num_weight_bytes: int, num_cache_bytes: int = 0) -> int:
    """Return the bytes that this process holds on a device, with a model and its KV cache.

    On a GPU it is what torch has reserved. On a CPU it is the memory of this process alone: no libraries, which
    processes share. There, the pages of the KV cache are counted although most were not written yet.
    """
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return max(anonymous_bytes(), num_weight_bytes) + num_cache_bytes


def describe_memory(device: torch.device) -> str:
    """Say how much memory the device has, for an error message."""
    if device.type != "cuda":
        return f"{device} has {cpu_memory():,} bytes"
    free, total = torch.cuda.mem_get_info(device)
    return f"{device} has {total:,} bytes, {free:,} of them free"


@contextmanager
def allocation_refused_as(what: str, device: torch.device, remedy: str) -> Iterator[None]:
    """Turn a failed allocation within the context into a ConfigError that says what did not fit, and the remedy."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"{what} cannot be allocated: {describe_memory(device)}; {remedy}") from error
