"""Find a sequence in the replay of a journal, and explain its time."""

from __future__ import annotations

from servekit.protocol.messages import StepPlan
from servekit.requests.time_causes import RequestTimes, TimeCause
from servekit.scheduler.explanation import Explanation, SequenceEnd, explain
from servekit.scheduler.recording import ReplayWatcher
from servekit.scheduler.sequence import Sequence
from servekit.scheduler.step import SequenceToken
from servekit.scheduler.workload_manager import WorkloadManager


class JournalWatcher(ReplayWatcher):
    """Watches the replay of a journal for one sequence.

    A journal has the times of plans and results only. So what happens to a sequence between two of them is dated with
    the first one, and so is its end, unless a token ends it.
    """

    def __init__(self, sequence_id: int) -> None:
        self._sequence_id = sequence_id
        self._sequence: Sequence | None = None
        self._added_s = 0.0
        self._first_token_s: float | None = None
        self._ended_s: float | None = None
        self._now_s = 0.0
        self.ids: list[int] = []  # the first and the last of all that were added

    def added(self, manager: WorkloadManager, sequence: Sequence) -> None:
        self.ids = [self.ids[0] if self.ids else sequence.sequence_id, sequence.sequence_id]
        if sequence.sequence_id == self._sequence_id:
            self._sequence, self._added_s, self._ended_s = sequence, manager.log.now_s, None

    def planned(self, manager: WorkloadManager, plan: StepPlan, now_s: float) -> None:
        self._look(now_s)

    def committed(self, manager: WorkloadManager, tokens: list[SequenceToken], now_s: float) -> None:
        is_of = [token for token in tokens if token.sequence is self._sequence]
        if is_of:
            self._first_token_s = self._first_token_s or now_s
            if is_of[-1].finish_reason is not None:
                self._ended_s = now_s
        self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Date an end that came since the last time with that time."""
        sequence = self._sequence
        if sequence is not None and self._ended_s is None and sequence.finish_reason is not None:
            self._ended_s = self._now_s
        self._now_s = now_s

    def explanation(self) -> Explanation | None:
        """The time of the sequence from its arrival until its end, or until the end of the journal; None without it."""
        sequence = self._sequence
        if sequence is None:
            return None
        self._look(self._now_s)
        end_s = max(self._now_s if self._ended_s is None else self._ended_s, sequence.arrival_s)
        times = RequestTimes(lambda: end_s, sequence.arrival_s)
        times.marks.append((TimeCause.ADMISSION, self._added_s))
        end = SequenceEnd(
            sequence.sequence_id,
            sequence.history,
            sequence.arrival_s,
            sequence.first_scheduled_s,
            self._first_token_s,
            self._ended_s,
            sequence.finish_reason,
        )
        return explain("", times, end, end_s, is_finished=self._ended_s is not None)
