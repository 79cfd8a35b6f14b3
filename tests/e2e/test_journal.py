"""Claims about the journal of a live server; `make bench-journal ARGS=live` has 1,000 requests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks.journal import run_live
from servekit.cli import main
from tests.support.server_process import serving


def test_a_live_run_with_aborts_preemptions_and_killed_workers_is_replayed(tmp_path: Path) -> None:
    model = "sim:step=2ms,decode=50us,prefill=5us"
    flags = ["--journal-max-bytes", "65536", "--num-kv-blocks", "18"]  # so few blocks that sequences are preempted
    run = run_live(model, 80, tmp_path, 2, 32, *flags)
    assert run.num_answered + run.num_aborted == 80 and run.num_aborted == 16
    assert run.num_restarts == 2 and run.num_preemptions > 0
    assert len(run.results) > 1, "the journal was rotated"
    for result in run.results:
        assert result.difference is None and not result.is_truncated
    assert sum(result.num_restarts for result in run.results) == 2
    num_records = sum(result.num_steps + result.num_sequences for result in run.results)
    assert num_records > 500 and run.num_bytes < 300 * num_records


@pytest.mark.long
def test_a_run_of_the_demo_model_with_grammars_and_logprobs_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with serving("--journal", str(path), "--journal-tokens", "--itl-target-ms", "20", log=tmp_path / "log") as server:
        for options in (
            {"grammar": {"type": "choice", "value": ["red", "green"]}},
            {"repetition_penalty": 1.3, "min_tokens": 5},
            {"logprobs": 2, "prompt_logprobs": 1},
            {"n": 2, "stop": ["e"], "temperature": 1.0, "seed": 7},
        ):
            server.generate("Hello, how are you today? " * 3, max_tokens=20, **options)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait()
    assert main(["replay", str(path)]) == 0
    assert main(["replay", str(path), "--max-num-seqs", "2"]) == 0
