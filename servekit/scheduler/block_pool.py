"""Account for KV blocks: which sequences hold each one, and when it may be reused.

A block is free, cached, leased or fenced, and the four counts always sum to `num_blocks`. Free and cached blocks may be
reserved, by their number: they can then be leased only for what they were reserved for.

- *leased*: it is in the block table of one sequence, or of several that share it;
- *fenced*: it is in no block table any more, but a step already sent to a worker may still write to it; when that step
  is done, the block becomes free or cached;
- *cached*: it is in no block table, but its contents are worth keeping; it is reused, least recently used first, when
  no block is free;
- *free*: its contents are not used any more.

Paging: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
section 4. The fence is our own addition: whether a block may be reused after an abort is then a comparison of step ids,
and does not depend on timing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Set
from itertools import chain, compress


class BlockPool:
    """The blocks of one worker's KV cache, by number. It depends on neither sequences nor tensors.

    Its methods take many blocks at once: a block table may have tens of thousands, and a call for each block would take
    longer than the work in it.

    `on_reuse(block)` is called when a kept block is leased again, and so loses its contents.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[int], None] = lambda _: None) -> None:
        self.num_blocks = num_blocks
        self._on_reuse = on_reuse
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._holders = [0] * num_blocks  # in how many block tables each block is
        self._fenced: deque[tuple[int, list[int]]] = deque()  # (step_id, blocks), step_id ascending
        self._kept: set[int] = set()  # blocks whose contents are worth keeping
        self.num_leased = 0
        self.num_fenced = 0
        self.num_reserved = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """How many blocks can be leased or reserved."""
        return len(self._free) + len(self._cached) - self.num_reserved

    def num_shareable(self, blocks: list[int]) -> int:
        """How many of these kept blocks, counted from the first one, may be passed to `share`.

        A fenced block cannot be shared: it is neither leased nor cached yet.
        """
        if not self.num_fenced:
            return len(blocks)
        holders, cached = self._holders, self._cached
        return [*[holders[block] > 0 or block in cached for block in blocks], False].index(False)

    def count_cached(self, blocks: list[int]) -> int:
        """How many of these shareable blocks are in no block table."""
        return list(map(self._holders.__getitem__, blocks)).count(0)

    def reserve(self, num_blocks: int) -> None:
        """Set `num_blocks` blocks aside. The caller ensures that so many are available."""
        self.num_reserved += num_blocks
        assert self.num_reserved <= len(self._free) + len(self._cached), f"no {num_blocks} blocks are available"

    def unreserve(self, num_blocks: int) -> None:
        """Make reserved blocks available to others."""
        assert num_blocks <= self.num_reserved, f"{num_blocks} blocks are not needed, {self.num_reserved} are reserved"
        self.num_reserved -= num_blocks

    def lease(self, num_blocks: int, is_reserved: bool = False) -> list[int]:
        """Take `num_blocks` blocks for one holder. The caller ensures that so many are available, or are reserved."""
        if is_reserved:
            assert num_blocks <= self.num_reserved, f"leasing {num_blocks} blocks, {self.num_reserved} are reserved"
            self.num_reserved -= num_blocks
        else:
            assert num_blocks <= self.num_available, f"leasing {num_blocks} blocks, {self.num_available} are available"
        free, holders, blocks = self._free, self._holders, []
        for _ in range(num_blocks):
            block = free.popleft() if free else self._evict()
            holders[block] = 1
            blocks.append(block)
        self.num_leased += num_blocks
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Add one more holder to leased or cached blocks, which keep their contents."""
        holders, cached = self._holders, self._cached
        found = [block for block in blocks if not holders[block]]
        assert all(map(cached.__contains__, found)), f"of the blocks {found}, some are neither leased nor cached"
        for block in found:
            del cached[block]
        self.num_leased += len(found)
        for block in blocks:
            holders[block] += 1

    def keep(self, block: int) -> None:
        """Mark a leased block's contents as worth keeping when its last holder is gone."""
        assert self._holders[block] > 0, f"block {block} is not leased"
        self._kept.add(block)

    def discard(self, blocks: Iterable[int]) -> None:
        """Mark the contents of blocks as not worth keeping. Blocks that were only cached become free."""
        for block in blocks:
            self._kept.discard(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def release(self, blocks: list[int], fence_step_id: int | None = None) -> None:
        """Remove one holder from each block: at once, or once step `fence_step_id` is settled.

        Their order is the order in which they will be reused.
        """
        holders, released = self._holders, []
        for block in blocks:
            holders[block] = num_left = holders[block] - 1
            assert num_left >= 0, f"releasing block {block}, which is not leased"
            if not num_left:
                released.append(block)
        self.num_leased -= len(released)
        if fence_step_id is None:
            self._put_back(released)
            return
        assert not self._fenced or self._fenced[-1][0] <= fence_step_id, "fences are raised in step order"
        self._fenced.append((fence_step_id, released))
        self.num_fenced += len(released)

    def settle(self, step_id: int) -> None:
        """Lift the fences of step `step_id` and of every step before it: they are done."""
        while self._fenced and self._fenced[0][0] <= step_id:
            _, blocks = self._fenced.popleft()
            self.num_fenced -= len(blocks)
            self._put_back(blocks)

    def _put_back(self, blocks: list[int]) -> None:
        kept, cached, free = self._kept, self._cached, self._free
        for block in blocks:
            if block in kept:
                cached[block] = None
            else:
                free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._kept.discard(block)
        self._on_reuse(block)
        return block

    def holders(self) -> list[int]:
        """In how many block tables each block is."""
        return self._holders.copy()

    def num_holders(self, block: int) -> int:
        """In how many block tables a block is."""
        return self._holders[block]

    def free(self) -> Iterable[int]:
        """The free blocks."""
        return self._free

    def cached(self) -> Iterable[int]:
        """The cached blocks."""
        return self._cached.keys()

    def fenced(self) -> Iterable[int]:
        """The fenced blocks."""
        return chain.from_iterable(blocks for _, blocks in self._fenced)

    def kept(self) -> Set[int]:
        """The blocks whose contents are worth keeping."""
        return self._kept

    def check(self) -> None:
        """Assert the conservation law. Linear in `num_blocks`: for tests and for sampling in production."""
        fenced = list(self.fenced())
        leased = list(compress(range(self.num_blocks), self._holders))
        assert (len(fenced), len(leased)) == (self.num_fenced, self.num_leased)
        everything = [*self._free, *self._cached, *leased, *fenced]
        assert len(everything) == len(set(everything)) == self.num_blocks, "a block was lost or duplicated"
        assert 0 <= self.num_reserved <= len(self._free) + len(self._cached), "more is reserved than there is"
        assert self._kept.issuperset(self._cached)
        assert self._kept.isdisjoint(self._free)
