"""The tree against a plain model: a set of (root, prefix) pairs, one for each sealed block."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.block_pool import BlockPool
from kvstore.prefix_hash import chain, digest_of, pack_tokens, root_hash, split_hashes
from kvstore.radix_tree import Change, ChangeKind, RadixTree

BLOCK = 2
ROOTS = [root_hash("model", b"a"), root_hash("model", b"b")]
# Few distinct tokens, so that paths share, split and extend one another often.
paths = st.lists(st.integers(0, 1), min_size=0, max_size=12)


def full(tokens: list[int]) -> list[int]:
    return tokens[: len(tokens) // BLOCK * BLOCK]


class TreeMachine(RuleBasedStateMachine):
    """Sequences are inserted and held, released, matched and evicted at random."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(24)
        self.tree = RadixTree(self.pool, BLOCK)
        self.known: dict[
            tuple[bytes, tuple[int, ...]], int
        ] = {}  # path of whole blocks → its last block
        self.held: list[list[int]] = []
        self.indexed: set[bytes] = set()

    def heads(self, root: bytes, tokens: list[int]) -> list[tuple[bytes, tuple[int, ...]]]:
        return [(root, tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK)]

    @rule(root=st.sampled_from(ROOTS), tokens=paths)
    def insert(self, root: bytes, tokens: list[int]) -> None:
        tokens = full(tokens)
        num_blocks = len(tokens) // BLOCK
        if self.pool.num_free < num_blocks:
            return
        blocks = self.pool.allocate(num_blocks)
        packed = pack_tokens(tokens)
        duplicates = self.tree.insert(root, packed, blocks, chain(root, packed, BLOCK))
        expected = {
            i: self.known[head]
            for i, head in enumerate(self.heads(root, tokens))
            if head in self.known
        }
        assert {d.index: d.block_id for d in duplicates} == expected
        for d in duplicates:
            self.pool.acquire([d.block_id])
            self.pool.release([blocks[d.index]])
            blocks[d.index] = d.block_id
        self.known.update(zip(self.heads(root, tokens), blocks, strict=True))
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(root=st.sampled_from(ROOTS), tokens=paths, limit=st.integers(0, 6))
    def match(self, root: bytes, tokens: list[int], limit: int) -> None:
        found = self.tree.match(root, pack_tokens(tokens), limit).block_ids
        expected = []
        for head in self.heads(root, full(tokens))[:limit]:
            if head not in self.known:
                break
            expected.append(self.known[head])
        assert list(found) == expected

    @rule(n=st.integers(0, 10))
    def evict(self, n: int) -> None:
        num_idle = self.pool.num_idle
        assert self.tree.evict(n) == min(n, num_idle)
        self.known = {
            (root, path): b for (root, path), b in self.known.items() if self.pool.is_cached(b)
        }
        # What is left of a path is a contiguous head of it.
        assert all(len(p) == BLOCK or (r, p[:-BLOCK]) in self.known for r, p in self.known)

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.known = {}

    @invariant()
    def agrees(self) -> None:
        self.tree.check_invariants()
        self.pool.check_invariants()
        assert self.tree.num_blocks == len(self.known)
        for change in self.tree.drain_changes():
            self.apply(change)
        hashes = {chain(r, pack_tokens(p), BLOCK)[-16:] for r, p in self.known}
        assert self.indexed == hashes
        assert self.tree.digest == digest_of(sorted(hashes))

    def apply(self, change: Change) -> None:
        if change.kind is ChangeKind.SEALED:
            assert not self.indexed & set(change.hashes)
            self.indexed |= set(change.hashes)
        elif change.kind is ChangeKind.EVICTED:
            assert set(change.hashes) <= self.indexed
            self.indexed -= set(change.hashes)
        else:
            self.indexed = set()


TreeMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTree = TreeMachine.TestCase


def build(num_blocks: int, *paths: list[int]) -> tuple[BlockPool, RadixTree]:
    pool = BlockPool(num_blocks)
    tree = RadixTree(pool, BLOCK)
    for tokens in paths:
        packed = pack_tokens(tokens)
        blocks = pool.allocate(len(tokens) // BLOCK)
        duplicates = tree.insert(ROOTS[0], packed, blocks, chain(ROOTS[0], packed, BLOCK))
        for d in duplicates:
            pool.acquire([d.block_id])
        pool.release([b for i, b in enumerate(blocks) if i not in {d.index for d in duplicates}])
        pool.release([blocks[d.index] for d in duplicates])
        pool.release([d.block_id for d in duplicates])
    return pool, tree


def test_least_recently_used_path_goes_first() -> None:
    _pool, tree = build(8, [1, 1, 2, 2], [1, 1, 3, 3], [4, 4])
    tree.match(ROOTS[0], pack_tokens([1, 1, 2, 2]), 8)
    tree.match(ROOTS[0], pack_tokens([4, 4]), 8)
    assert tree.evict(1) == 1
    assert len(tree.match(ROOTS[0], pack_tokens([1, 1, 3, 3]), 8).block_ids) == 1
    assert len(tree.match(ROOTS[0], pack_tokens([1, 1, 2, 2]), 8).block_ids) == 2
    assert len(tree.match(ROOTS[0], pack_tokens([4, 4]), 8).block_ids) == 1


def test_a_hit_on_the_head_does_not_keep_the_tail_fresh() -> None:
    _, tree = build(8, [1, 1, 2, 2, 3, 3], [9, 9])
    tree.match(ROOTS[0], pack_tokens([1, 1]), 8)
    tree.evict(2)  # the unused tail is older than [9, 9] and than the head just used
    assert len(tree.match(ROOTS[0], pack_tokens([1, 1, 2, 2, 3, 3]), 8).block_ids) == 1
    assert len(tree.match(ROOTS[0], pack_tokens([9, 9]), 8).block_ids) == 1


def test_blocks_in_use_are_never_evicted() -> None:
    pool, tree = build(4, [1, 1, 2, 2])
    found = tree.match(ROOTS[0], pack_tokens([1, 1]), 8).block_ids
    pool.acquire(found)
    assert tree.evict(4) == 1
    assert tree.match(ROOTS[0], pack_tokens([1, 1, 2, 2]), 8).block_ids == found


def test_one_tenant_never_matches_another() -> None:
    _, tree = build(4, [1, 1, 2, 2])
    assert tree.match(ROOTS[1], pack_tokens([1, 1, 2, 2]), 8).block_ids == ()


def test_stale_heap_entries_stay_bounded() -> None:
    _, tree = build(4, [1, 1])
    for _ in range(5000):
        tree.match(ROOTS[0], pack_tokens([1, 1]), 8)
    assert len(tree._leaf_heap) < 200
    assert tree.digest == digest_of(split_hashes(chain(ROOTS[0], pack_tokens([1, 1]), BLOCK)))
