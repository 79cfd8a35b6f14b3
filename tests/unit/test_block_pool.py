"""Claims about block accounting."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from servekit.block_pool import BlockPool


def test_fenced_blocks_come_back_when_their_step_settles() -> None:
    pool = BlockPool(4)
    blocks = pool.lease(3)
    pool.release(blocks[:2], fence_step_id=7)
    assert (pool.num_free, pool.num_leased, pool.num_fenced) == (1, 1, 2)
    pool.settle(6)
    assert pool.num_fenced == 2
    pool.settle(7)
    assert (pool.num_free, pool.num_fenced) == (3, 0)


def test_releasing_twice_is_our_bug_and_says_so() -> None:
    pool = BlockPool(2)
    blocks = pool.lease(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="not leased"):
        pool.release(blocks)


def test_leasing_more_than_is_free_is_our_bug_and_says_so() -> None:
    with pytest.raises(AssertionError, match="2 are free"):
        BlockPool(2).lease(3)


class PoolMachine(RuleBasedStateMachine):
    """Any order of leases, releases and settlements conserves blocks and never hands one out twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.leases: list[list[int]] = []
        self.step_id = 0

    @rule(num_blocks=st.integers(0, 12))
    def lease(self, num_blocks: int) -> None:
        if num_blocks <= self.pool.num_free:
            blocks = self.pool.lease(num_blocks)
            assert not set(blocks) & {block for lease in self.leases for block in lease}
            self.leases.append(blocks)

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
        assert self.pool.num_free + self.pool.num_leased + self.pool.num_fenced == 12
        assert self.pool.num_leased == sum(map(len, self.leases))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
