"""Find the sequence that crashes workers: suspects run alone, one after the other, until they prove harmless.

A worker may end for any reason, and most reasons have nothing to do with what it computed. So after a first crash all
sequences continue. A sequence that was in flight in two crashes, with no new token between them, is a suspect. A
suspect runs alone, so the next crash can have only one cause. If it generates a few more tokens than before, it returns
to the waiting queue. If a third worker crashes while the suspect runs, only the suspect fails.

With two steps in flight, a token of the first one may be new although the second one crashes the worker again. Then it
takes one more crash to find the sequence. A rule that demands more progress would be wrong, too: harmless sequences
would fail if workers are killed from outside again and again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from servekit.scheduler.sequence import Sequence

CRASHES_TO_SUSPECT = 2  # crashes in a row in which the sequence was in flight
CRASHES_TO_FAIL = 3


class CrashRecord(Struct, frozen=True, gc=False):
    """The crashes in a row that a sequence was in flight in, with no new token between them."""

    num_crashes: int
    num_tokens: int  # tokens that were known at the last crash

    @property
    def makes_suspect(self) -> bool:
        return self.num_crashes >= CRASHES_TO_SUSPECT


class CrashQuarantine:
    """The suspects, the oldest suspicion first, and the crashes that each living sequence was in flight in."""

    def __init__(self, num_steps_ahead: int) -> None:
        # With two steps in flight, the second may be the cause of a crash; so as many tokens prove a suspect harmless.
        self._num_tokens_to_clear = num_steps_ahead
        self._suspects: deque[Sequence] = deque()
        self._records: dict[int, CrashRecord] = {}  # by sequence id

    def __len__(self) -> int:
        return len(self._suspects)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._suspects

    @property
    def sequence_ids(self) -> list[int]:
        """The ids of all suspects."""
        return [sequence.sequence_id for sequence in self._suspects]

    @property
    def first(self) -> Sequence:
        """The suspect that has the worker for itself."""
        return self._suspects[0]

    def record_crash(self, in_flight: Iterable[Sequence]) -> list[Sequence]:
        """Record that a worker crashed while these sequences were in flight; return those of them that must fail."""
        failed = []
        for sequence in in_flight:
            last = self._records.get(sequence.sequence_id, CrashRecord(0, 0))
            has_progressed = sequence.num_tokens > last.num_tokens
            record = CrashRecord(1 if has_progressed else last.num_crashes + 1, sequence.num_tokens)
            self._records[sequence.sequence_id] = record
            if record.num_crashes >= CRASHES_TO_FAIL:
                failed.append(sequence)
            elif record.makes_suspect and sequence not in self._suspects:
                self._suspects.append(sequence)
        return failed

    def record_of(self, sequence: Sequence) -> CrashRecord | None:
        """The crashes that a sequence was in flight in; None if there was none."""
        return self._records.get(sequence.sequence_id)

    def add(self, sequence: Sequence, record: CrashRecord) -> None:
        """Take over a sequence from another worker's quarantine, with its crashes there."""
        self._records[sequence.sequence_id] = record
        if record.makes_suspect:
            self._suspects.append(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that has left."""
        self._records.pop(sequence.sequence_id, None)
        if sequence in self._suspects:
            self._suspects.remove(sequence)

    def clear(self) -> Sequence | None:
        """Release the first suspect if it has proved harmless, and return it. There must be one."""
        first = self._suspects[0]
        record = self._records[first.sequence_id]
        if first.num_tokens < record.num_tokens + self._num_tokens_to_clear:
            return None
        self._records[first.sequence_id] = replace(record, num_crashes=0)
        return self._suspects.popleft()
