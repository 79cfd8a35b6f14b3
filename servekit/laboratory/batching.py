"""Define the modes of batching that the laboratory compares, by a gate before the scheduler for each mode.

Continuous batching lets a request join whenever there is a slot: its gate is always open. The older ways collect
requests into batches. A batch begins together, and the next one waits until its last answer has ended. Every gate
leads to the same workload manager, so all modes are compared with the same paging, prefix cache and step times.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from servekit.scheduler.sequence import NEVER


class BatchingMode(Struct, frozen=True, kw_only=True):
    """One way of batching."""

    name: str
    explanation: str
    max_batch_size: int | None = None  # 1, or 0 for all slots; None: requests join at any time
    waits_for_full_batch: bool = False  # otherwise a batch begins at the maximum delay of its oldest request
    is_chunked: bool = False  # whether a prompt is computed in chunks, beside the decodes of others


MODES = {
    mode.name: mode
    for mode in (
        BatchingMode(
            name="one-by-one", explanation="a request begins when the one before it has ended", max_batch_size=1
        ),
        BatchingMode(
            name="static",
            explanation="a batch begins when it is full, and ends with its longest answer",
            max_batch_size=0,
            waits_for_full_batch=True,
        ),
        BatchingMode(
            name="dynamic",
            explanation="a batch begins when it is full, or when its oldest request has waited for the maximum delay",
            max_batch_size=0,
        ),
        BatchingMode(
            name="continuous", explanation="a request joins as soon as a slot is free; prompts are computed in one step"
        ),
        BatchingMode(
            name="chunked",
            explanation="continuous batching; prompts are computed in chunks, beside the tokens of running answers",
            is_chunked=True,
        ),
    )
}


class Gate:
    """Decides which of the waiting requests go to the scheduler now."""

    def __init__(self, mode: BatchingMode, num_slots: int, max_delay_s: float) -> None:
        self._max_batch_size = mode.max_batch_size if mode.max_batch_size != 0 else num_slots
        self._max_delay_s = NEVER if mode.waits_for_full_batch else max_delay_s

    def num_admitted(self, arrivals_s: Sequence[float], num_inside: int, more_will_come: bool, now_s: float) -> int:
        """How many of the waiting requests, the oldest first, go in now.

        `arrivals_s` are the arrival times of the waiting requests, `num_inside` how many are behind the gate and have
        not ended. A batch that will never be full begins when no more requests will come.
        """
        size = self._max_batch_size
        if size is None:
            return len(arrivals_s)
        if num_inside or not arrivals_s:
            return 0
        is_due = len(arrivals_s) >= size or not more_will_come or now_s >= self.opens_s(arrivals_s)
        return min(size, len(arrivals_s)) if is_due else 0

    def opens_s(self, arrivals_s: Sequence[float]) -> float:
        """When a batch begins at the latest, if all before it have ended; infinite if it waits until it is full."""
        return arrivals_s[0] + self._max_delay_s if arrivals_s else NEVER
