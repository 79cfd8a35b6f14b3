"""Tests of a worker that is started again, with stand-ins for its processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import ConfigError, WorkerLost
from servekit.executor import model_executor
from servekit.executor.model_executor import ModelExecutor, load_model_message
from servekit.executor.worker_process import WorkerProcess
from servekit.protocol.messages import StepResult
from servekit.protocol.speculative_config import SpeculativeConfig
from tests.servekit.executor.conftest import LOAD, PLAN, use_stand_ins
from tests.servekit.executor.stand_in_worker import READY


def use_behaviours(monkeypatch: pytest.MonkeyPatch, *behaviours: str) -> None:
    """Let the worker processes be stand-ins, the first one with the first behaviour and so on."""
    use_stand_ins(monkeypatch)
    left = list(behaviours)

    def start(arguments: list[str], environment: Mapping[str, str], *_: object) -> WorkerProcess:
        return WorkerProcess([left.pop(0)])

    monkeypatch.setattr(model_executor, "WorkerProcess", start)


async def test_a_worker_that_was_stopped_starts_again_with_as_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_behaviours(monkeypatch, "works", "has other blocks", "works")
    executor = ModelExecutor(ServeConfig(), lambda: None)
    assert await executor.start(replace(LOAD, num_kv_blocks=None)) == READY
    executor.send(PLAN)  # a step that is never answered
    first = executor.worker_name
    await executor.stop()
    assert executor.stage == "waiting before the worker starts again" and executor.worker_name is None

    with pytest.raises(WorkerLost, match="has 2 KV blocks, and its predecessor had 1"):
        await executor.start_again()
    assert not executor.is_ready and executor.loss is None, "it can be tried once more"

    await executor.start_again()
    assert executor.is_ready and executor.worker_name not in (None, first)
    assert executor._model == replace(LOAD, num_kv_blocks=1)
    executor.send(PLAN)
    assert isinstance(await executor.receive(), StepResult)
    await executor.stop()


async def test_why_a_replacement_does_not_start_is_told_with_the_number_of_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_behaviours(monkeypatch, "works", "has other blocks", "has other blocks")
    monkeypatch.setattr(model_executor, "backoff_s", lambda _: 0.0)
    executor = ModelExecutor(ServeConfig(max_worker_restarts=2), lambda: None)
    await executor.start(LOAD)
    failed: list[str] = []
    with pytest.raises(WorkerLost, match="2 replacements in a row did not start"):
        await executor.replace(failed.append)
    assert [each.partition(",")[0] for each in failed] == ["attempt 1 of 2", "attempt 2 of 2"]
    assert all("has 2 KV blocks" in each for each in failed)
    await executor.stop()


# -- settings that cannot work together --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offload_dir": "blocks"}, "needs --kv-offload-memory-bytes"),
        ({"kv_offload_memory_bytes": 2**20, "kv_offload_dir": ""}, "--kv-offload-dir is empty"),
        ({"kv_offload_memory_bytes": 2**20, "enable_prefix_caching": False}, "needs the prefix cache"),
    ],
)
def test_offloading_is_refused_where_it_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model_message(ServeConfig(**settings), "model", SpeculativeConfig())


def test_offloading_settings_reach_the_worker() -> None:
    config = ServeConfig(kv_offload_memory_bytes=2**20, kv_offload_dir="blocks", kv_offload_disk_bytes=2**30)
    load = load_model_message(config, "model", SpeculativeConfig())
    assert (load.kv_offload_memory_bytes, load.kv_offload_dir, load.kv_offload_disk_bytes) == (2**20, "blocks", 2**30)
    assert not load_model_message(ServeConfig(), "model", SpeculativeConfig()).kv_offload_memory_bytes
