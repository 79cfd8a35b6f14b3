"""Claims about the profiler, in the process that it records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from servekit.protocol.messages import (
    Profiled,
    ScheduledChunk,
    StartProfile,
    StepFailed,
    StepPlan,
    StepResult,
    StopProfile,
)
from workers.model_worker import ModelWorker
from workers.runner.interface import OutOfMemory, Pending, done
from workers.runner.profiler import Profiler, name_of

RESULT = StepResult(0, 0, (), 0.0)


class Runner:
    """Computes something; steps with negative ids run out of memory."""

    runs_ahead = True

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        if plan.step_id < 0:
            raise OutOfMemory("no")
        torch.ones(3).cumsum(0)
        return done(RESULT)


def plan_of(*num_tokens: int, step_id: int = 0) -> StepPlan:
    return StepPlan(
        0, step_id, (), tuple(ScheduledChunk(slot, 5, num, (), (), True) for slot, num in enumerate(num_tokens))
    )


def names(path: str, beginning: str = "step ") -> list[str]:
    with gzip.open(path) as trace:
        return [e["name"] for e in json.load(trace)["traceEvents"] if e["name"].startswith(beginning)]


def test_name_of_a_step_has_its_id_and_its_tokens() -> None:
    assert name_of(plan_of(1, 480, 1, 97, step_id=7)) == "step 7: 577 prefill + 2 decode tokens"
    assert name_of(plan_of()) == "step 0: 0 prefill + 0 decode tokens"


def test_traces_are_numbered_and_none_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "trace-0002.json.gz").write_bytes(b"another server's")
    paths = []
    for number in range(3):
        profiler = Profiler(tmp_path, 10)
        profiler.launch(plan_of(1, step_id=number), Runner()).finish()
        profiled = profiler.end()
        assert profiled.num_steps == 1 and names(profiled.path) == [f"step {number}: 0 prefill + 1 decode tokens"]
        paths.append(Path(profiled.path).name)
    assert paths == ["trace-0001.json.gz", "trace-0003.json.gz", "trace-0004.json.gz"]
    assert (tmp_path / "trace-0002.json.gz").read_bytes() == b"another server's"


def test_steps_beyond_the_limit_run_without_being_recorded(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, 3)
    assert [profiler.launch(plan_of(1, step_id=number), Runner()).finish() for number in range(5)] == [RESULT] * 5
    profiled = profiler.end()
    assert profiled.num_steps == 3
    assert [name.partition(":")[0] for name in names(profiled.path)] == ["step 0", "step 1", "step 2"]
    assert len(names(profiled.path, "aten::cumsum")) == 3, "the others take no memory"


def test_out_of_memory_passes_through_the_profiler(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, 3)
    with pytest.raises(OutOfMemory):
        profiler.launch(plan_of(1, step_id=-1), Runner()).finish()
    assert profiler.launch(plan_of(1), Runner()).finish() == RESULT
    assert profiler.end().num_steps == 1


def test_missing_directory_is_reported_and_the_worker_lives(tmp_path: Path) -> None:
    worker = ModelWorker(None, None)  # type: ignore[arg-type]
    worker._runner = runner = Runner()
    missing = tmp_path / "missing"
    assert worker._handle(StartProfile(str(missing), 5)) == Profiled()
    assert worker._begin(plan_of(1), runner).finish() == RESULT
    profiled = worker._handle(StopProfile())
    assert (
        isinstance(profiled, Profiled)
        and "could not be written" in profiled.failure
        and "No such file" in profiled.failure
    )
    assert worker._handle(StartProfile(str(tmp_path), 5)) == Profiled()
    assert worker._begin(plan_of(1), runner).finish() == RESULT
    assert isinstance(worker._begin(plan_of(1, step_id=-1), runner).finish(), StepFailed)
    profiled = worker._handle(StopProfile())
    assert isinstance(profiled, Profiled) and profiled.num_steps == 1 and Path(profiled.path).parent == tmp_path
    assert isinstance(worker._handle(StopProfile()), Profiled) and worker._profiler is None
