"""What all CUDA graphs of steps share: they are captured by size when a worker loads, checked, and replayed."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from workers.batch import Batch
from workers.device.triton_support import kernel_errors

log = logging.getLogger("servekit.worker")


class Replay(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Compute again, with the present content of the inputs."""


Capture = Callable[[Callable[[], None]], Replay]  # captures what the function launches; raises one of kernel_errors()


class StepGraphs(ABC):
    """All graphs of one kind of steps. They read the same inputs and write the same logits, each the first of them."""

    steps: str  # what the log calls them, given their size

    def __init__(self, sizes: list[int], logits: Tensor, capture: Capture) -> None:
        """`sizes` grow. `logits` is [num_rows, vocab_size] in float32; other graphs may write it, too."""
        self.logits, self._sizes, self._capture = logits, sizes, capture
        self._graphs: dict[int, Replay] = {}  # by size

    @abstractmethod
    def _can_hold(self, batch: Batch) -> bool:
        """Return whether this is such a step, and not larger than the largest graph."""

    @abstractmethod
    def _size_of(self, batch: Batch) -> int:
        """Return the size of a step that graphs can hold."""

    @abstractmethod
    def _fill(self, batch: Batch, size: int) -> None:
        """Copy a step of `size` or smaller into the inputs; what is beyond it becomes padding."""

    @abstractmethod
    def _clear(self, size: int) -> None:
        """Make all inputs of this size padding."""

    @abstractmethod
    def _compute(self, size: int) -> None:
        """Compute the logits of the inputs of this size. This is what is captured."""

    def run(self, batch: Batch) -> Tensor | None:
        """Return logits [num_sampled, vocab_size] in float32, valid for kernels that are launched before the next run.

        Returns None, and does nothing, where there is no graph for the step.
        """
        if not self._can_hold(batch):
            return None
        size = next(size for size in self._sizes if size >= self._size_of(batch))
        return self._replayed(batch, size) if size in self._graphs else None

    def _replayed(self, batch: Batch, size: int) -> Tensor:
        self._fill(batch, size)
        self._graphs[size].replay()
        return self.logits[: len(batch.sampling)]

    def capture_all(self) -> None:
        """Capture all graphs, the largest first. Others that fail are left out.

        Raises one of kernel_errors() if the largest fails.
        """
        *smaller, largest = self._sizes
        self._graphs[largest] = self._captured(largest)
        for size in reversed(smaller):
            try:
                self._graphs[size] = self._captured(size)
            except kernel_errors() as error:  # also out of memory
                log.warning(
                    "capturing a CUDA graph failed; %s are launched one kernel at a time: %s", self.steps % size, error
                )

    def _captured(self, size: int) -> Replay:
        # Capturing computes, too. What an earlier step left in the inputs may name cells of other sequences by now.
        self._clear(size)
        return self._capture(lambda: self._compute(size))

    def check(self, batch: Batch, logits: Tensor, tolerance: float) -> None:
        """Compare every graph with logits that were computed without one; leave out those that give other logits.

        batch: a small step, which every graph that can hold it computes beside padding. logits:
        [num_sampled, vocab_size]. `tolerance` is relative. What graphs compute is otherwise not seen before the first
        request: a kernel that was captured with a number of the host's in place of the device's repeats what it gave in
        the capture.
        """
        if not self._can_hold(batch):
            return
        for size in [size for size in self._graphs if size >= self._size_of(batch)]:
            distance = float((self._replayed(batch, size) - logits).norm() / logits.norm())
            if not distance <= tolerance:  # NaN fails, too
                del self._graphs[size]
                log.warning(
                    "a CUDA graph gives other logits than the same step without it (their relative distance is %.2g, "
                    "and %.2g is allowed); %s are launched one kernel at a time",
                    distance,
                    tolerance,
                    self.steps % size,
                )
