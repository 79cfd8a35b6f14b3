"""Claims about how much memory the KV cache gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import ConfigError
from servekit.messages import LoadModel
from workers.kv_capacity import RESERVE, MemoryUse, explain, kv_cache_bytes, largest_step, num_blocks_in

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


def test_the_sum_is_the_one_that_the_log_tells() -> None:
    use = MemoryUse(total=100 * GIB, free=80 * GIB, step=5 * GIB)
    assert kv_cache_bytes(use, 0.9) == pytest.approx((1 - RESERVE) * 65 * GIB)
    told = "100.00 (in all) -20.00 (weights and others) -10.00 (to be left free) -5.00 (a step) = 63.70 GiB"
    assert explain(use, 0.9).startswith(told)


def test_a_gpu_that_is_full_leaves_nothing() -> None:
    use = MemoryUse(total=100 * GIB, free=9 * GIB, step=5 * GIB)
    assert kv_cache_bytes(use, 0.9) < 0
    assert explain(use, 0.9).endswith("= 0.00 GiB for keys and values")
    with pytest.raises(ConfigError, match="99 bytes are left for the KV cache, and one block takes 100"):
        num_blocks_in(99, 100)
    assert num_blocks_in(250, 100) == 2


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 100), st.sampled_from([1, 4, 16]))
def test_the_rehearsed_step_is_as_large_as_any(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> None:
    plan, num_blocks = largest_step(settings(max_num_seqs, max_num_batched_tokens, block_size), max_model_len)
    most = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    assert plan.num_tokens == most
    assert len(plan.rows) == min(max_num_seqs, max_num_batched_tokens) and all(row.samples for row in plan.rows)
    assert all(1 <= row.num_tokens <= max_model_len for row in plan.rows)
    blocks = [block for row in plan.rows for block in row.new_block_ids]
    assert sorted(blocks) == list(range(num_blocks))
    assert all(len(row.new_block_ids) * block_size >= row.num_tokens for row in plan.rows)
