"""Which blocks each sequence has: what it finds when it moves in, whether there is room, what it leaves behind.

A sequence's block table begins with full blocks that it may share, found in the prefix cache or with the leader it was
forked from, and goes on with blocks of its own. Only own blocks are ever written to. Where a fork would share a block
that is full only in part, it gets a copy instead: both will write to it.

Copy on write of forked sequences: Kwon et al., "PagedAttention", SOSP 2023, section 4.4. There the copy is made at the
first write; here it is made when the fork moves in, because its first step writes to that block.
"""

from __future__ import annotations

from dataclasses import dataclass

from servekit.admission import OutputForecast, future_peak
from servekit.prefix_cache import PrefixCache, chain_hash, salt_hash
from servekit.sequence import Sequence


@dataclass(slots=True)
class Beginning:
    """What is already computed of a sequence that waits."""

    blocks: list[int]  # full ones, to be shared
    num_tokens: int  # in `blocks`, and in `partial`
    partial: int | None = None  # a block of the leader's that is full only in part, to be copied


class KVMemory:
    """The blocks of one worker, and who has them. Writes what a sequence knows of its own blocks, and nothing else."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        max_preemptions: int,
        forecast: OutputForecast,
    ) -> None:
        self.block_size = block_size
        self.prefixes = PrefixCache(num_blocks)
        self.pool = self.prefixes.pool
        self._enable_prefix_caching = enable_prefix_caching
        self._max_preemptions = max_preemptions
        self._num_blocks_to_come = 0  # that those who moved in may still ask for, each going on to its bound
        self._forecast = forecast

    @property
    def num_fenced(self) -> int:
        return self.pool.num_fenced

    def is_pinned(self, sequence: Sequence) -> bool:
        """Whether it was preempted as often as anybody may be, and so gets all the blocks it can ever need at once."""
        return sequence.num_preemptions >= self._max_preemptions

    # -- moving in ----------------------------------------------------------------------------------------------------

    def find_beginning(self, sequence: Sequence, step_id: int) -> Beginning:
        """What step `step_id` need not compute for a sequence: it is in the prefix cache or with its leader.

        What its logits are wanted of is left to be computed: at least the last known token.
        """
        blocks: list[int] = []
        num_shareable = sequence.num_shareable
        if self._enable_prefix_caching:
            num_blocks = num_shareable // self.block_size
            self._hash_blocks(sequence, num_blocks)
            blocks = self.prefixes.find(sequence.block_hashes[:num_blocks])
        found = Beginning(blocks, len(blocks) * self.block_size)
        leader = sequence.leader
        # Copies are made at the start of a step, so what is copied must have been computed by an earlier one.
        if leader is None or leader.first_sampled_step_id is None or leader.first_sampled_step_id >= step_id:
            return found
        num_tokens = min(sequence.prompt_length, num_shareable)
        if num_tokens <= found.num_tokens:
            return found
        num_full, num_in_partial = divmod(num_tokens, self.block_size)
        table = leader.block_table
        return Beginning(table[:num_full], num_tokens, table[num_full] if num_in_partial else None)

    def has_room(self, sequence: Sequence, beginning: Beginning, running: list[Sequence]) -> bool:
        """Whether a sequence can move in now, and everybody who runs can still go on to the end.

        The blocks for every known token are leased at once, so that a prompt never runs short between two chunks.
        """
        pool, found = self.pool, beginning.blocks
        num_found_cached = sum(map(pool.is_cached, found))
        missing = self._num_blocks_at_once(sequence) - len(found)
        if missing > pool.num_available - num_found_cached:
            return False
        num_blocks_after = pool.num_leased + num_found_cached + self._most_blocks(sequence) - len(found)
        if not running or num_blocks_after + self._num_blocks_to_come <= pool.num_blocks:
            return True  # it fits alone, which the manager made sure of when it came; or everybody fits, whatever comes
        demands = [self._demand(other, other.num_found_blocks) for other in running]
        demands.append(self._demand(sequence, len(found)))
        # A shared block is counted with the sequence that computed it, or here, once that one is gone.
        counted = sum(len(other.block_table) - other.num_found_blocks for other in running)
        others = max(0, pool.num_leased + num_found_cached - counted)
        return others + future_peak(demands, self.block_size) <= pool.num_blocks

    def _most_blocks(self, sequence: Sequence) -> int:
        return -(-(sequence.max_length - 1) // self.block_size)

    def _num_blocks_at_once(self, sequence: Sequence) -> int:
        num_positions = sequence.max_length - 1 if self.is_pinned(sequence) else sequence.num_tokens
        return -(-num_positions // self.block_size)

    def _demand(self, sequence: Sequence, num_found_blocks: int) -> tuple[int, int]:
        """(positions that it has blocks for by itself, positions that it will ask for)."""
        num_found = num_found_blocks * self.block_size
        if self.is_pinned(sequence):
            return sequence.max_length - 1 - num_found, 0
        return sequence.num_tokens + sequence.num_pending - num_found, self._forecast.tokens_to_come(sequence)

    def move_in(self, sequence: Sequence, beginning: Beginning) -> None:
        """What is there of it already, and blocks for the rest; the caller has seen that there is room."""
        for block in beginning.blocks:
            self.pool.share(block)
        num_found = len(beginning.blocks)
        sequence.block_table = beginning.blocks
        sequence.num_found_blocks = sequence.num_published = num_found
        sequence.num_computed = beginning.num_tokens
        self._lease(sequence, self._num_blocks_at_once(sequence) - num_found)
        self._num_blocks_to_come += self._most_blocks(sequence) - len(sequence.block_table)

    # -- growing, publishing, moving out ------------------------------------------------------------------------------

    def grow(self, sequence: Sequence) -> bool:
        """One more block, if there is one."""
        if not self.pool.num_available:
            return False
        self._lease(sequence, 1)
        self._num_blocks_to_come -= 1
        return True

    def _lease(self, sequence: Sequence, num_blocks: int) -> None:
        sequence.block_table.extend(self.pool.lease(num_blocks))
        sequence.capacity = len(sequence.block_table) * self.block_size

    def publish(self, sequence: Sequence) -> None:
        """Let others find the blocks whose tokens are all committed and computed by a dispatched step."""
        num_full = min(sequence.num_computed, len(sequence.token_ids)) // self.block_size
        if num_full <= sequence.num_published or not self._enable_prefix_caching:
            return
        self._hash_blocks(sequence, num_full)
        for index in range(sequence.num_published, num_full):
            self.prefixes.publish(sequence.block_table[index], sequence.block_hashes[index])
        sequence.num_published = num_full

    def _hash_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        """Continue a sequence's chain of hashes to its first `num_blocks` blocks."""
        block_size, hashes = self.block_size, sequence.block_hashes
        if not hashes and sequence.leader is not None:
            hashes.extend(sequence.leader.block_hashes[: sequence.prompt_length // block_size])
        for index in range(len(hashes), num_blocks):
            previous = hashes[-1] if hashes else salt_hash(sequence.tenant)
            hashes.append(chain_hash(previous, sequence.token_ids[index * block_size : (index + 1) * block_size]))

    def move_out(self, sequence: Sequence, fence_step_id: int | None) -> None:
        """Give all its blocks up, at once or when step `fence_step_id` is settled."""
        self._num_blocks_to_come -= self._most_blocks(sequence) - len(sequence.block_table)
        # Tail first: what a prefix of many continuations holds is to be reused last.
        self.pool.release(reversed(sequence.block_table), fence_step_id)

    def settle(self, step_id: int) -> None:
        """Step `step_id` is done: what was fenced for it comes back."""
        self.pool.settle(step_id)

    def shared_blocks(self, running: list[Sequence]) -> set[int]:
        """Those that are in several tables. All of their holders but one found them, so nothing else is looked at."""
        found = set[int]().union(*(sequence.block_table[: sequence.num_found_blocks] for sequence in running))
        return {block for block in found if self.pool.num_holders(block) > 1}

    def check(self, running: list[Sequence]) -> None:
        """Assert that tables and pool agree on who has what. Linear in all there is: for tests and simulations."""
        self.prefixes.check()
        held = [0] * self.pool.num_blocks
        for sequence in running:
            for block in sequence.block_table:
                held[block] += 1
            assert sequence.capacity == len(sequence.block_table) * self.block_size >= sequence.num_computed
            assert sequence.num_published * self.block_size <= min(sequence.num_computed, sequence.num_tokens)
        to_come = sum(self._most_blocks(sequence) - len(sequence.block_table) for sequence in running)
        assert to_come == self._num_blocks_to_come
        assert held == self.pool.holders(), "block tables and pool disagree on who holds what"
