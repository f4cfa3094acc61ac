"""The estimate of when blocks are used again, against counting with everything known."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block_pool import BlockPool
from kvstore.eviction.ghosts import GhostList
from kvstore.eviction.hit_density import HitDensityPolicy
from kvstore.eviction.reuse_ages import ReuseAges
from kvstore.prefix_hash import chain, pack_tokens, root_hash
from kvstore.radix_tree import RadixTree

ROOT = root_hash("model", b"a")


def learn(ages: list[int], num_never: int, *, num_lost: int = 0) -> ReuseAges:
    """One block for each age at which it is used again, `num_never` that are not, some lost from sight."""
    reuse = ReuseAges(prior_blocks=1e-9)
    spans = [(age, reuse.start(1, 1)) for age in sorted(ages)]
    if num_never:
        reuse.start(1, num_never)
    lost = reuse.start(1, num_lost)
    reuse.advance(17)
    reuse.leave(lost, num_lost)
    for age, span in spans:
        while reuse.now < age:
            reuse.advance(min(16, age - reuse.now))
        reuse.hit(span, 1)
    while reuse.now < 4000:
        reuse.advance(16)
    return reuse


def test_a_class_is_worth_its_best_rate_of_hits() -> None:
    """All are used again at 1000: worth little before, more when it is near, nothing afterwards."""
    reuse = learn([1000] * 50, num_never=50)
    worths = [reuse.worth(1, reuse.now - age) for age in (0, 300, 700, 900, 2000)]
    assert worths[0] < worths[1] < worths[2]
    assert worths[4] == 0.0
    # Half of them within about a thousand blocks of time; the bucket of 1000 is 724 … 1024.
    assert 0.5 / 1024 <= worths[0] <= 0.5 / 724


def test_never_used_again_is_worth_nothing() -> None:
    assert learn([], num_never=10).worth(1, 0) == 0.0


def test_blocks_lost_from_sight_do_not_change_the_rates() -> None:
    """Four times as many that were lost early: the estimate is of those that were watched on."""
    plain = learn([1000] * 30, num_never=30)
    censored = learn([1000] * 30, num_never=30, num_lost=240)
    assert censored.worth(1, censored.now) == pytest.approx(plain.worth(1, plain.now), rel=0.05)


@settings(deadline=None)
@given(
    capacity=st.integers(0, 6),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60),
)
def test_ghosts_are_a_bounded_queue(capacity: int, events: list[tuple[bool, int]]) -> None:
    dropped: list[int] = []
    ghosts: GhostList[int] = GhostList(dropped.append)
    model: OrderedDict[int, int] = OrderedDict()
    model_dropped: list[int] = []
    num_regretted = 0
    for is_eviction, key in events:
        prefix_hash = bytes([key])
        assert (prefix_hash in ghosts) == (key in model)
        if not is_eviction:
            assert ghosts.take(prefix_hash) == model.get(key)
            num_regretted += model.pop(key, None) is not None
        elif key not in model:
            ghosts.add([prefix_hash], key)
            model[key] = key
            ghosts.trim(capacity)
            while len(model) > capacity:
                model_dropped.append(model.popitem(last=False)[0])
    assert list(ghosts.pasts()) == list(model)
    assert dropped == model_dropped
    assert ghosts.regrets().num_regretted_total == num_regretted


def serve(pool: BlockPool, tree: RadixTree, tokens: list[int]) -> int:
    packed = pack_tokens(tokens)
    found = list(tree.match(ROOT, packed, len(tokens)).block_ids)
    pool.acquire(found)
    num_new = len(tokens) - len(found)
    if num_new > pool.num_free:
        tree.evict(num_new - pool.num_free)
    blocks = found + pool.allocate(num_new)
    tree.insert(ROOT, packed, blocks, chain(ROOT, packed, 1))
    pool.release(blocks)
    return len(found)


def hits_on_returning_texts(tree: RadixTree, pool: BlockPool) -> int:
    """A few texts come back every now and then; between them passes a stream that never does."""
    randomness = random.Random(7)
    num_hits = 0
    for time in range(1500):
        stranger = [10_000 + 4 * time + i for i in range(4)]
        serve(pool, tree, stranger)
        if time % 3 == 0:
            which = randomness.randrange(12)
            num_hits += serve(pool, tree, [100 * which + i for i in range(4)])
    return num_hits


def test_hit_density_learns_to_let_a_stream_pass() -> None:
    """The returning texts would fit, with the stream they come back later than LRU remembers."""
    pool = BlockPool(60)
    policy = HitDensityPolicy()
    num_hits = hits_on_returning_texts(RadixTree(pool, 1, policy), pool)
    policy.check_invariants()
    lru_pool = BlockPool(60)
    num_lru_hits = hits_on_returning_texts(RadixTree(lru_pool, 1), lru_pool)
    assert num_hits > 3 * num_lru_hits
    regrets = policy.regrets()
    assert regrets.num_regretted_total == sum(regrets.age_to_num_blocks.values()) > 0


def test_cost_of_deep_blocks_decides_among_equals() -> None:
    pool = BlockPool(40)
    tree = RadixTree(pool, 1, HitDensityPolicy(cost=lambda depth: 1.0 + depth))
    serve(pool, tree, list(range(10)))
    serve(pool, tree, [50, 51])
    for start in (0, 50):  # both were found once: one class, one age but for a few blocks
        serve(pool, tree, list(range(start, start + (10 if start == 0 else 2))))
    tree.evict(1)
    assert len(tree.match(ROOT, pack_tokens(range(10)), 10).block_ids) == 10
    assert len(tree.match(ROOT, pack_tokens([50, 51]), 2).block_ids) == 1


def test_the_same_seed_gives_the_same_evictions() -> None:
    results = []
    for _ in range(2):
        pool = BlockPool(60)
        tree = RadixTree(pool, 1, HitDensityPolicy(seed=3))
        results.append((hits_on_returning_texts(tree, pool), tree.digest))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("settings_", "name"),
    [({"num_samples": 0}, "num_samples"), ({"ghost_factor": -1.0}, "ghost_factor")],
)
def test_settings_out_of_range_are_named(settings_: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        HitDensityPolicy(**settings_)
