"""Each policy that has a textbook rule, against that rule written down naively."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block_pool import BlockPool
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.ranked import LfuPolicy, LruPolicy, SlruPolicy
from kvstore.eviction.s3_fifo import S3FifoPolicy
from kvstore.prefix_hash import chain, pack_tokens, root_hash
from kvstore.radix_tree import RadixTree

ROOT = root_hash("model", b"a")
# One-block texts that share nothing, so that every text is a leaf and a textbook cache's item.
accesses = st.lists(st.integers(0, 7), max_size=60)


class Cache:
    """A tree used as a cache of one-block texts."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, 1, policy)

    def access(self, item: int) -> bool:
        tokens = pack_tokens([item])
        found = self.tree.match(ROOT, tokens, 1).block_ids
        if found:
            return True
        if self.pool.num_free == 0:
            assert self.tree.evict(1) == 1
        blocks = self.pool.allocate(1)
        assert self.tree.insert(ROOT, tokens, blocks, chain(ROOT, tokens, 1)).duplicates == []
        self.pool.release(blocks)
        return False


@dataclass
class Item:
    last_used: int
    num_hits: int = 0
    is_protected: bool = False


@dataclass
class Model:
    """Scans every item for each decision."""

    size: int
    rule: str
    share: float = 0.5
    now: int = 0
    items: dict[int, Item] = field(default_factory=dict)

    def access(self, key: int) -> bool:
        self.now += 1
        item = self.items.get(key)
        if item is None:
            if len(self.items) == self.size:
                del self.items[min(self.items, key=self.rank)]
            self.items[key] = Item(self.now)
            return False
        item.last_used = self.now
        item.num_hits += 1
        if self.rule == "slru" and not item.is_protected:
            item.is_protected = True
            self.demote()
        return True

    def demote(self) -> None:
        protected = [i for i in self.items.values() if i.is_protected]
        protected.sort(key=lambda i: i.last_used)
        num_over = len(protected) - int(self.share * len(self.items))
        for item in protected[: max(num_over, 0)]:
            item.is_protected = False

    def rank(self, key: int) -> tuple[int, int]:
        item = self.items[key]
        first = {"lru": 0, "lfu": item.num_hits, "slru": int(item.is_protected)}[self.rule]
        return (first, item.last_used)


@pytest.mark.parametrize("rule", ["lru", "lfu", "slru"])
@settings(deadline=None)
@given(keys=accesses, size=st.integers(1, 5))
def test_order_is_the_textbooks(rule: str, keys: list[int], size: int) -> None:
    rule_to_policy = {"lru": LruPolicy(), "lfu": LfuPolicy(), "slru": SlruPolicy(0.5)}
    cache = Cache(size, rule_to_policy[rule])
    model = Model(size, rule)
    assert [cache.access(key) for key in keys] == [model.access(key) for key in keys]
    cache.tree.check_invariants()


@settings(deadline=None)
@given(keys=accesses, size=st.integers(1, 5))
def test_lfu_with_memory_counts_every_access(keys: list[int], size: int) -> None:
    """With a memory of everything, counts are those of all accesses so far."""
    cache = Cache(size, LfuPolicy(num_remembered_blocks=100))
    resident: dict[int, int] = {}
    counts: dict[int, int] = {}
    for now, key in enumerate(keys):
        is_hit = key in resident
        assert cache.access(key) == is_hit
        if not is_hit and len(resident) == size:
            del resident[min(resident, key=lambda k: (counts[k], resident[k]))]
        resident[key] = now
        counts[key] = counts.get(key, 0) + 1


def test_s3_fifo_keeps_what_was_found_while_a_scan_passes() -> None:
    cache = Cache(10, S3FifoPolicy(num_uses_to_promote=2))
    for _ in range(3):
        assert cache.access(1) or True
        cache.access(2)
    for key in range(100, 200):
        cache.access(key)
    assert cache.access(1) and cache.access(2)
    lru = Cache(10, LruPolicy())
    for key in [1, 2, 1, 2, *range(100, 200)]:
        lru.access(key)
    assert not lru.access(1)


def test_s3_fifo_takes_back_what_it_forgot_too_early_into_the_main_queue() -> None:
    cache = Cache(10, S3FifoPolicy(num_uses_to_promote=1))
    for _ in range(2):
        for key in range(8):
            cache.access(key)
    for key in range(
        100, 106
    ):  # promotes the eight, and drops the first of these from the small queue
        cache.access(key)
    regrets_before = cache.tree.policy.regrets()
    assert regrets_before is not None and regrets_before.num_evicted_total > 0
    assert not cache.access(100)
    for key in range(200, 210):
        cache.access(key)
    assert cache.access(100)
    regrets = cache.tree.policy.regrets()
    assert regrets is not None
    assert regrets.num_regretted_total == regrets_before.num_regretted_total + 1
    assert sum(regrets.age_to_num_blocks.values()) == regrets.num_regretted_total


@pytest.mark.parametrize(
    ("make", "field_name"),
    [
        (lambda: SlruPolicy(1.5), "protected_share"),
        (lambda: LfuPolicy(-1), "num_remembered_blocks"),
        (lambda: S3FifoPolicy(-0.1), "small_share"),
    ],
)
def test_settings_out_of_range_are_named(make: object, field_name: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=field_name):
        make()
