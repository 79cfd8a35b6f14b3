"""Record what a worker's steps do, as a trace that Perfetto and chrome://tracing open.

torch.profiler records the CPU, and the GPU if there is one. Without a profile request none of it is loaded.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from servekit.protocol.messages import Profiled, StepPlan, StepResult
from workers.runner.interface import Pending, Runner, done

# Everything that torch can record, recorded or not: torch warns where only a part of it is switched off.
ALL_ACTIVITIES = [ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU]


class Profiler:
    """Records the steps from its construction to `end`, up to a number of them."""

    def __init__(self, directory: Path, max_steps: int) -> None:
        """Start recording. It stops after `max_steps` steps, to bound memory: each step is thousands of events."""
        self._directory = directory
        self._max_steps = max_steps
        self._num_steps = 0
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def launch(self, plan: StepPlan, runner: Runner) -> Pending[StepResult]:
        """Execute the step under a name of its own in the trace. Raises OutOfMemory.

        Waits for the step, so that everything under its name in the trace is part of it.
        """
        if self._num_steps == self._max_steps:
            return runner.launch(plan)
        with record_function(name_of(plan)):
            result = runner.launch(plan).finish()
        self._num_steps += 1
        if self._num_steps == self._max_steps:
            # Writing the trace takes as long as a hundred steps, and the server would take this worker for stuck. So
            # only the recording stops here.
            self._profile.toggle_collection_dynamic(False, ALL_ACTIVITIES)
        return done(result)

    def end(self) -> Profiled:
        """Stop recording, and write the trace to a new file. Takes seconds, mostly with the interpreter's lock held."""
        self._profile.stop()
        try:
            path = _new_file(self._directory)
            self._profile.export_chrome_trace(str(path))
        except OSError as error:
            return Profiled(failure=f"the trace could not be written into {self._directory}: {error.strerror}")
        return Profiled(path=str(path), num_steps=self._num_steps)


def name_of(plan: StepPlan) -> str:
    """Return the step's name in the trace. A chunk of one token counts as decode; it may be a prompt's end, too."""
    num_decodes = sum(chunk.num_tokens == 1 for chunk in plan.chunks)
    return f"step {plan.step_id}: {plan.num_tokens - num_decodes} prefill + {num_decodes} decode tokens"


def _new_file(directory: Path) -> Path:
    """Create a file of a new name, also if another server writes into the same directory at the same time."""
    for number in count(1):
        path = directory / f"trace-{number:04}.json.gz"
        try:
            path.touch(exist_ok=False)
            return path
        except FileExistsError:
            continue
    raise AssertionError("there is always another number")
