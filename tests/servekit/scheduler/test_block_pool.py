"""Claims about block accounting."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from servekit.scheduler.block_pool import BlockPool


def test_fenced_blocks_are_available_again_when_their_step_settles() -> None:
    pool = BlockPool(4)
    blocks = pool.lease(3)
    pool.release(blocks[:2], fence_step_id=7)
    assert (pool.num_free, pool.num_leased, pool.num_fenced) == (1, 1, 2)
    pool.settle(6)
    assert pool.num_fenced == 2
    pool.settle(7)
    assert (pool.num_free, pool.num_fenced) == (3, 0)


def test_each_block_is_leased_free_cached_or_fenced() -> None:
    pool = BlockPool(4)
    leased, cached, fenced = pool.lease(3)
    pool.share([leased])
    pool.keep(cached)
    pool.release([cached])
    pool.release([fenced], fence_step_id=1)
    assert list(pool.cached()) == [cached] and list(pool.fenced()) == [fenced]
    assert set(pool.free()) == {0, 1, 2, 3} - {leased, cached, fenced}
    assert pool.num_holders(leased) == 2 and sum(pool.holders()) == 2


def test_releasing_a_block_twice_fails_an_assertion() -> None:
    pool = BlockPool(2)
    blocks = pool.lease(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="not leased"):
        pool.release(blocks)


def test_leasing_more_blocks_than_available_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="2 are available"):
        BlockPool(2).lease(3)


def test_kept_blocks_are_reused_only_when_none_is_free_and_oldest_first() -> None:
    reused: list[int] = []
    pool = BlockPool(4, on_reuse=reused.append)
    blocks = pool.lease(3)
    for block in blocks:
        pool.keep(block)
    pool.release([blocks[1], blocks[0], blocks[2]])
    assert (pool.num_free, pool.num_cached, pool.num_available) == (1, 3, 4)
    pool.share(blocks[:1])
    assert pool.lease(3) == [3, blocks[1], blocks[2]]
    assert reused == [blocks[1], blocks[2]]


def test_a_shared_block_stays_leased_until_its_last_holder_releases_it() -> None:
    pool = BlockPool(2)
    (block,) = pool.lease(1)
    pool.share([block])
    pool.release([block])
    assert (pool.num_leased, pool.num_free) == (1, 1)
    pool.release([block])
    assert (pool.num_leased, pool.num_free) == (0, 2)


class PoolMachine(RuleBasedStateMachine):
    """Any order of leases, shares, releases and settlements conserves blocks and hands none out while it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: set[int] = set()
        self.pool = BlockPool(12, on_reuse=self.kept.remove)
        self.leases: list[list[int]] = []
        self.step_id = 0

    @rule(num_blocks=st.integers(0, 12))
    def lease(self, num_blocks: int) -> None:
        if num_blocks <= self.pool.num_available:
            blocks = self.pool.lease(num_blocks)
            assert not set(blocks) & {block for lease in self.leases for block in lease}
            self.leases.append(blocks)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        if self.pool.num_shareable([block]):
            self.pool.share([block])
            self.leases.append([block])

    @precondition(lambda self: any(self.leases))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({block for lease in self.leases for block in lease})))
        self.pool.keep(block)
        self.kept.add(block)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), fenced=st.booleans())
    def release(self, data: st.DataObject, fenced: bool) -> None:
        blocks = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.pool.release(blocks, self.step_id if fenced else None)

    @rule()
    def next_step(self) -> None:
        self.pool.settle(self.step_id - 1)
        self.step_id += 1

    @invariant()
    def conserves(self) -> None:
        self.pool.check()
        pool = self.pool
        assert pool.num_free + pool.num_cached + pool.num_leased + pool.num_fenced == 12
        held = Counter(block for lease in self.leases for block in lease)
        assert pool.holders() == [held[block] for block in range(12)]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
