"""Claims about the engine that need no worker."""

from __future__ import annotations

import pytest

from servekit.config import ServeConfig
from servekit.engine import LLMEngine
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
