"""Record what a worker's steps do, and write it down for a person: a trace that Perfetto and chrome://tracing open.

torch.profiler records, on the CPU and on the GPU if there is one. Nothing of it is here while nobody asked for it.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from servekit.messages import Profiled, StepPlan, StepResult
from workers.runner import Pending, Runner, done

# All that can be recorded, whether or not it is: torch warns of those who switch off only a part.
ALL = [ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU]


class Profiler:
    """From its making to its end."""

    def __init__(self, directory: Path, max_steps: int) -> None:
        """Recording ends after so many steps, for memory's sake: each one is thousands of events."""
        self._directory = directory
        self._max_steps = max_steps
        self._num_steps = 0
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def launch(self, plan: StepPlan, runner: Runner) -> Pending[StepResult]:
        """The step, under a name of its own in the trace. Raises OutOfMemory.

        It is waited for before the next one, so that what a name stands over is that step's.
        """
        if self._num_steps == self._max_steps:
            return runner.launch(plan)
        with record_function(name_of(plan)):
            result = runner.launch(plan).finish()
        self._num_steps += 1
        if self._num_steps == self._max_steps:
            # Not its end, which takes as long as a hundred steps: nobody is waiting for it, but the server would wonder
            # where this worker is.
            self._profile.toggle_collection_dynamic(False, ALL)
        return done(result)

    def end(self) -> Profiled:
        """Write a new file in the directory. It may take seconds, and holds the interpreter's lock for most of them."""
        self._profile.stop()
        try:
            path = _new_file(self._directory)
            self._profile.export_chrome_trace(str(path))
        except OSError as error:
            return Profiled(failure=f"the trace could not be written into {self._directory}: {error.strerror}")
        return Profiled(path=str(path), num_steps=self._num_steps)


def name_of(plan: StepPlan) -> str:
    """As it stands in the trace. A row of one token is taken for a decode, which the rest of a prompt may be, too."""
    num_decodes = sum(row.num_tokens == 1 for row in plan.rows)
    return f"step {plan.step_id}: {plan.num_tokens - num_decodes} prefill + {num_decodes} decode tokens"


def _new_file(directory: Path) -> Path:
    """Of a name that was not there, also if another server writes into the same directory."""
    for number in count(1):
        path = directory / f"trace-{number:04}.json.gz"
        try:
            path.touch(exist_ok=False)
            return path
        except FileExistsError:
            continue
    raise AssertionError("there is always another number")
