"""Claims about the scheduler's configuration."""

from __future__ import annotations

import pytest

from servekit.config import ServeConfig
from servekit.protocol.messages import ModelInfo, WorkerReady
from servekit.scheduler.scheduler_config import scheduler_config


def test_scheduler_config_combines_settings_with_what_the_worker_reports() -> None:
    model = ModelInfo("Stand-in", 1, 10, 100, (7,), 1.0, 0, 1.0)
    worker = WorkerReady(
        model, "cpu", "float32", num_blocks=5, kv_bytes_per_token=1, load_time_s=0.0, num_transfer_blocks=3
    )
    chosen = scheduler_config(ServeConfig(block_size=4, itl_target_ms=20.0, scheduling_policy="fcfs"), worker)
    assert (chosen.num_blocks, chosen.block_size, chosen.max_total_tokens) == (5, 4, 21)
    assert chosen.eos_token_ids == {7} and chosen.itl_target_s == 0.02 and chosen.scheduling_policy == "fcfs"
    assert scheduler_config(ServeConfig(), worker).itl_target_s is None and chosen.num_transfer_blocks == 3
    assert scheduler_config(ServeConfig(max_num_seqs=4), worker).max_admissions_per_step == 32
    assert scheduler_config(ServeConfig(max_num_seqs=1024), worker).max_admissions_per_step == 128


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cpu", {}, 512),
        ("cpu", {"max_num_seqs": 700}, 700),
        ("cpu", {"max_num_seqs": 5000}, 2048),
        ("cpu", {"max_num_batched_tokens": 4096}, 4096),
        ("cuda:1", {}, 2048),
        ("cuda:1", {"max_num_batched_tokens": 64}, 64),
    ],
)
def test_a_step_on_a_cpu_has_fewer_tokens_by_default_because_more_would_only_delay_first_tokens(
    device: str, settings: dict[str, int], expected: int
) -> None:
    model = ModelInfo("Stand-in", 1, 10, 100, (7,), 1.0, 0, 1.0)
    worker = WorkerReady(model, device, "float32", num_blocks=5, kv_bytes_per_token=1, load_time_s=0.0)
    assert scheduler_config(ServeConfig(**settings), worker).max_num_batched_tokens == expected
