"""Keep the states of one KV block of a simulated worker, and their sum."""

from __future__ import annotations

from msgspec import Struct

GARBAGE = 1  # no answer has this token, and no position this state


class Page(Struct, gc=False):
    """The states in a KV block, and their sum.

    A token depends on the sum of all states before it. So a worker reads one number for each full block, and not one
    for each position.
    """

    states: list[int]
    total: int

    @classmethod
    def of(cls, states: list[int]) -> Page:
        """Return a page with these states, which it keeps."""
        return cls(states, sum(states))

    @classmethod
    def of_garbage(cls, block_size: int) -> Page:
        """Return a page for a block whose contents are undefined."""
        return cls.of([GARBAGE] * block_size)

    def write(self, offset: int, state: int) -> None:
        """Write the state of one position."""
        self.total += state - self.states[offset]
        self.states[offset] = state

    def copy(self) -> Page:
        return Page(self.states.copy(), self.total)
