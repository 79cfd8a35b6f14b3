"""Claims about which errors are failed allocations, and about memory that a device does not have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.errors import ConfigError
from servekit.protocol.messages import LoadModel
from tests.support.inprocess import load
from workers.device import memory as device_memory
from workers.device.memory import cpu_memory, is_out_of_memory
from workers.runner.model_runner import ModelRunner

SETTINGS = LoadModel(
    model_path="",
    device="cpu",
    dtype="auto",
    max_model_len=None,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    block_size=16,
    num_kv_blocks=None,
    kv_cache_memory_bytes=None,
    gpu_memory_utilization=0.9,
)


def accelerator_error(code: int) -> torch.AcceleratorError:
    error = torch.AcceleratorError("CUDA error: out of memory")
    error.error_code = code  # torch sets it where it raises one
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        accelerator_error(2),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=repr,
)
def test_failed_allocation_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        accelerator_error(700),
        ValueError("the words 'out of memory' in a client's text"),
        KeyError("out of memory"),
    ],
    ids=repr,
)
def test_other_errors_are_not_taken_for_failed_allocations(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_allocations_that_really_fail_are_recognised() -> None:
    """On this machine's CPU, by the libraries' own errors."""
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**60)
    with pytest.raises(MemoryError) as of_numpy:
        np.zeros(2**60, dtype=np.uint8)
    assert is_out_of_memory(of_torch.value) and is_out_of_memory(of_numpy.value)


@pytest.mark.parametrize(
    ("limit", "expected"), [("1000000\n", 1_000_000), ("max\n", None), (str(2**63), None)], ids=["set", "max", "huge"]
)
def test_memory_of_a_cpu_is_its_containers_limit(
    limit: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "CGROUP_LIMITS", (tmp_path / "none",))
    of_machine = cpu_memory()
    assert of_machine > 2**28
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(device_memory, "CGROUP_LIMITS", (tmp_path / "memory.max",))
    assert cpu_memory() == (expected or of_machine)


@pytest.mark.parametrize("setting", [{"kv_cache_memory_bytes": 10**15}, {"num_kv_blocks": 10**12}], ids=str)
def test_kv_cache_larger_than_the_device_is_refused_with_value_limit_and_remedy(setting: dict[str, int]) -> None:
    loaded = load(DEMO_MODEL_PATH)
    with pytest.raises(
        ConfigError,
        match=r"a KV cache of [\d,]+ blocks is [\d,]+ bytes, and cpu has [\d,]+ bytes; lower --kv-cache-memory-bytes",
    ):
        ModelRunner(loaded, replace(SETTINGS, **setting))


def test_kv_cache_that_cannot_be_allocated_is_refused_with_value_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has the memory, and other processes use it."""
    loaded = load(DEMO_MODEL_PATH)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 7.0 GiB for an array")

    monkeypatch.setattr("workers.kv_cache.pages._zeros", fail)
    with pytest.raises(ConfigError, match=r"a KV cache of [\d,]+ bytes cannot be allocated: cpu has .* lower --kv"):
        ModelRunner(loaded, SETTINGS)
