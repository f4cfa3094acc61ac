"""The tree against a plain model: a set of (root, prefix) pairs, one for each sealed block."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.block_pool import BlockPool
from kvstore.eviction.hit_density import HitDensityPolicy
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.ranked import LfuPolicy, LruPolicy, SlruPolicy
from kvstore.eviction.s3_fifo import S3FifoPolicy
from kvstore.prefix_hash import HASH_BYTES, chain, digest_of, pack_tokens, root_hash
from kvstore.radix_messages import Change, ChangeKind, Insertion, PartialBlock
from kvstore.radix_node import RadixNode
from kvstore.radix_tree import RadixTree

BLOCK = 2
ROOTS = [root_hash("model", b"a"), root_hash("model", b"b")]
# Few distinct tokens, so that paths share, split and extend one another often.
paths = st.lists(st.integers(0, 1), min_size=0, max_size=12)


def full(tokens: list[int]) -> list[int]:
    return tokens[: len(tokens) // BLOCK * BLOCK]


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@dataclass
class Held:
    """A path that somebody uses, and where it ended in the tree."""

    root: bytes
    tokens: list[int]
    blocks: list[int]
    end: RadixNode


class TreeMachine(RuleBasedStateMachine):
    """Sequences are inserted and held, released, matched and evicted at random."""

    @staticmethod
    def new_policy() -> EvictionPolicy:
        return LruPolicy()

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(24)
        self.tree = RadixTree(self.pool, BLOCK, self.new_policy())
        self.known: dict[
            tuple[bytes, tuple[int, ...]], int
        ] = {}  # path of whole blocks → its last block
        self.held: list[Held] = []
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
        insertion = self.tree.insert(root, packed, blocks, chain(root, packed, BLOCK))
        self.take_over(root, tokens, blocks, 0, insertion)
        self.held.append(Held(root, tokens, blocks, insertion.end))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=paths)
    def extend(self, data: st.DataObject, more: list[int]) -> None:
        """A held path goes on: from where it ended, or whole when that place is not what it was."""
        held = data.draw(st.sampled_from(self.held))
        more = full(more)
        first, tokens = len(held.blocks), held.tokens + more
        if not held.blocks or self.pool.num_free < len(more) // BLOCK:
            return
        new = self.pool.allocate(len(more) // BLOCK)
        hashes = chain(held.root, pack_tokens(tokens), BLOCK)
        insertion = self.tree.extend(
            held.end, held.blocks[-1], pack_tokens(more), new, hashes[first * HASH_BYTES :]
        )
        blocks = held.blocks + new
        if insertion is None:
            first = 0
            insertion = self.tree.insert(held.root, pack_tokens(tokens), blocks, hashes)
        self.take_over(held.root, tokens, blocks, first, insertion)
        held.tokens, held.blocks, held.end = tokens, blocks, insertion.end

    def take_over(
        self, root: bytes, tokens: list[int], blocks: list[int], first: int, insertion: Insertion
    ) -> None:
        """Use the tree's own blocks where it had them, and note what is known now."""
        heads = self.heads(root, tokens)
        expected = {
            i - first: self.known[head]
            for i, head in enumerate(heads)
            if head in self.known and self.known[head] != blocks[i]
        }
        assert {d.index: d.block_id for d in insertion.duplicates} == expected
        for d in insertion.duplicates:
            self.pool.acquire([d.block_id])
            self.pool.release([blocks[first + d.index]])
            blocks[first + d.index] = d.block_id
        self.known.update(zip(heads, blocks, strict=True))
        if blocks:
            assert insertion.end.block_ids[-1] == blocks[-1]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(held.blocks)

    @rule(
        root=st.sampled_from(ROOTS), tokens=paths, limit=st.integers(0, 13), is_taken=st.booleans()
    )
    def match(self, root: bytes, tokens: list[int], limit: int, is_taken: bool) -> None:
        match = self.tree.match(root, pack_tokens(tokens), limit)
        wanted = tokens[:limit]
        expected = []
        for head in self.heads(root, full(wanted)):
            if head not in self.known:
                break
            expected.append(self.known[head])
        assert list(match.block_ids) == expected
        self.check_partial(root, wanted, len(expected) * BLOCK, match.partial)
        if is_taken and match.partial is not None:
            self.tree.use_partial(match.partial)

    def check_partial(
        self, root: bytes, wanted: list[int], num_matched: int, partial: PartialBlock | None
    ) -> None:
        """Against every block that is known to follow the matched head."""
        num_tokens_to_blocks: dict[int, set[int]] = {}
        for (other_root, path), block_id in self.known.items():
            is_next = len(path) == num_matched + BLOCK
            if other_root == root and is_next and list(path[:num_matched]) == wanted[:num_matched]:
                num_shared = shared(path[num_matched:], wanted[num_matched:])
                num_tokens_to_blocks.setdefault(num_shared, set()).add(block_id)
        best = max(num_tokens_to_blocks, default=0)
        if best == 0:
            assert partial is None
        else:
            assert partial is not None and partial.num_tokens == best
            assert partial.block_id in num_tokens_to_blocks[best]

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


class LfuMachine(TreeMachine):
    @staticmethod
    def new_policy() -> EvictionPolicy:
        return LfuPolicy(num_remembered_blocks=8)


class SlruMachine(TreeMachine):
    @staticmethod
    def new_policy() -> EvictionPolicy:
        return SlruPolicy(protected_share=0.5)


class S3FifoMachine(TreeMachine):
    @staticmethod
    def new_policy() -> EvictionPolicy:
        return S3FifoPolicy(small_share=0.3, num_uses_to_promote=1)


class HitDensityMachine(TreeMachine):
    @staticmethod
    def new_policy() -> EvictionPolicy:
        return HitDensityPolicy(num_samples=3, ghost_factor=0.5, min_ghosts=4)


TestTree = TreeMachine.TestCase
TestTreeWithLfu = LfuMachine.TestCase
TestTreeWithSlru = SlruMachine.TestCase
TestTreeWithS3Fifo = S3FifoMachine.TestCase
TestTreeWithHitDensity = HitDensityMachine.TestCase
for case in (
    TestTree,
    TestTreeWithLfu,
    TestTreeWithSlru,
    TestTreeWithS3Fifo,
    TestTreeWithHitDensity,
):
    case.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
del case  # or it would be collected once more


def build(num_blocks: int, *paths: list[int]) -> tuple[BlockPool, RadixTree]:
    pool = BlockPool(num_blocks)
    tree = RadixTree(pool, BLOCK)
    for tokens in paths:
        packed = pack_tokens(tokens)
        blocks = pool.allocate(len(tokens) // BLOCK)
        duplicates = tree.insert(
            ROOTS[0], packed, blocks, chain(ROOTS[0], packed, BLOCK)
        ).duplicates
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


# Bytes of one id may order differently from the ids themselves; both ends of the range are in here.
wide_tokens = st.sampled_from([0, 1, 2, 255, 256, 257, 65_536, 2**31, 2**32 - 1])


@given(
    blocks=st.lists(st.lists(wide_tokens, min_size=4, max_size=4), max_size=20),
    wanted=st.lists(wide_tokens, max_size=6),
    limit=st.integers(0, 6),
)
def test_partial_match_is_the_best_of_all_children(
    blocks: list[list[int]], wanted: list[int], limit: int
) -> None:
    pool = BlockPool(max(len(blocks), 1))
    tree = RadixTree(pool, 4)
    for block in blocks:
        packed = pack_tokens(block)
        tree.insert(ROOTS[0], packed, pool.allocate(1), chain(ROOTS[0], packed, 4))
    match = tree.match(ROOTS[0], pack_tokens(wanted), limit)
    if wanted[: min(limit, 4)] in blocks and limit >= 4 and len(wanted) >= 4:
        assert len(match.block_ids) == 1
        return
    assert match.block_ids == ()
    best = max((shared(block, wanted[:limit]) for block in blocks), default=0)
    assert (0 if match.partial is None else match.partial.num_tokens) == best


def test_a_partial_block_is_fresh_only_when_it_was_used() -> None:
    for is_used in (False, True):
        _, tree = build(8, [1, 1, 2, 2, 3, 3], [9, 9])
        match = tree.match(ROOTS[0], pack_tokens([1, 1, 2, 7]), 4)
        assert match.partial is not None and match.partial.num_tokens == 1
        if is_used:
            tree.use_partial(match.partial)
        tree.evict(2)
        num_left = len(tree.match(ROOTS[0], pack_tokens([1, 1, 2, 2]), 4).block_ids)
        assert num_left == (2 if is_used else 1)
