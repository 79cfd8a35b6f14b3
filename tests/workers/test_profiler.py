"""Claims about the profiler itself, in the process that it records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from servekit.messages import Profiled, Row, StartProfile, StepFailed, StepPlan, StepResult, StopProfile
from workers.model_worker import ModelWorker
from workers.profiler import Profiler, name_of
from workers.runner import OutOfMemory, Pending, done

RESULT = StepResult(0, 0, (), 0.0)


class Runner:
    """Computes something, and has no memory for steps of negative numbers."""

    runs_ahead = True

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        if plan.step_id < 0:
            raise OutOfMemory("no")
        torch.ones(3).cumsum(0)
        return done(RESULT)


def plan_of(*num_tokens: int, step_id: int = 0) -> StepPlan:
    return StepPlan(0, step_id, (), tuple(Row(slot, 5, num, (), (), True) for slot, num in enumerate(num_tokens)))


def names(path: str, beginning: str = "step ") -> list[str]:
    with gzip.open(path) as trace:
        return [e["name"] for e in json.load(trace)["traceEvents"] if e["name"].startswith(beginning)]


def test_a_step_is_called_by_its_number_and_what_it_computes() -> None:
    assert name_of(plan_of(1, 480, 1, 97, step_id=7)) == "step 7: 577 prefill + 2 decode tokens"
    assert name_of(plan_of()) == "step 0: 0 prefill + 0 decode tokens"


def test_traces_are_numbered_and_none_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "trace-0002.json.gz").write_bytes(b"somebody else's")
    paths = []
    for number in range(3):
        profiler = Profiler(tmp_path, 10)
        profiler.launch(plan_of(1, step_id=number), Runner()).finish()
        told = profiler.end()
        assert told.num_steps == 1 and names(told.path) == [f"step {number}: 0 prefill + 1 decode tokens"]
        paths.append(Path(told.path).name)
    assert paths == ["trace-0001.json.gz", "trace-0003.json.gz", "trace-0004.json.gz"]
    assert (tmp_path / "trace-0002.json.gz").read_bytes() == b"somebody else's"


def test_after_the_last_step_that_is_recorded_steps_go_on(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, 3)
    assert [profiler.launch(plan_of(1, step_id=number), Runner()).finish() for number in range(5)] == [RESULT] * 5
    told = profiler.end()
    assert told.num_steps == 3
    assert [name.partition(":")[0] for name in names(told.path)] == ["step 0", "step 1", "step 2"]
    assert len(names(told.path, "aten::cumsum")) == 3, "the others take no memory"


def test_a_step_that_fails_does_so_under_the_profiler_too(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, 3)
    with pytest.raises(OutOfMemory):
        profiler.launch(plan_of(1, step_id=-1), Runner()).finish()
    assert profiler.launch(plan_of(1), Runner()).finish() == RESULT
    assert profiler.end().num_steps == 1


def test_a_directory_that_has_gone_is_told_of_and_costs_no_worker(tmp_path: Path) -> None:
    worker = ModelWorker(None, None)  # type: ignore[arg-type]
    worker._runner = runner = Runner()
    gone = tmp_path / "gone"
    assert worker._handle(StartProfile(str(gone), 5)) == Profiled()
    assert worker._begin(plan_of(1), runner).finish() == RESULT
    told = worker._handle(StopProfile())
    assert isinstance(told, Profiled) and "could not be written" in told.failure and "No such file" in told.failure
    assert worker._handle(StartProfile(str(tmp_path), 5)) == Profiled()
    assert worker._begin(plan_of(1), runner).finish() == RESULT
    assert isinstance(worker._begin(plan_of(1, step_id=-1), runner).finish(), StepFailed)
    told = worker._handle(StopProfile())
    assert isinstance(told, Profiled) and told.num_steps == 1 and Path(told.path).parent == tmp_path
    assert isinstance(worker._handle(StopProfile()), Profiled) and worker._profiler is None
