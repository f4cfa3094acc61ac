"""The pool against a plain model: one dictionary of reference counts and one set of cached ids."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.block_pool import BlockPool, OutOfBlocks
from kvstore.block_table import BlockTable

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.counts: dict[int, int] = {}
        self.cached: set[int] = set()

    def free(self) -> int:
        return NUM_BLOCKS - len(set(self.counts) | self.cached)

    @rule(n=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, n: int) -> None:
        if n > self.free():
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(n)
            return
        taken = self.pool.allocate(n)
        assert len(set(taken)) == n and not set(taken) & (set(self.counts) | self.cached)
        self.counts.update(dict.fromkeys(taken, 1))

    @precondition(lambda self: self.counts or self.cached)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(set(self.counts) | self.cached)))
        self.pool.acquire([block])
        self.counts[block] = self.counts.get(block, 0) + 1

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts)))
        self.pool.release([block])
        self.counts[block] -= 1
        if self.counts[block] == 0:
            del self.counts[block]

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts)))
        self.pool.cache(block)
        self.cached.add(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.uncache(block)
        self.cached.remove(block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_invariants()
        assert self.pool.num_used == len(self.counts)
        assert self.pool.num_idle == len(self.cached - set(self.counts))
        assert self.pool.num_free == self.free()
        assert all(self.pool.ref_count(b) == self.counts.get(b, 0) for b in range(NUM_BLOCKS))


TestPool = PoolMachine.TestCase


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, not 0"):
        BlockPool(0)


def test_releasing_too_often_is_caught() -> None:
    pool = BlockPool(2)
    taken = pool.allocate(1)
    pool.release(taken)
    with pytest.raises(AssertionError):
        pool.release(taken)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33])
def test_a_fork_shares_full_blocks_and_copies_at_most_one(num_tokens: int) -> None:
    pool = BlockPool(8)
    table = BlockTable(16)
    table.append(pool.allocate(table.num_blocks_to_hold(num_tokens)))
    fork = table.fork(num_tokens, pool)
    num_full = num_tokens // 16
    assert fork.table.block_ids[:num_full] == table.block_ids[:num_full]
    assert all(pool.ref_count(b) == 2 for b in table.block_ids[:num_full])
    if num_tokens % 16:
        assert fork.copy is not None
        assert fork.copy.source == table.block_ids[num_full]
        assert fork.copy.target == fork.table.block_ids[num_full] != fork.copy.source
    else:
        assert fork.copy is None
    fork.table.release(pool)
    table.release(pool)
    assert pool.num_free == 8


def test_slots_follow_the_table() -> None:
    table = BlockTable(16, [7, 2, 19])
    assert [table.slot(p) for p in (0, 15, 16, 34)] == [112, 127, 32, 306]
    assert table.num_blocks_to_hold(48) == 0
    assert table.num_blocks_to_hold(49) == 1
