"""What a worker's main loop asks of whoever executes its steps."""

from __future__ import annotations

from typing import Protocol

from servekit.messages import StepPlan, StepResult


class OutOfMemory(Exception):
    """The device does not hold a step's intermediate values, not even in the smallest pieces."""


class Runner(Protocol):
    """A model on a device, or the likeness of one."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the step's rows, and choose a token for each one that samples. Raises OutOfMemory."""
