"""The interface between a worker's main loop and the runner that executes its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from servekit.protocol.lora import AdapterLoaded, LoraAdapter
from servekit.protocol.messages import BlocksListed, StepPlan, StepResult

Answer = TypeVar("Answer")


class OutOfMemory(Exception):
    """The device's memory does not hold a step's intermediate values, not even with few tokens at a time."""


@dataclass(frozen=True, slots=True)
class Pending(Generic[Answer]):
    """A step that was launched, and whose answer can be waited for."""

    is_done: Callable[[], bool]  # whether `finish` returns at once; once true, it stays true
    finish: Callable[[], Answer]  # waits for the step; may be called once


def done(answer: Answer) -> Pending[Answer]:
    """Return a step that is complete already."""
    return Pending(lambda: True, lambda: answer)


class Runner(Protocol):
    """A model on a device, real or simulated."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched before the one before it is complete: the device has a queue of its own."""

    def load_adapter(self, adapter: LoraAdapter) -> AdapterLoaded:
        """Read a LoRA adapter and check that it fits. What is wrong with it is the answer's refusal."""

    def list_blocks(self, start: int) -> BlocksListed:
        """List the blocks that the KV connector holds, from this number on."""

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Compute the step's chunks, and choose a token for each chunk that samples.

        Raises OutOfMemory.
        """
