"""The future peak of memory: how many KV blocks sequences hold at most, from now until all of them have ended.

Sequence i holds h_i tokens, c_i are yet to come, and in every step each sequence grows by one token until it ends. In
blocks of B tokens it holds at most h_i + B - 1 tokens of memory. All sequences with c_i >= c together hold, after c
more steps,

    u(c) = sum over c_i >= c of (h_i + B - 1 + c)

Between two ends u only rises, so the peak is the largest u(c_i). `future_peak` computes just that: it sorts all
sequences by c_i.

`FuturePeak` gives the same answers, and keeps what it needs from one step to the next. In step t let a sequence have
the entry

    end = t + c_i                 the step in which it ends
    offset = h_i + B - 1 - t      what it holds in step s is offset + s

A sequence that gets a token in each step keeps its entry, because c_i falls by one while h_i and t rise by one. With
entries, u in step s is the sum of (offset + s) over all entries with end >= s. So nothing must be computed when a step
passes. An entry is written only when a sequence is admitted, ends, or does not get exactly one token in a step.

One more sequence with the entry (end, offset) adds offset + s to u(s) for every s <= end. So to admit one is to add a
linear function to a part of u. Entries are sorted by their end, in windows of some 64. Each window has an upper bound
of u over its entries: an addition raises the bound by the largest value that it has in the window, and a removal lowers
it by the smallest one. Most windows are decided by their bounds. If a bound exceeds the limit, u is computed exactly
for the entries of that window, and the bound is exact again. So answers are always exact, and an answer takes time
linear in the number of windows.

The peak: Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025, section 3 (lightllm).
There it is computed anew for each sequence that is admitted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import chain
from operator import add, itemgetter

Demand = tuple[int, int]
"""What a sequence needs: (tokens held now, tokens yet to come)."""

Entry = tuple[int, int]
"""The same, for as long as the sequence grows by a token in every step: (end, offset)."""


def future_peak(demands: Iterable[Demand], block_size: int) -> int:
    """The largest number of blocks that sequences hold at the same time, if all of them grow by a token in every step.

    With blocks of one token the answer is exact; with larger ones it is too high by less than a block per sequence.
    """
    peak = num_tokens = 0
    # When a sequence ends, all that have more to come are still running: they come before it in this order.
    for num_alive, (num_held, num_to_come) in enumerate(sorted(demands, key=itemgetter(1), reverse=True), start=1):
        num_tokens += num_held + block_size - 1
        peak = max(peak, num_tokens + num_alive * num_to_come)
    return peak // block_size


class FuturePeak:
    """Says whether one more sequence fits, as `future_peak` would. The caller keeps each entry, to remove it later."""

    WINDOW_SIZE = 64  # a window has at most twice as many entries

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.now = 0  # number of the present step
        self.rebuild([])

    def advance(self) -> None:
        """Note that all sequences have grown by a token."""
        self.now += 1
        while self._ends and self._ends[0] < self.now:
            self._delete(0)

    def rebuild(self, entries: Iterable[Entry]) -> None:
        """Replace all entries."""
        counted, size = list(entries), self.WINDOW_SIZE
        ordered = sorted(entry for entry in counted if entry[0] >= self.now)
        # Of each window: its entries by ascending end, the last of them, the sum of their offsets, and an upper bound
        # of the tokens of memory that all sequences hold when one of its entries ends. In the first window, entries
        # whose ends have passed may be left over, of sequences that are counted or have been removed. They are before
        # all others, so they add nothing to what is held later. The last entry of a window is never one of them.
        self._windows = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        self._lasts = [window[-1] for window in self._windows]
        self._ends = [end for end, _ in self._lasts]
        self._offsets = [sum(offset for _, offset in window) for window in self._windows]
        self._num_entries, self._offset = len(counted), sum(offset for _, offset in counted)
        self._bounds = [0] * len(self._windows)
        num_alive = held = 0
        for index in range(len(self._windows) - 1, -1, -1):
            self._bounds[index] = self._peak(self._windows[index], num_alive, held)
            num_alive += len(self._windows[index])
            held += self._offsets[index]

    def entry(self, demand: Demand) -> Entry:
        """The entry of a sequence with this demand."""
        num_held, num_to_come = demand
        return self.now + num_to_come, num_held + self._block_size - 1 - self.now

    def add(self, entry: Entry) -> None:
        """Count one more sequence."""
        end, offset = entry
        lasts, ends, bounds = self._lasts, self._ends, self._bounds
        self._num_entries += 1
        self._offset += offset
        if not lasts:
            self._insert(0, [entry], offset + end)
            return
        index = bisect_left(lasts, entry)
        if index == len(lasts):
            index -= 1
            lasts[index] = entry
            ends[index] = end
        window = self._windows[index]
        insort(window, entry)
        self._offsets[index] += offset
        if index:
            bounds[:index] = [bound + offset + last for bound, last in zip(bounds, ends[:index], strict=False)]
        # In its own window it adds at most what it holds at its end. When it ends, all others hold no more than when
        # the next one ends.
        bounds[index] += offset + end
        if len(window) > 2 * self.WINDOW_SIZE:
            bound = bounds[index]
            self._delete(index)
            self._insert(index, window[self.WINDOW_SIZE :], bound)
            self._insert(index, window[: self.WINDOW_SIZE], bound)

    def _insert(self, index: int, window: list[Entry], bound: int) -> None:
        self._windows.insert(index, window)
        self._lasts.insert(index, window[-1])
        self._ends.insert(index, window[-1][0])
        self._offsets.insert(index, sum(offset for _, offset in window))
        self._bounds.insert(index, bound)

    def _delete(self, index: int) -> None:
        del self._windows[index], self._lasts[index], self._ends[index], self._offsets[index], self._bounds[index]

    def remove(self, entry: Entry) -> None:
        """Count a sequence no more. Its entry is one that was added."""
        windows, lasts, bounds = self._windows, self._lasts, self._bounds
        end, offset = entry
        self._num_entries -= 1
        self._offset -= offset
        if end < self.now:
            return
        index = bisect_left(lasts, entry)
        window = windows[index]
        place = bisect_left(window, entry)
        assert window[place] == entry, f"{entry} is not counted"
        del window[place]
        self._offsets[index] -= offset
        if index:
            bounds[:index] = [
                bound - offset - other[0][0] for bound, other in zip(bounds, windows[:index], strict=False)
            ]
        if not window or window[-1][0] < self.now:
            self._delete(index)
            return
        lasts[index] = window[-1]
        self._ends[index] = window[-1][0]
        if index and len(windows[index - 1]) + len(window) <= self.WINDOW_SIZE:
            both, bound = windows[index - 1] + window, max(bounds[index - 1 : index + 1])
            self._delete(index)
            self._delete(index - 1)
            self._insert(index - 1, both, bound)

    def fits(self, demand: Demand, num_blocks: int) -> bool:
        """Whether the peak is at most `num_blocks` blocks if one more sequence, with this demand, is added."""
        bounds, ends = self._bounds, self._ends
        num_held, num_to_come = demand
        end, offset = entry = self.now + num_to_come, num_held + self._block_size - 1 - self.now
        limit = (num_blocks + 1) * self._block_size - 1  # in tokens; the peak is rounded down to whole blocks
        room = limit - offset  # u(s) + s may be as large as that, where the sequence is still running
        # What they hold now. It is the peak if no end is left to come.
        if self._offset + (self._num_entries + 1) * self.now > room:
            return False
        own = bisect_left(self._lasts, entry)
        if own == len(bounds):
            if end > room:  # it is the last one
                return False
        else:
            if bounds[own] + end > room and not self._fits_in(own, entry, limit):
                return False
            if max(bounds[own:]) > limit:  # what ends after it is as it was
                for index in range(own + 1, len(bounds)):
                    if bounds[index] > limit:
                        bounds[index] = self._peak_in(index)
                        if bounds[index] > limit:
                            return False
        if own and max(map(add, bounds, ends[:own])) > room:
            for index in range(own):
                if bounds[index] + ends[index] > room and not self._fits_in(index, entry, limit):
                    return False
        return True

    def _fits_in(self, index: int, entry: Entry, limit: int) -> bool:
        """Whether the peak in a window is at most `limit` tokens with one more entry, which ends there or later."""
        self._bounds[index] = bound = self._peak_in(index)
        end, offset = entry
        return bound + offset + min(end, self._ends[index]) <= limit or self._peak_in(index, entry) <= limit

    def _peak_in(self, index: int, added: Entry | None = None) -> int:
        """How many tokens of memory are held at most when an entry of a window ends."""
        window = self._windows[index]
        num_alive, held = sum(map(len, self._windows[index + 1 :])), sum(self._offsets[index + 1 :])
        if added is not None:
            if added > window[-1]:
                num_alive += 1
                held += added[1]
            else:
                window = sorted([*window, added])
        return self._peak(window, num_alive, held)

    def _peak(self, window: list[Entry], num_alive: int, held: int) -> int:
        """The most tokens of memory when an entry of a window ends.

        `num_alive` entries end later, and `held` is the sum of their offsets.
        """
        peak = 0
        for end, offset in reversed(window):
            if end < self.now:
                break
            num_alive += 1
            held += offset
            level = held + num_alive * end
            if level > peak:
                peak = level
        return peak

    def is_entry_of(self, demand: Demand, entry: Entry | None) -> bool:
        """Whether an entry says of a sequence what its demand says. For tests and simulations."""
        expected = self.entry(demand)
        # The last token has no position. So its sequence holds one more token when its end has passed by a step.
        return entry is not None and (
            entry == expected or (not demand[1] and entry[0] < self.now and entry[1] == expected[1])
        )

    def check(self, entries: Iterable[Entry]) -> None:
        """Assert that these are the entries, and that the bounds are bounds. For tests and simulations."""
        counted = sorted(entries)
        live = [[entry for entry in window if entry[0] >= self.now] for window in self._windows]
        assert [*chain(*live)] == [entry for entry in counted if entry[0] >= self.now]
        assert self._lasts == [window[-1] for window in self._windows] and self._ends == [end for end, _ in self._lasts]
        assert self._offsets == [sum(offset for _, offset in window) for window in self._windows]
        assert self._offset == sum(offset for _, offset in counted) and self._num_entries == len(counted)
        for index, bound in enumerate(self._bounds):
            assert not live[index] or self._peak_in(index) <= bound
