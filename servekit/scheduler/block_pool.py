"""Account for KV blocks: which sequences hold each one, and when it may be reused.

A block is free, cached, leased or fenced, and the four counts always sum to `num_blocks`:

- *leased*: it is in the block table of one sequence, or of several that share it;
- *fenced*: it is in no block table any more, but a step already sent to a worker may still write to it; when that step
  is done, the block becomes free or cached;
- *cached*: it is in no block table, but its contents are worth keeping; it is reused, least recently used first, when
  no block is free;
- *free*: its contents mean nothing.

Paging: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
section 4. The fence is our own addition: with it, whether a block may be reused after an abort is a comparison of step
ids, and does not depend on timing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Set
from itertools import chain


class BlockPool:
    """The blocks of one worker's KV cache, by number. It depends on neither sequences nor tensors.

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

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """How many blocks can be leased."""
        return len(self._free) + len(self._cached)

    def is_shareable(self, block: int) -> bool:
        """Whether `share` may be called. A fenced block cannot be shared: it is neither leased nor cached yet."""
        return self._holders[block] > 0 or block in self._cached

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def lease(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks for one holder. The caller ensures that so many are available."""
        assert num_blocks <= self.num_available, f"leasing {num_blocks} blocks, {self.num_available} are available"
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._holders[block] = 1
        self.num_leased += num_blocks
        return blocks

    def share(self, block: int) -> None:
        """Add one more holder to a leased or cached block, which keeps its contents."""
        assert self.is_shareable(block), f"block {block} is neither leased nor cached"
        if self._holders[block] == 0:
            del self._cached[block]
            self.num_leased += 1
        self._holders[block] += 1

    def keep(self, block: int) -> None:
        """Mark a leased block's contents as worth keeping when its last holder is gone."""
        assert self._holders[block] > 0, f"block {block} is not leased"
        self._kept.add(block)

    def release(self, blocks: Iterable[int], fence_step_id: int | None = None) -> None:
        """Remove one holder from each block: at once, or once step `fence_step_id` is settled.

        Their order is the order in which they will be reused.
        """
        released = []
        for block in blocks:
            assert self._holders[block] > 0, f"releasing block {block}, which is not leased"
            self._holders[block] -= 1
            if self._holders[block] == 0:
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
        for block in blocks:
            if block in self._kept:
                self._cached[block] = None
            else:
                self._free.append(block)

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
        leased = [block for block, holders in enumerate(self._holders) if holders]
        assert (len(fenced), len(leased)) == (self.num_fenced, self.num_leased)
        everything = [*self._free, *self._cached, *leased, *fenced]
        assert len(everything) == len(set(everything)) == self.num_blocks, "a block was lost or duplicated"
        assert self._kept.issuperset(self._cached)
        assert self._kept.isdisjoint(self._free)
