"""Floors and ceilings: what one root does never takes another below its floor."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block_pool import BlockPool
from kvstore.eviction.hit_density import HitDensityPolicy
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.quotas import Quota, Quotas
from kvstore.eviction.ranked import LruPolicy, SlruPolicy
from kvstore.eviction.s3_fifo import S3FifoPolicy
from kvstore.prefix_hash import chain, pack_tokens, root_hash
from kvstore.radix_tree import RadixTree

A, B, C = (root_hash("model", name) for name in (b"a", b"b", b"c"))
POLICIES = [LruPolicy, SlruPolicy, S3FifoPolicy, HitDensityPolicy]


class Shared:
    """A pool that several roots fill with texts of their own, nothing in use in between."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy, quotas: Quotas) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, 1, policy, quotas)

    def serve(self, root: bytes, tokens: list[int]) -> bool:
        """False: there was no room that this root could get."""
        packed = pack_tokens(tokens)
        found = list(self.tree.match(root, packed, len(tokens)).block_ids)
        self.pool.acquire(found)
        num_new = len(tokens) - len(found)
        wanted = max(num_new - self.pool.num_free, 0)
        reachable = self.pool.num_idle - self.tree.num_held_back
        num_freed = self.tree.evict(wanted)
        assert num_freed >= min(wanted, reachable)
        blocks = found
        is_served = num_new <= self.pool.num_free
        if is_served:
            blocks = found + self.pool.allocate(num_new)
            assert self.tree.insert(root, packed, blocks, chain(root, packed, 1)).duplicates == []
        self.pool.release(blocks)
        self.tree.check_invariants()
        return is_served

    def num_blocks(self, root: bytes) -> int:
        return self.tree.root_to_num_blocks.get(root, 0)


@pytest.mark.parametrize("new_policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(
    floor=st.integers(0, 6),
    texts=st.lists(
        st.tuples(st.sampled_from([A, B, C]), st.lists(st.integers(0, 2), max_size=6)), max_size=25
    ),
)
def test_nobody_is_taken_below_the_floor(
    new_policy: type[EvictionPolicy], floor: int, texts: list[tuple[bytes, list[int]]]
) -> None:
    shared = Shared(16, new_policy(), Quotas({A: Quota(floor), B: Quota(floor)}))
    for root, tokens in texts:
        before = {other: shared.num_blocks(other) for other in (A, B)}
        shared.serve(root, tokens)
        for other, num_blocks in before.items():
            if other != root:
                assert shared.num_blocks(other) >= min(num_blocks, floor)


@pytest.mark.parametrize("new_policy", POLICIES)
def test_a_flood_leaves_the_floor_and_takes_the_rest(new_policy: type[EvictionPolicy]) -> None:
    shared = Shared(16, new_policy(), Quotas({A: Quota(floor=4)}))
    assert shared.serve(A, list(range(10)))
    for start in range(100, 400, 6):
        assert shared.serve(B, list(range(start, start + 6)))
    assert shared.num_blocks(A) == 4
    assert shared.tree.match(A, pack_tokens(range(10)), 10).block_ids != ()
    assert shared.num_blocks(B) == 12


@pytest.mark.parametrize("new_policy", POLICIES)
def test_who_is_above_the_ceiling_loses_first(new_policy: type[EvictionPolicy]) -> None:
    shared = Shared(16, new_policy(), Quotas({B: Quota(ceiling=5)}))
    assert shared.serve(A, list(range(6)))
    assert shared.serve(B, list(range(10)))  # room was free: a ceiling is no limit on use
    assert shared.num_blocks(B) == 10
    assert shared.serve(C, list(range(5)))
    assert shared.num_blocks(B) == 5 and shared.num_blocks(A) == 6


def test_blocks_in_use_above_a_ceiling_do_not_stop_an_eviction() -> None:
    shared = Shared(16, LruPolicy(), Quotas({B: Quota(ceiling=0)}))
    packed = pack_tokens(range(8))
    blocks = shared.pool.allocate(8)
    shared.tree.insert(B, packed, blocks, chain(B, packed, 1))
    assert shared.serve(A, list(range(8)))
    assert shared.serve(A, list(range(50, 58)))
    assert shared.num_blocks(B) == 8


def test_impossible_quotas_are_named() -> None:
    with pytest.raises(ValueError, match="floor must be at least 0, not -1"):
        Quota(floor=-1)
    with pytest.raises(ValueError, match="ceiling 2 is below floor 3"):
        Quota(floor=3, ceiling=2)
