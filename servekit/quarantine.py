"""Whose doing it is that workers are lost: suspects run alone, one after the other, until they have proved harmless.

A worker may end for any reason, and most have nothing to do with what it computed; so at first everybody just goes on.
Whoever was under way in two losses with no progress between them is a suspect. Suspects are computed with nothing
beside them, so the next loss has one cause. A sequence that computes what it was at, and a little more, goes back into
line; one over which a third worker is lost is convicted, and nobody else with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from servekit.sequence import Sequence

SUSPICIOUS = 2  # losses in a row, in all of which the sequence was under way
CONVICTING = 3


class Quarantine:
    """The suspects, oldest suspicion first."""

    def __init__(self, num_steps_ahead: int) -> None:
        # With two steps in flight, a loss may be the doing of the second; so as many tokens prove that it is over.
        self._num_tokens_to_prove = num_steps_ahead
        self._suspects: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._suspects)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._suspects

    @property
    def first(self) -> Sequence:
        """Who has the worker for itself."""
        return self._suspects[0]

    def judge(self, under_way: Iterable[Sequence]) -> list[Sequence]:
        """A worker was lost, and these were under way: the convicted among them."""
        convicted = []
        for sequence in under_way:
            has_progressed = sequence.num_tokens > sequence.num_tokens_at_loss
            sequence.num_losses = 1 if has_progressed else sequence.num_losses + 1
            sequence.num_tokens_at_loss = sequence.num_tokens
            if sequence.num_losses >= CONVICTING:
                convicted.append(sequence)
            elif sequence.num_losses >= SUSPICIOUS and sequence not in self._suspects:
                self._suspects.append(sequence)
        return convicted

    def discard(self, sequence: Sequence) -> bool:
        """It has ended. False if it was no suspect."""
        if sequence not in self._suspects:
            return False
        self._suspects.remove(sequence)
        return True

    def acquit(self) -> Sequence | None:
        """Let the first suspect go if it has proved harmless; gives it back."""
        if self._suspects:
            first = self._suspects[0]
            if first.num_tokens >= first.num_tokens_at_loss + self._num_tokens_to_prove:
                first.num_losses = 0
                return self._suspects.popleft()
        return None
