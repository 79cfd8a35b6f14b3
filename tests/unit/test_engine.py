"""Claims about the engine that need no worker."""

from __future__ import annotations

import pytest

from servekit.config import ServeConfig
from servekit.engine import LLMEngine
from servekit.messages import ModelInfo, WorkerReady
from servekit.sampling_params import SamplingParams
from servekit.scheduler_config import scheduler_config
from servekit.sequence import Sequence
from tests.unit.test_workload_manager import make_manager, make_sequence, make_worker, reference, run


def test_blocks_that_are_missing_with_nothing_running_are_noticed_and_mended(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang raises here and ends; a service should outlive the bug, and its operator should hear of it."""
    engine, manager = LLMEngine(ServeConfig()), make_manager()
    engine._balance(manager)
    assert not caplog.records
    lost = manager.memory.pool._free.popleft()
    engine._balance(manager)
    assert "1 KV blocks or slots are nobody's" in caplog.text
    assert b"servekit_accounting_faults_total" in engine.metrics.render()
    assert engine.metrics.accounting_faults._value.get() == 1  # type: ignore[attr-defined]
    assert manager.num_lost == 0 and lost in manager.memory.pool._free
    sequence = make_sequence(0)
    manager.add(sequence)
    run(manager, make_worker(manager))
    assert sequence.output_token_ids == reference(sequence)


def test_the_scheduler_keeps_what_the_operator_chose_and_what_the_worker_has() -> None:
    model = ModelInfo("Stand-in", 1, 10, 100, (7,), 1.0, 0, 1.0)
    worker = WorkerReady(model, "cpu", "float32", num_blocks=5, kv_bytes_per_token=1, load_time_s=0.0)
    chosen = scheduler_config(ServeConfig(block_size=4, itl_target_ms=20.0, scheduling_policy="fcfs"), worker)
    assert (chosen.num_blocks, chosen.block_size, chosen.max_total_tokens) == (5, 4, 21)
    assert chosen.eos_token_ids == {7} and chosen.itl_target_s == 0.02 and chosen.scheduling_policy == "fcfs"
    assert scheduler_config(ServeConfig(), worker).itl_target_s is None


def test_forks_that_wait_for_their_leaders_prompt_are_told_apart() -> None:
    manager = make_manager()
    leader = make_sequence(0)
    fork = Sequence(1, list(leader.token_ids), SamplingParams(max_tokens=2), leader=leader)
    manager.add(leader)
    manager.add(fork)
    assert manager.num_waiting == 2 and manager.num_deferred == 1
