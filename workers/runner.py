"""What a worker's main loop asks of whoever executes its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from servekit.messages import StepPlan, StepResult


class OutOfMemory(Exception):
    """The device does not hold a step's intermediate values, not even in the smallest pieces."""


class Runner(Protocol):
    """A model on a device, or the likeness of one."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched before the one before it is waited for: its device has a queue of its own."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Compute the step's rows, and choose a token for each one that samples; what is returned waits for it.

        Raises OutOfMemory.
        """
