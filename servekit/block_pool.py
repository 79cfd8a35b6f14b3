"""Account for KV blocks: who may write to each one, and when it may be reused.

A block is free, leased or fenced, and the three counts always sum to `num_blocks`. A leased block is in exactly one
sequence's block table. A fenced block has left its sequence, but a step already sent to a worker may still write to
it; it becomes free when that step is done.

Paging: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
section 4. The fence is ours: it turns "was the abort early enough?" into arithmetic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """The blocks of one worker's KV cache, by number. Knows nothing of sequences or tensors."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # First in, first out, so that a freed block's contents survive as long as possible.
        self._free: deque[int] = deque(range(num_blocks))
        self._leased: set[int] = set()
        self._fenced: deque[tuple[int, tuple[int, ...]]] = deque()  # (step_id, blocks), step_id ascending
        self.num_fenced = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    def lease(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks. The caller has looked at `num_free`."""
        assert num_blocks <= len(self._free), f"leasing {num_blocks} blocks, {len(self._free)} are free"
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        self._leased.update(blocks)
        return blocks

    def release(self, blocks: Iterable[int], fence_step_id: int | None = None) -> None:
        """Give leased blocks back: at once, or once step `fence_step_id` is settled."""
        blocks = tuple(blocks)
        assert self._leased.issuperset(blocks), f"releasing blocks that are not leased: {blocks}"
        assert len(set(blocks)) == len(blocks), f"releasing a block twice: {blocks}"
        self._leased.difference_update(blocks)
        if fence_step_id is None:
            self._free.extend(blocks)
            return
        assert not self._fenced or self._fenced[-1][0] <= fence_step_id, "fences are raised in step order"
        self._fenced.append((fence_step_id, blocks))
        self.num_fenced += len(blocks)

    def settle(self, step_id: int) -> None:
        """Step `step_id`, and every one before it, is done: their fences fall."""
        while self._fenced and self._fenced[0][0] <= step_id:
            _, blocks = self._fenced.popleft()
            self.num_fenced -= len(blocks)
            self._free.extend(blocks)

    def check(self) -> None:
        """Assert the conservation law. Linear in `num_blocks`: for tests and for sampling in production."""
        fenced = [block for _, blocks in self._fenced for block in blocks]
        assert len(fenced) == self.num_fenced
        everything = [*self._free, *self._leased, *fenced]
        assert sorted(everything) == list(range(self.num_blocks)), "a block was lost or duplicated"
