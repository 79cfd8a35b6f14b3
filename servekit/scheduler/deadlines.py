"""Track the deadlines of sequences, to their first token and to their last.

Most deadlines are never reached, because sequences end before. If clients set deadlines of a day, a server must not
keep all requests of a day. So the heap drops the deadlines of sequences that have ended.
"""

from __future__ import annotations

from servekit.scheduler.lazy_heap import LazyHeap
from servekit.scheduler.sequence import NEVER, Sequence, Status


def _is_alive(sequence: Sequence, _: int) -> bool:
    return sequence.status is not Status.FINISHED


class Deadlines:
    """The deadlines of all sequences that are alive."""

    def __init__(self) -> None:
        self._heap = LazyHeap(_is_alive)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_s(self) -> float:
        """The next deadline, on the manager's clock; NEVER if there is none."""
        return self._heap.first_key

    def add(self, sequence: Sequence) -> None:
        """Track both deadlines of a sequence, as far as it has them."""
        for deadline_s in self._limits(sequence):
            # The incarnation distinguishes a sequence that was withdrawn and came back from the one before.
            self._heap.push(deadline_s, sequence, sequence.incarnation)

    def pop_overdue(self, now_s: float) -> list[Sequence]:
        """The sequences that missed a deadline; twice if a sequence missed both. Afterwards `next_s` is after `now_s`.

        A deadline to the first token is met by any output token.
        """
        overdue = []
        while self.next_s <= now_s:
            deadline_s, sequence = self._heap.pop()
            if deadline_s == sequence.deadline_s or not sequence.num_output_tokens:
                overdue.append(sequence)
        return overdue

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._heap.discard(len(self._limits(sequence)))

    @staticmethod
    def _limits(sequence: Sequence) -> set[float]:
        return {sequence.ttft_deadline_s, sequence.deadline_s} - {NEVER}
