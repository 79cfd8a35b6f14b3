"""Claims about how much memory the KV cache gets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.errors import ConfigError
from servekit.protocol.messages import LoadModel
from servekit.protocol.speculative_config import SpeculativeConfig
from tests.support.inprocess import load
from workers.runner import model_runner
from workers.runner.memory_profiling import (
    RESERVE,
    MemoryUse,
    explain,
    kv_cache_bytes,
    largest_step,
    measure_memory_use,
    num_blocks_in,
)
from workers.runner.model_runner import ModelRunner

GIB = 2**30


def settings(max_num_seqs: int, max_num_batched_tokens: int, block_size: int = 16) -> LoadModel:
    return LoadModel(
        model_path="",
        device="cuda:0",
        dtype="auto",
        max_model_len=None,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_kv_blocks=None,
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=0.9,
    )


class FakeGpu:
    """A GPU whose memory is a sum of what is taken; a step takes some until it ends."""

    def __init__(self, free: int) -> None:
        self.total, self._free = 100 * GIB, free
        self.taken: dict[str, int] = {}
        self.peak_taken = 0

    def free(self) -> int:
        return self._free - sum(self.taken.values())

    def peak(self, compute: Callable[[], object]) -> int:
        before = self.peak_taken = sum(self.taken.values())
        compute()
        return self.peak_taken - before

    def take_for_a_while(self, size: int) -> None:
        self.peak_taken = max(self.peak_taken, sum(self.taken.values()) + size)


def test_kept_memory_and_a_steps_memory_add_up() -> None:
    """Figures of a device with 100 GiB, 20 of them weights."""
    gpu = FakeGpu(80 * GIB)

    def make() -> tuple[Callable[[], object], int]:
        gpu.taken |= {"cache": 2 * GIB, "token table": GIB, "graphs": 3 * GIB}

        def compute() -> None:
            gpu.taken["workspace of the first step"] = GIB // 2
            gpu.take_for_a_while(4 * GIB)

        return compute, 2 * GIB

    use = measure_memory_use(gpu, gpu.total, make)
    assert use == MemoryUse(total=100 * GIB, free=80 * GIB, kept=9 * GIB // 2, step=4 * GIB)
    cache = kv_cache_bytes(use, 0.9)
    # As it is served: all that stays, the cache, and a step on top of them.
    assert cache + use.kept + use.step <= 70 * GIB < cache * 1.021 + use.kept + use.step


def test_measurement_has_a_small_cache_and_the_tables_of_the_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, made = load(DEMO_MODEL_PATH), []
    gpu = FakeGpu(GIB // 64)
    make_table = model_runner.SlotTable

    def watched(*args: Any) -> Any:
        made.append(make_table(*args))
        return made[-1]

    monkeypatch.setattr(model_runner, "SlotTable", watched)
    monkeypatch.setattr(model_runner, "Gpu", lambda _: gpu)
    asked = settings(max_num_seqs=3, max_num_batched_tokens=40)
    assert model_runner._measure_memory_use(loaded, asked) == MemoryUse(gpu.total, GIB // 64, 0, 0)
    served = ModelRunner(loaded, replace(asked, kv_cache_memory_bytes=GIB // 64))
    assert served.cache.num_blocks > 5, "which three chunks of 40 tokens need"
    (measured, in_service) = made
    assert measured.token_ids.shape == in_service.token_ids.shape
    assert measured.block_tables.shape == in_service.block_tables.shape


def test_sum_in_the_log_adds_up() -> None:
    use = MemoryUse(total=100 * GIB, free=80 * GIB, kept=3 * GIB, step=5 * GIB)
    assert kv_cache_bytes(use, 0.9) == pytest.approx((1 - RESERVE) * 62 * GIB)
    text = explain(use, 0.9)
    assert text == (
        "100.00 (total) -20.00 (weights and other processes) -10.00 (left free by --gpu-memory-utilization) "
        "-3.00 (graphs and tables) -5.00 (one step) "
        "-1.24 (reserve) = 60.76 GiB for keys and values"
    )
    parts, _, result = text.partition(" = ")
    assert sum(map(float, re.findall(r"-?\d+\.\d+", parts))) == pytest.approx(float(result.split()[0]))


def test_full_gpu_leaves_no_cache() -> None:
    use = MemoryUse(total=100 * GIB, free=9 * GIB, kept=0, step=5 * GIB)
    assert kv_cache_bytes(use, 0.9) < 0
    assert explain(use, 0.9).endswith("= 0.00 GiB for keys and values")
    with pytest.raises(ConfigError, match="the KV cache has 99 bytes, and one block takes 100; raise --kv-cache"):
        num_blocks_in(99, 100)
    assert num_blocks_in(250, 100) == 2


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 100), st.sampled_from([1, 4, 16]))
def test_largest_step_is_as_large_as_any(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> None:
    plan, num_blocks = largest_step(settings(max_num_seqs, max_num_batched_tokens, block_size), max_model_len)
    max_tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    assert not any(chunk.num_drafts for chunk in plan.chunks)
    assert plan.num_tokens == max_tokens
    assert len(plan.chunks) == min(max_num_seqs, max_num_batched_tokens) and all(chunk.samples for chunk in plan.chunks)
    assert all(1 <= chunk.num_tokens <= max_model_len for chunk in plan.chunks)
    blocks = [block for chunk in plan.chunks for block in chunk.new_block_ids]
    assert sorted(blocks) == list(range(num_blocks))
    assert all(len(chunk.new_block_ids) * block_size >= chunk.num_tokens for chunk in plan.chunks)


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 100), st.integers(1, 7))
def test_largest_step_samples_as_many_rows_as_drafts_allow(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, max_drafts: int
) -> None:
    speculative = SpeculativeConfig("ngram", max_drafts=max_drafts)
    limits = replace(settings(max_num_seqs, max_num_batched_tokens), speculative=speculative)
    plan, _ = largest_step(limits, max_model_len)
    assert plan.num_tokens == min(max_num_batched_tokens, max_num_seqs * max_model_len)
    num_rows = sum(1 + chunk.num_drafts for chunk in plan.chunks)
    # The chunks that hold the rest of the step's tokens have no drafts.
    num_long = sum(chunk.num_tokens > 1 + max_drafts for chunk in plan.chunks)
    assert num_rows >= sum(min(chunk.num_tokens, 1 + max_drafts) for chunk in plan.chunks) - num_long * max_drafts
    assert all(chunk.num_drafts in (0, chunk.num_tokens - 1) for chunk in plan.chunks)
    assert all(len(chunk.token_ids) == chunk.num_tokens <= max_model_len for chunk in plan.chunks)
