"""The radix tree: which token prefixes have their KV in which blocks. Ids only, no tensors.

    root(tenant A) ─┬─ "You are a helpful …"  [b7 b2 b19] ─┬─ "What is …" [b3]
                    │                                      └─ "Write a …" [b11 b12]
                    └─ …
    root(tenant B) ─── the same text, other blocks

An edge is a run of whole blocks. Roots are told apart by `prefix_hash.root_hash`, so one tenant's tokens are
never even compared with another's. Within a root, tokens are compared byte for byte: the hash only names a
block in the shared index and is never trusted for content. A block is only ever offered at the positions at
which it was computed, because a path from the root fixes them (rotary position embeddings depend on it).

Only leaves lose blocks, tail first, so what a replica holds of a chain is always a contiguous head of it.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.block_pool import BlockPool
from kvstore.prefix_hash import HASH_BYTES, TOKEN_BYTES, digest_of, split_hashes


class ChangeKind(StrEnum):
    SEALED = "sealed"
    EVICTED = "evicted"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class Change:
    """What the prefix index must learn; `hashes` is empty for CLEARED."""

    kind: ChangeKind
    hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest known prefix, in whole blocks, first block first. No reference was taken."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Position `index` of the inserted path was known already, in another block."""

    index: int
    block_id: int


@dataclass(slots=True, eq=False)
class _Node:
    parent: "_Node | None"
    tokens: bytearray = field(default_factory=bytearray)  # packed; len(block_ids) whole blocks
    hashes: bytearray = field(default_factory=bytearray)  # of each block; of a root: the root hash
    block_ids: list[int] = field(default_factory=list)
    children: dict[bytes, "_Node"] = field(default_factory=dict)
    last_used: int = 0


class RadixTree:
    """Owns the `cached` mark of the pool's blocks, never a reference.

    Args:
        pool: whose blocks the paths name.
        block_size: tokens in a block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_bytes = block_size * TOKEN_BYTES
        self._roots: dict[bytes, _Node] = {}
        self._tick = 0
        # (last_used, id, node); an entry is stale when the node was used since, or is no leaf any more.
        self._leaf_heap: list[tuple[int, int, _Node]] = []
        self._changes: list[Change] = []
        self.digest = 0
        self.num_blocks = 0
        self.num_evicted_total = 0

    def match(self, root: bytes, tokens: bytes, max_blocks: int) -> PrefixMatch:
        """The longest prefix of packed `tokens` under `root`, at most `max_blocks` blocks; marks it used."""
        found: list[int] = []
        self._tick += 1
        for node, num_shared in self._walk(root, tokens[: max_blocks * self._block_bytes]):
            if num_shared < len(node.block_ids):
                node = self._split(node, num_shared)
            found += node.block_ids
            self._touch(node)
        return PrefixMatch(tuple(found))

    def insert(
        self, root: bytes, tokens: bytes, block_ids: list[int], hashes: bytes
    ) -> list[Duplicate]:
        """Offer a sealed path: `len(block_ids)` whole blocks of packed `tokens` with their chained hashes.

        Every block must be in use. Where the tree knew a position already, its own block stays and the
        caller's is reported, so that the caller can share the tree's and give its own back.
        """
        assert len(tokens) == len(block_ids) * self._block_bytes
        assert len(hashes) == len(block_ids) * HASH_BYTES
        self._tick += 1
        node = self._roots.get(root)
        if node is None:
            node = self._roots[root] = _Node(parent=None, hashes=bytearray(root))
        known = 0
        duplicates: list[Duplicate] = []
        for child, num_shared in self._walk(root, tokens):
            if num_shared < len(child.block_ids):
                child = self._split(child, num_shared)
            for offset, block_id in enumerate(child.block_ids):
                if block_id != block_ids[known + offset]:
                    duplicates.append(Duplicate(known + offset, block_id))
            known += num_shared
            self._touch(child)
            node = child
        if known < len(block_ids):
            self._append(
                node,
                tokens[known * self._block_bytes :],
                block_ids[known:],
                hashes[known * HASH_BYTES :],
            )
        return duplicates

    def evict(self, num_blocks: int) -> int:
        """Turn up to `num_blocks` idle blocks into free ones, least recently used path first.

        Returns:
            How many were freed: fewer only when no idle block is left.
        """
        num_freed = 0
        has_rebuilt = False
        while num_freed < num_blocks and self._pool.num_idle > 0:
            if not self._leaf_heap:
                if has_rebuilt:
                    break
                self._rebuild_heap()
                has_rebuilt = True
                continue
            last_used, _, node = heapq.heappop(self._leaf_heap)
            if node.children or not node.block_ids or node.last_used != last_used:
                continue
            num_freed += self._evict_from(node, num_blocks - num_freed)
        return num_freed

    def clear(self) -> None:
        """Forget every path. Blocks still in use stay with their sequences and become free when released."""
        for node in self._nodes():
            for block_id in node.block_ids:
                self._pool.uncache(block_id)
        self._roots.clear()
        self._leaf_heap.clear()
        self._changes.append(Change(ChangeKind.CLEARED))
        self.digest = 0
        self.num_blocks = 0

    def drain_changes(self) -> list[Change]:
        """What happened since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _walk(self, root: bytes, tokens: bytes) -> Iterator[tuple[_Node, int]]:
        """(child, blocks of its edge shared with `tokens`) down the path; ends at the first difference."""
        node = self._roots.get(root)
        position = 0
        while node is not None:
            child = node.children.get(tokens[position : position + self._block_bytes])
            if child is None:
                return
            num_shared = self._num_shared_blocks(child, tokens, position)
            position += num_shared * self._block_bytes
            is_whole = num_shared == len(child.block_ids)
            yield child, num_shared
            node = child if is_whole else None

    def _num_shared_blocks(self, node: _Node, tokens: bytes, position: int) -> int:
        """Binary search over block borders; each probe is one memory compare."""
        remaining = (len(tokens) - position) // self._block_bytes
        low, high = 1, min(len(node.block_ids), remaining)  # the first block matched by its key
        if (
            node.tokens[: high * self._block_bytes]
            == tokens[position : position + high * self._block_bytes]
        ):
            return high
        while low < high:
            middle = (low + high + 1) // 2
            span = middle * self._block_bytes
            if node.tokens[:span] == tokens[position : position + span]:
                low = middle
            else:
                high = middle - 1
        return low

    def _append(self, node: _Node, tokens: bytes, block_ids: list[int], hashes: bytes) -> None:
        is_extension = not node.children and node.parent is not None
        if not is_extension:
            child = _Node(parent=node)
            node.children[bytes(tokens[: self._block_bytes])] = child
            node = child
        node.tokens += tokens
        node.block_ids += block_ids
        node.hashes += hashes
        for block_id in block_ids:
            self._pool.cache(block_id)
        self.num_blocks += len(block_ids)
        sealed = split_hashes(hashes)
        self.digest ^= digest_of(sealed)
        self._changes.append(Change(ChangeKind.SEALED, tuple(sealed)))
        self._touch(node)

    def _split(self, node: _Node, num_head_blocks: int) -> _Node:
        """Cut an edge in two and return its head, which becomes the parent of what was `node`."""
        assert node.parent is not None and 0 < num_head_blocks < len(node.block_ids)
        head_bytes = num_head_blocks * self._block_bytes
        head = _Node(
            parent=node.parent,
            tokens=node.tokens[:head_bytes],
            hashes=node.hashes[: num_head_blocks * HASH_BYTES],
            block_ids=node.block_ids[:num_head_blocks],
            last_used=node.last_used,
        )
        node.parent.children[bytes(head.tokens[: self._block_bytes])] = head
        del node.tokens[:head_bytes], node.hashes[: num_head_blocks * HASH_BYTES]
        del node.block_ids[:num_head_blocks]
        node.parent = head
        head.children[bytes(node.tokens[: self._block_bytes])] = node
        return head

    def _touch(self, node: _Node) -> None:
        if node.last_used == self._tick:
            return
        node.last_used = self._tick
        if not node.children:
            self._push(node)

    def _push(self, node: _Node) -> None:
        if len(self._leaf_heap) > 4 * self.num_blocks + 64:
            self._rebuild_heap()  # most entries are stale by now
        heapq.heappush(self._leaf_heap, (node.last_used, id(node), node))

    def _evict_from(self, node: _Node, num_wanted: int) -> int:
        num_freed = 0
        evicted: list[bytes] = []
        while node.block_ids and num_freed < num_wanted:
            block_id = node.block_ids[-1]
            if self._pool.ref_count(block_id) > 0:
                break  # whoever uses it touches this path again when it is done
            node.block_ids.pop()
            evicted.append(bytes(node.hashes[-HASH_BYTES:]))
            if not node.block_ids:
                self._remove(node)
            del node.hashes[-HASH_BYTES:], node.tokens[-self._block_bytes :]
            self._pool.uncache(block_id)
            num_freed += 1
        if node.block_ids and num_freed == num_wanted:
            self._push(node)
        self.num_blocks -= num_freed
        self.num_evicted_total += num_freed
        self.digest ^= digest_of(evicted)
        if evicted:
            self._changes.append(Change(ChangeKind.EVICTED, tuple(evicted)))
        return num_freed

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[bytes(node.tokens[: self._block_bytes])]
        if not parent.children:
            if parent.parent is not None:
                self._push(parent)
            else:
                del self._roots[bytes(parent.hashes)]

    def _rebuild_heap(self) -> None:
        self._leaf_heap = [(n.last_used, id(n), n) for n in self._nodes() if not n.children]
        heapq.heapify(self._leaf_heap)

    def _nodes(self) -> Iterator[_Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_invariants(self) -> None:
        num_blocks = 0
        digest = 0
        for node in self._nodes():
            assert node.block_ids, "an empty edge"
            assert len(node.tokens) == len(node.block_ids) * self._block_bytes
            assert len(node.hashes) == len(node.block_ids) * HASH_BYTES
            assert node.parent is not None
            assert node.parent.children[bytes(node.tokens[: self._block_bytes])] is node
            assert all(self._pool.is_cached(block_id) for block_id in node.block_ids)
            assert all(child.last_used <= node.last_used for child in node.children.values())
            num_blocks += len(node.block_ids)
            digest ^= digest_of(split_hashes(bytes(node.hashes)))
        assert num_blocks == self.num_blocks
        assert digest == self.digest
        num_cached = sum(self._pool.is_cached(b) for b in range(self._pool.num_blocks))
        assert num_cached == num_blocks, "the pool's marks and the tree differ"
