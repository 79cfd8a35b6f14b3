"""Decide which KV blocks each sequence has: which it finds cached, whether it can be admitted, what it releases.

A sequence's block table begins with full blocks that it may share, found in the prefix cache or with the leader it was
forked from, and goes on with blocks of its own. Only its own blocks are ever written to. Where a fork would share a
block that is full only in part, it gets a copy instead, because both will write to it.

Copy on write of forked sequences: Kwon et al., "PagedAttention", SOSP 2023, section 4.4. There the copy is made at the
first write; here it is made when the fork is admitted, because its first step writes to that block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from servekit.scheduler.future_peak import Demand, FuturePeak, future_peak
from servekit.scheduler.kv_connector import KVConnector
from servekit.scheduler.output_length import OutputLengthPredictor
from servekit.scheduler.prefix_cache import HashBlock, PrefixCache, chain_hash, continue_chain
from servekit.scheduler.sequence import Sequence


@dataclass(slots=True)
class PrefixMatch:
    """What is already computed of a waiting sequence."""

    blocks: list[int]  # full ones, to be shared
    num_tokens: int  # tokens in `blocks`, in `partial`, and in the loads
    partial: int | None = None  # a block of the leader's that is full only in part, to be copied
    num_loads: int = 0  # blocks after `blocks` that the KV connector loads


class KVCacheManager:
    """The blocks of one worker, and which sequences have them. While serving, the only writer of `Sequence.kv`."""

    # If more than one in this many entries of the future peak has changed, all are sorted again: writing one entry
    # takes about as long as sorting this many.
    REBUILD_RATIO = 8

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        max_preemptions: int,
        output_lengths: OutputLengthPredictor,
        hash_block: HashBlock = chain_hash,
        is_pipeline: bool = False,
        connector: KVConnector | None = None,
    ) -> None:
        self.block_size = block_size
        self.connector = connector or KVConnector(is_on=False)
        self.prefixes = PrefixCache(num_blocks, self.connector)
        self.pool = self.prefixes.pool
        self._enable_prefix_caching = enable_prefix_caching
        self._max_preemptions = max_preemptions
        self._is_pipeline = is_pipeline
        # Blocks that running sequences may still ask for, if each one goes on to its maximum length.
        self._num_blocks_to_come = 0
        self._num_own_blocks = 0  # blocks in tables, without those found in the cache
        # The demands of running sequences, each by its `kv.peak_entry`. They are brought up to date when needed.
        self._future_peak = FuturePeak(block_size)
        # Running sequences that may have no entry, or one that differs from their demand: now, and after each step.
        self._changed: dict[Sequence, None] = {}
        self._unsteady: dict[Sequence, None] = {}
        self._has_advanced = False  # since the unsteady ones were brought up to date
        self._output_lengths = output_lengths
        self._hash_block = hash_block

    @property
    def num_fenced(self) -> int:
        return self.pool.num_fenced

    def is_pinned(self, sequence: Sequence) -> bool:
        """Whether it ran short of blocks as often as allowed, and so gets all the blocks it can ever need at once.

        Preemptions for other tenants' shares do not count: otherwise a few of them would give a tenant that holds more
        than its share sequences with more blocks than they use.
        """
        return sequence.num_preemptions - sequence.num_share_preemptions >= self._max_preemptions

    # -- admitting ----------------------------------------------------------------------------------------------------

    def find_prefix_match(self, sequence: Sequence, step_id: int) -> PrefixMatch:
        """The positions that step `step_id` need not compute: the prefix cache or the leader has their KV.

        Positions whose logits are needed are never in a match: at least the last known token.
        """
        blocks: list[int] = []
        num_loads, num_shareable = 0, sequence.num_shareable
        if self._enable_prefix_caching:
            num_blocks = num_shareable // self.block_size
            self._hash_blocks(sequence, num_blocks)
            if num_blocks:
                blocks = self.prefixes.find(sequence.kv.hashes[:num_blocks])
                if self.connector.loads:
                    num_loads = self.prefixes.num_loadable(sequence.kv.hashes[len(blocks) : num_blocks])
        found = PrefixMatch(blocks, (len(blocks) + num_loads) * self.block_size, num_loads=num_loads)
        leader = sequence.leader
        # Copies are made at the start of a step, so what is copied must have been computed by an earlier one.
        if leader is None or leader.first_sampled_step_id is None or leader.first_sampled_step_id >= step_id:
            return found
        num_tokens = min(sequence.prompt_length, num_shareable)
        if num_tokens <= found.num_tokens:
            return found
        num_full, num_in_partial = divmod(num_tokens, self.block_size)
        table = leader.kv.table
        return PrefixMatch(table[:num_full], num_tokens, table[num_full] if num_in_partial else None)

    def decodes_scheduled(self) -> None:
        """Note that all running sequences have grown by a token, but for those that `not_grown` was called for."""
        self._future_peak.advance()
        self._has_advanced = True

    def not_grown(self, sequence: Sequence) -> None:
        """Note that a running sequence did not grow by a token in a step, or was set back."""
        self._changed[sequence] = None

    def has_room(self, sequence: Sequence, match: PrefixMatch, running: list[Sequence]) -> bool:
        """Whether a sequence can be admitted now, and all running ones can still go on to their end.

        The blocks for every known token are reserved at once, so that a prompt never runs short between two chunks.
        `decodes_scheduled` comes before it.
        """
        pool, found = self.pool, match.blocks
        num_found_cached = pool.count_cached(found) if found else 0
        missing = self._num_blocks_at_once(sequence) - len(found)
        if missing > pool.num_available - num_found_cached:
            return False
        num_blocks_after = pool.num_leased + num_found_cached + self._max_blocks(sequence) - len(found)
        if not running or num_blocks_after + self._num_blocks_to_come <= pool.num_blocks:
            return True  # it fits alone, which was checked when it was added; or all fit, at any lengths
        if self._has_advanced:
            self._has_advanced = False
            self._changed.update(self._unsteady)
        if self._changed:
            self._update_peak(running)
        return self._future_peak.fits(self._demand(sequence, len(found)), self._num_blocks_to_share(num_found_cached))

    def fits(self, sequence: Sequence, match: PrefixMatch, staying: list[Sequence]) -> bool:
        """Whether some of the running sequences and a waiting one can go on to their end.

        By the lengths that are predicted for them, and once all fenced blocks are available. Takes time linear in their
        number; `has_room` asks the same about all running sequences, at less cost.
        """
        demands = [self._demand(other, other.kv.num_found) for other in staying]
        demands.append(self._demand(sequence, len(match.blocks)))
        num_found_cached = self.pool.count_cached(match.blocks)
        return future_peak(demands, self.block_size) <= self._num_blocks_to_share(num_found_cached)

    def _num_blocks_to_share(self, num_found_cached: int) -> int:
        """How many blocks running sequences and a waiting one may have of their own.

        The waiting one finds `num_found_cached` blocks that are in no block table.
        """
        # A shared block is counted with the sequence that computed it, or here, if that one has ended.
        return self.pool.num_blocks - max(0, self.pool.num_leased + num_found_cached - self._num_own_blocks)

    def _update_peak(self, running: list[Sequence]) -> None:
        """Bring the entries of running sequences up to date."""
        peak, changed, self._changed = self._future_peak, self._changed, {}
        rebuild = self.REBUILD_RATIO * len(changed) > len(running)
        for sequence in changed:
            kv = sequence.kv
            entry, old_entry = peak.entry(self._demand(sequence, kv.num_found)), kv.peak_entry
            kv.peak_entry = entry
            if not rebuild:
                if old_entry is not None:
                    peak.remove(old_entry)
                peak.add(entry)
            if self._is_steady(sequence):
                self._unsteady.pop(sequence, None)
            else:
                self._unsteady[sequence] = None
        if rebuild:
            peak.rebuild(other.kv.peak_entry for other in running if other.kv.peak_entry is not None)

    def _is_steady(self, sequence: Sequence) -> bool:
        """Whether the demand of a sequence changes by one token in each step, unless `not_grown` is called for it.

        What has blocks for drafts, and what is predicted, changes by other amounts. In a pipeline, a sequence is not in
        each step.
        """
        return (
            sequence.has_length_bound
            and sequence.first_sampled_step_id is not None
            and not (sequence.max_drafts or self._is_pipeline or self.is_pinned(sequence))
        )

    def num_blocks_at_end(self, sequence: Sequence, num_found_blocks: int) -> int:
        """How many blocks a sequence will have, besides the found ones, by the length that is predicted for it."""
        return -(-sum(self._demand(sequence, num_found_blocks)) // self.block_size)

    def _max_blocks(self, sequence: Sequence) -> int:
        return -(-(sequence.max_length - 1) // self.block_size)

    def _num_blocks_at_once(self, sequence: Sequence) -> int:
        num_positions = sequence.max_length - 1 if self.is_pinned(sequence) else sequence.num_tokens
        return -(-num_positions // self.block_size)

    def _demand(self, sequence: Sequence, num_found_blocks: int) -> Demand:
        """(positions that it has blocks of its own for, positions that it will ask for)."""
        num_found = num_found_blocks * self.block_size
        if self.is_pinned(sequence):
            return sequence.max_length - 1 - num_found, 0
        num_covered = sequence.num_tokens + sequence.num_pending
        if sequence.max_drafts:  # rejected drafts leave it with blocks for positions that come later
            num_covered = max(num_covered, sequence.kv.capacity - self.block_size + 1)
        return num_covered - num_found, self._output_lengths.tokens_to_come(sequence)

    def allocate(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Share the blocks of `match`, and reserve blocks for the rest; the caller has checked that there is room.

        Blocks are leased when a step computes them. Leasing a block may evict a cached one. So the number of blocks
        that one plan evicts is bounded by its scheduled tokens, and not by the length of a prompt.
        """
        kv, num_found = sequence.kv, len(match.blocks)
        if num_found:
            self.pool.share(match.blocks)
            if self._is_sent(sequence):  # they may have been sent so long ago that they cannot be loaded any more
                for block, key in zip(match.blocks, kv.hashes, strict=False):
                    self.connector.send(block, key)
        kv.table = match.blocks
        kv.capacity = num_found * self.block_size
        kv.num_found = kv.num_published = num_found
        kv.num_reserved = self._num_blocks_at_once(sequence) - num_found
        self.pool.reserve(kv.num_reserved)
        self._num_blocks_to_come += self._max_blocks(sequence) - num_found
        self._changed[sequence] = None
        if match.partial is not None:  # it is copied before anything is computed
            self._lease(sequence, 1, is_reserved=True)
        if match.num_loads:  # they are loaded before that, and so they are published like computed ones
            loaded = self._lease(sequence, match.num_loads, is_reserved=True)
            keys = kv.hashes[num_found : num_found + match.num_loads]
            self.connector.load(keys, loaded)
            for block, key in zip(loaded, keys, strict=True):
                self.prefixes.publish(block, key)
            kv.num_published += match.num_loads

    def cover(self, sequence: Sequence, num_positions: int) -> list[int]:
        """Lease the blocks for these positions of a prompt, from the first one on, that it does not have yet."""
        self._changed[sequence] = None
        missing = -(-num_positions // self.block_size) - len(sequence.kv.table)
        return self._lease(sequence, missing, is_reserved=True) if missing > 0 else []

    # -- growing, publishing, releasing -------------------------------------------------------------------------------

    def grow(self, sequence: Sequence) -> bool:
        """Lease one more block for a sequence. False if none is available."""
        if sequence.kv.num_reserved:
            self._lease(sequence, 1, is_reserved=True)
        elif self.pool.num_available:
            self._lease(sequence, 1)
        else:
            return False
        return True

    def extend(self, sequence: Sequence, num_positions: int) -> int:
        """Lease the available blocks for drafts up to so many positions; return up to which position there are blocks.

        Never more than `num_positions`.
        """
        while sequence.kv.capacity < num_positions and self.grow(sequence):
            pass
        return min(num_positions, sequence.kv.capacity)

    def _lease(self, sequence: Sequence, num_blocks: int, is_reserved: bool = False) -> list[int]:
        kv, blocks = sequence.kv, self.pool.lease(num_blocks, is_reserved)
        if is_reserved:
            kv.num_reserved -= num_blocks
        kv.table.extend(blocks)
        kv.capacity += num_blocks * self.block_size
        self._num_blocks_to_come -= num_blocks
        self._num_own_blocks += num_blocks
        return blocks

    def publish(self, sequence: Sequence) -> None:
        """Make the blocks findable whose tokens are all committed and computed by a dispatched step."""
        kv, num_full = sequence.kv, min(sequence.num_computed, len(sequence.token_ids)) // self.block_size
        if num_full <= kv.num_published or not self._enable_prefix_caching:
            return
        self._hash_blocks(sequence, num_full)
        table, hashes, is_sent = kv.table, kv.hashes, self._is_sent(sequence)
        for index in range(kv.num_published, num_full):
            self.prefixes.publish(table[index], hashes[index], is_sent)
        kv.num_published = num_full

    def _is_sent(self, sequence: Sequence) -> bool:
        """Whether others are to load a sequence's blocks."""
        connector = self.connector
        return connector.sends and connector.sends_sequence(sequence.num_tokens // self.block_size)

    def _hash_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        """Continue a sequence's chain of hashes to its first `num_blocks` blocks."""
        block_size, hashes = self.block_size, sequence.kv.hashes
        if not hashes and sequence.leader is not None:
            hashes.extend(sequence.leader.kv.hashes[: sequence.prompt_length // block_size])
        if len(hashes) < num_blocks:
            continue_chain(hashes, sequence.salt, sequence.token_ids, num_blocks, block_size, self._hash_block)

    def release(self, sequence: Sequence, fence_step_id: int | None) -> None:
        """Release all blocks of a sequence, at once or when step `fence_step_id` is settled."""
        kv = sequence.kv
        self._num_blocks_to_come -= self._max_blocks(sequence) - len(kv.table)
        self._num_own_blocks -= len(kv.table) - kv.num_found
        self._changed.pop(sequence, None)
        self._unsteady.pop(sequence, None)
        if kv.peak_entry is not None:
            self._future_peak.remove(kv.peak_entry)
        if kv.num_reserved:
            self.pool.unreserve(kv.num_reserved)
        # Tail first: the blocks at the front are a prefix of more continuations, and are to be reused last.
        self.pool.release(kv.table[::-1], fence_step_id)
        kv.clear()

    @staticmethod
    def forget(sequence: Sequence) -> None:
        """Clear the block table of a sequence whose worker, and so whose pool, is gone."""
        sequence.kv.clear()

    def settle(self, step_id: int) -> None:
        """Make the blocks available that were fenced for step `step_id`, which is done."""
        self.pool.settle(step_id)

    def settle_transfers(
        self,
        step_id: int,
        failed: Collection[tuple[bytes, int]],
        dropped: Iterable[bytes],
        copies: Iterable[tuple[int, int]],
        running: list[Sequence],
    ) -> list[Sequence]:
        """Forget the keys of loads that failed in a step, and of blocks that the worker dropped.

        `copies` are those of the steps in flight. Returns the running sequences for which something wrong may be
        computed. They hold a block whose load failed, or a copy of it; or they found a block that was published since
        the step was planned. That one may have been computed from a block whose load failed, by a sequence that has
        it no more: it was forgotten in an earlier step, so others have it in another block.
        """
        self.connector.forget(dropped)
        published = self.prefixes.settle(step_id, bool(failed))
        if not failed:
            return []
        self.connector.forget(key for key, _ in failed)
        self.connector.num_failed_loads += len(failed)
        wrong = {block for _, block in failed}
        wrong.update([target for source, target in copies if source in wrong])
        return [
            sequence
            for sequence in running
            if not wrong.isdisjoint(sequence.kv.table)
            or not published.isdisjoint(sequence.kv.table[: sequence.kv.num_found])
        ]

    def shared_blocks(self, running: list[Sequence]) -> set[int]:
        """The blocks that are in several tables. All holders of such a block but one have it as a found block."""
        found = set[int]().union(*(sequence.kv.table[: sequence.kv.num_found] for sequence in running))
        return {block for block in found if self.pool.num_holders(block) > 1}

    def check(self, running: list[Sequence]) -> None:
        """Assert that tables and pool agree. Linear in all there is: for tests and simulations."""
        self.prefixes.check()
        block_size, held = self.block_size, [0] * self.pool.num_blocks
        num_reserved = num_to_come = num_own = 0
        entries = []
        for sequence in running:
            kv, num_computed, num_tokens = sequence.kv, sequence.num_computed, sequence.num_tokens
            num_blocks = len(kv.table)
            for block in kv.table:
                held[block] += 1
            assert kv.capacity == num_blocks * block_size >= num_computed
            if sequence.first_sampled_step_id is None:
                assert (num_blocks + kv.num_reserved) * block_size >= num_tokens, "a prompt may run short of blocks"
            # A rewound sequence has nothing pending, and computes one position for the second time.
            assert kv.num_published * block_size <= min(num_computed + (not sequence.num_pending), num_tokens)
            num_full = min(num_computed, num_tokens) // block_size
            assert kv.num_published >= num_full or not self._enable_prefix_caching, "a full block is not findable"
            num_reserved += kv.num_reserved
            num_to_come += self._max_blocks(sequence) - num_blocks
            num_own += num_blocks - kv.num_found
            if kv.peak_entry is not None:
                entries.append(kv.peak_entry)
            if sequence not in self._changed and sequence not in self._unsteady:
                demand = self._demand(sequence, kv.num_found)
                assert self._future_peak.is_entry_of(demand, kv.peak_entry), f"{sequence} is counted wrong"
        assert self.pool.num_reserved == num_reserved
        assert (self._num_blocks_to_come, self._num_own_blocks) == (num_to_come, num_own)
        self._future_peak.check(entries)
        assert held == self.pool.holders(), "block tables and pool disagree on which sequences hold which blocks"
