"""When which sequence's time is up.

A heap of deadlines, of which most are never reached: sequences end before. What they leave behind is dropped on
surfacing, or swept out when it is half of the heap; a server whose clients grant a day must not keep a day of requests.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from servekit.sequence import NEVER, Sequence, Status


class Deadlines:
    """Of the sequences that are alive: to the first token, and to the last."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_discarded = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_s(self) -> float:
        """When somebody's time is up; NEVER if nobody's is limited. May be too early, if that one has ended."""
        return self._heap[0][0] if self._heap else NEVER

    def add(self, sequence: Sequence) -> None:
        for deadline_s in {sequence.ttft_deadline_s, sequence.deadline_s} - {NEVER}:
            heappush(self._heap, (deadline_s, sequence.sequence_id, sequence))

    def pop_overdue(self, now: float) -> list[Sequence]:
        """Everybody whose time is up; after this, `next_s` is later than `now`."""
        overdue = []
        while self.next_s <= now:
            deadline_s, _, sequence = heappop(self._heap)
            if sequence.status is not Status.FINISHED and (
                deadline_s == sequence.deadline_s or not sequence.num_output_tokens
            ):
                overdue.append(sequence)
        return overdue

    def discard(self, sequence: Sequence) -> None:
        """It has ended."""
        self._num_discarded += len({sequence.ttft_deadline_s, sequence.deadline_s} - {NEVER})
        if self._num_discarded > len(self._heap) // 2:
            self._num_discarded = 0
            self._heap = [entry for entry in self._heap if entry[-1].status is not Status.FINISHED]
            heapify(self._heap)
