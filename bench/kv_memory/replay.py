"""A trace through the real radix tree and pool, and through a clairvoyant one.

One trace block is one block of the tree (of one token, whose id is the block's). Requests come one after the
other: match, make room, insert, give back; nothing is in use between two of them.
"""

import heapq
from array import array
from dataclasses import dataclass

from bench.kv_memory.traces import Trace
from kvstore.block_pool import BlockPool
from kvstore.eviction.policy import EvictionPolicy, Regrets
from kvstore.prefix_hash import HASH_BYTES, pack_tokens
from kvstore.radix_tree import RadixTree

_ROOT = b"one tenant"
_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class ReplayResult:
    num_references: int
    num_hits: int
    regrets: Regrets | None = None

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_references


def replay(trace: Trace, num_blocks: int, policy: EvictionPolicy) -> ReplayResult:
    """Hits of `policy` with a pool of `num_blocks`; what a request has beyond the pool is never cached."""
    pool = BlockPool(num_blocks)
    tree = RadixTree(pool, block_size=1, policy=policy)
    num_hits = 0
    for path in trace.paths:
        tokens = pack_tokens(path[:num_blocks])
        hashes = b"".join(block.to_bytes(HASH_BYTES, "little") for block in path[:num_blocks])
        found = list(tree.match(_ROOT, tokens, len(path)).block_ids)
        num_hits += len(found)
        pool.acquire(found)
        num_new = min(len(path), num_blocks) - len(found)
        if num_new > pool.num_free:
            tree.evict(num_new - pool.num_free)
        blocks = found + pool.allocate(num_new)
        tree.insert(_ROOT, tokens, blocks, hashes)
        pool.release(blocks)
        tree.drain_changes()
    return ReplayResult(trace.num_references, num_hits, policy.regrets())


def replay_clairvoyant(trace: Trace, num_blocks: int) -> ReplayResult:
    """Belady's rule on leaves: evict the block whose next use is furthest, the deeper one among equals.

    A block is next used no later than any block below it, so that furthest-first with that tie rule only ever
    takes leaves, and what is resident stays closed under prefixes. As in `replay`, every request's blocks
    are all brought in, as an engine must to compute it, even if no later request wants them.
    """
    next_uses = _next_uses(trace)
    resident: dict[int, int] = {}  # block → its next use
    furthest: list[tuple[int, int, int]] = []  # (−next use, −depth, block), some stale
    num_hits = 0
    for index, path in enumerate(trace.paths):
        path = path[:num_blocks]
        num_found = 0
        for block in path:
            if block not in resident:
                break
            num_found += 1
        num_hits += num_found
        for block in path[:num_found]:
            resident[block] = _NEVER + 1  # held: matches no entry of the heap
        num_over = len(resident) + len(path) - num_found - num_blocks
        while num_over > 0:
            negative_use, _, block = heapq.heappop(furthest)
            if resident.get(block) == -negative_use:
                del resident[block]
                num_over -= 1
        for depth, block in enumerate(path):
            next_use = next_uses[index][depth]
            resident[block] = next_use
            heapq.heappush(furthest, (-next_use, -depth, block))
    return ReplayResult(trace.num_references, num_hits)


def _next_uses(trace: Trace) -> "list[array[int]]":
    """For each request and block, the index of the next request that has it."""
    block_to_next: dict[int, int] = {}
    rows: list[array[int]] = []
    for index in range(len(trace.paths) - 1, -1, -1):
        path = trace.paths[index]
        rows.append(array("q", (block_to_next.get(block, _NEVER) for block in path)))
        for block in path:
            block_to_next[block] = index
    rows.reverse()
    return rows
