"""Runs a log of prompts through the real radix tree under another pool size or policy."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstore.block_pool import BlockPool
from kvstore.prefix_hash import HASH_BYTES, pack_tokens
from kvstore.radix_tree import RadixTree
from kvstore.reuse.prompt_log import LoggedPath, SampledLog

_ROOT = bytes(HASH_BYTES)

MakeTree = Callable[[BlockPool], RadixTree]


def lru_tree(pool: BlockPool) -> RadixTree:
    return RadixTree(pool, block_size=1)


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    num_lookups: int
    num_hits: int

    @property
    def hit_ratio(self) -> float:
        return self.num_hits / self.num_lookups if self.num_lookups else 0.0


def replay(
    paths: Iterable[LoggedPath], num_blocks: int, make_tree: MakeTree = lru_tree
) -> ReplayCounts:
    """Serve every path in its turn from an empty pool of `num_blocks`.

    A path longer than the pool is cut to it: its tail could never stay.

    Args:
        make_tree: makes the tree over the pool, with a block size of 1: each block's number is its one token.
    """
    pool = BlockPool(num_blocks)
    tree = make_tree(pool)
    num_lookups = num_hits = 0
    for path in paths:
        num_found = serve(pool, tree, path.blocks[:num_blocks], is_reuse=path.is_lookup)
        if path.is_lookup:
            num_lookups += len(path.blocks)
            num_hits += num_found
    return ReplayCounts(num_lookups, num_hits)


def replay_log(log: SampledLog, num_blocks: int, make_tree: MakeTree = lru_tree) -> float:
    """The hit ratio of a pool of `num_blocks` real blocks over all lookups in the time of `log`.

    A block that everybody uses is in the sample or not, and either would mislead by its whole share; so the
    sample's error in what really happened, which is known, is taken off.
    """
    counts = replay(log.paths, max(1, round(num_blocks / log.weight)), make_tree)
    if counts.num_lookups == 0 or log.num_lookups == 0:
        return 0.0
    error = log.num_sampled_hits / counts.num_lookups - log.num_hits / log.num_lookups
    return min(1.0, max(0.0, counts.hit_ratio - error))


def serve(
    pool: BlockPool, tree: RadixTree, blocks: tuple[int, ...], *, is_reuse: bool = True
) -> int:
    """One sequence's life: match, hold, allocate, seal, release. How many blocks were found, from the first on."""
    tokens = pack_tokens(blocks)
    found = tree.match(_ROOT, tokens, len(blocks), is_reuse=is_reuse).block_ids
    pool.acquire(found)
    num_new = len(blocks) - len(found)
    if num_new > pool.num_free:
        tree.evict(num_new - pool.num_free)
    block_ids = [*found, *pool.allocate(num_new)]
    hashes = b"".join(block.to_bytes(HASH_BYTES, "little") for block in blocks)
    tree.insert(_ROOT, tokens, block_ids, hashes)
    pool.release(block_ids)
    return len(found)
