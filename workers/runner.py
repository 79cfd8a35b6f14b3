"""What a worker's main loop asks of whoever executes its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from servekit.messages import StepPlan, StepResult

Answer = TypeVar("Answer")


class OutOfMemory(Exception):
    """The device does not hold a step's intermediate values, not even in the smallest pieces."""


@dataclass(frozen=True, slots=True)
class Pending(Generic[Answer]):
    """A step that was launched."""

    is_done: Callable[[], bool]  # whether `finish` would return at once; true for good from then on
    finish: Callable[[], Answer]  # waits for the step; once


def done(answer: Answer) -> Pending[Answer]:
    """A step that is over already."""
    return Pending(lambda: True, lambda: answer)


class Runner(Protocol):
    """A model on a device, or the likeness of one."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched before the one before it is waited for: its device has a queue of its own."""

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Compute the step's rows, and choose a token for each one that samples.

        Raises OutOfMemory.
        """
