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

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from kvstore.block_pool import BlockPool
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.quotas import Quotas
from kvstore.eviction.ranked import LruPolicy
from kvstore.prefix_hash import HASH_BYTES, TOKEN_BYTES, digest_of, split_hashes
from kvstore.radix_messages import (
    Change,
    ChangeKind,
    Duplicate,
    Insertion,
    PartialBlock,
    PrefixMatch,
)
from kvstore.radix_node import RadixNode, nearest_child, walk


class RadixTree:
    """Owns the `cached` mark of the pool's blocks, never a reference.

    Args:
        pool: whose blocks the paths name.
        block_size: tokens in a block.
        policy: what to forget first, of this tree's own; least recently used by default.
        quotas: what each root may keep; without them every root competes for every block.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        policy: EvictionPolicy | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self._pool = pool
        self._policy = LruPolicy() if policy is None else policy
        self._quotas = quotas
        self._group_to_num_blocks: dict[bytes, int] = {}
        self._block_bytes = block_size * TOKEN_BYTES
        self._roots: dict[bytes, RadixNode] = {}
        self._tick = 0
        self._changes: list[Change] = []
        self._offered: tuple[PartialBlock, RadixNode] | None = None
        self.digest = 0
        self.num_blocks = 0
        self.num_evicted_total = 0

    @property
    def policy(self) -> EvictionPolicy:
        return self._policy

    @property
    def num_held_back(self) -> int:
        """Of the pool's idle blocks at most so many are out of `evict`'s reach, for the sake of floors."""
        if self._quotas is None:
            return 0
        return self._quotas.num_held_back(self._group_to_num_blocks)

    @property
    def root_to_num_blocks(self) -> Mapping[bytes, int]:
        """Cached blocks of each root, in use or idle; only kept where there are quotas."""
        return {} if self._quotas is None else self._group_to_num_blocks

    def match(
        self, root: bytes, tokens: bytes, max_tokens: int, *, is_reuse: bool = True
    ) -> PrefixMatch:
        """The longest prefix of packed `tokens` under `root`, at most `max_tokens` tokens of it.

        Marks the whole blocks as used; the partial one only `use_partial` does.

        Args:
            is_reuse: whether a request finds them that has not been counted before. A request that
                comes again, after an attempt that failed or to give its blocks back, says False: what
                it found is recent, but no more popular.
        """
        wanted = tokens[: max_tokens * TOKEN_BYTES]
        found: list[int] = []
        self._tick += 1
        last = self._roots.get(root)
        for step in walk(last, wanted, self._block_bytes):
            node = self._split(step.node, step.num_blocks)
            found += node.block_ids
            self._touch(node, is_reuse)
            last = node
        self._offered = None
        if last is not None:
            start = len(found) * self._block_bytes
            nearest = nearest_child(last, wanted[start : start + self._block_bytes])
            if nearest is not None:
                child = nearest.node
                self._offered = PartialBlock(child.block_ids[0], nearest.num_tokens), child
        return PrefixMatch(tuple(found), None if self._offered is None else self._offered[0])

    def use_partial(self, partial: PartialBlock) -> None:
        """Mark the partial block of the latest match as used, because the caller is going to copy it.

        To be called before anything is evicted or inserted.
        """
        assert self._offered is not None and self._offered[0] == partial, "not of the latest match"
        node = self._offered[1]
        self._offered = None
        self._touch(self._split(node, 1), is_reuse=True)

    def insert(self, root: bytes, tokens: bytes, block_ids: list[int], hashes: bytes) -> Insertion:
        """Offer a sealed path: `len(block_ids)` whole blocks of packed `tokens` with their chained hashes.

        Every block must be in use. Where the tree knew a position already, its own block stays and the
        caller's is reported, so that the caller can share the tree's and give its own back.
        """
        self._tick += 1
        top = self._roots.get(root)
        if top is None:
            group = b"" if self._quotas is None else root
            top = self._roots[root] = RadixNode(None, group, hashes=bytearray(root))
        return self._offer(top, tokens, block_ids, hashes)

    def extend(
        self, end: RadixNode, last_block_id: int, tokens: bytes, block_ids: list[int], hashes: bytes
    ) -> Insertion | None:
        """As `insert`, for what goes on where an earlier path of the caller ended; costs the new blocks alone.

        Args:
            end: of that path's `Insertion`.
            last_block_id: the path's last block, still in use.

        Returns:
            None: the path ends elsewhere by now (its edge was cut or grew); insert it whole.
        """
        if not end.block_ids or end.block_ids[-1] != last_block_id:
            return None
        self._tick += 1
        node: RadixNode | None = end
        while node is not None and node.parent is not None:
            self._touch(node, is_reuse=False)
            node = node.parent
        return self._offer(end, tokens, block_ids, hashes)

    def _offer(
        self, node: RadixNode, tokens: bytes, block_ids: list[int], hashes: bytes
    ) -> Insertion:
        assert len(tokens) == len(block_ids) * self._block_bytes
        assert len(hashes) == len(block_ids) * HASH_BYTES
        known = 0
        duplicates: list[Duplicate] = []
        for step in walk(node, tokens, self._block_bytes):
            child = self._split(step.node, step.num_blocks)
            offered = block_ids[known : known + step.num_blocks]
            if child.block_ids != offered:
                pairs = enumerate(zip(child.block_ids, offered, strict=True), known)
                duplicates += [Duplicate(i, own) for i, (own, other) in pairs if own != other]
            known += step.num_blocks
            self._touch(child, is_reuse=False)
            node = child
        if known < len(block_ids):
            node = self._append(
                node,
                tokens[known * self._block_bytes :],
                block_ids[known:],
                hashes[known * HASH_BYTES :],
            )
        return Insertion(duplicates, node)

    def evict(self, num_blocks: int) -> int:
        """Turn up to `num_blocks` idle blocks into free ones; the policy says which.

        Returns:
            How many were freed: fewer only when no idle block is left that quotas allow to take.
        """
        num_freed = 0
        has_rebuilt = False
        while num_freed < num_blocks and self._pool.num_idle > 0:
            group_to_limit = self._group_to_limit()
            victim = self._policy.victim(group_to_limit)
            if victim is None and self._quotas is not None:
                # Those above their ceilings have nothing idle: everybody else who is above his floor.
                group_to_limit = self._quotas.takeable(self._group_to_num_blocks)
                victim = self._policy.victim(group_to_limit)
            if victim is not None:
                num_wanted = min(victim.num_blocks, num_blocks - num_freed)
                if group_to_limit is not None:
                    num_wanted = min(num_wanted, group_to_limit[victim.node.group])
                num_freed += self._evict_from(victim.node, num_wanted)
            elif has_rebuilt:
                break
            else:
                self._policy.rebuild(n for n in self._nodes() if not n.children)
                has_rebuilt = True
        return num_freed

    def _group_to_limit(self) -> dict[bytes, int] | None:
        """Whose blocks go next, and how many at most; None: anybody's."""
        quotas, counts = self._quotas, self._group_to_num_blocks
        return None if quotas is None else quotas.excess(counts) or quotas.takeable(counts)

    def clear(self) -> None:
        """Forget every path. Blocks still in use stay with their sequences and become free when released."""
        for node in self._nodes():
            for block_id in node.block_ids:
                self._pool.uncache(block_id)
            node.block_ids = []  # nobody extends a path of before
        self._roots.clear()
        self._offered = None
        self._group_to_num_blocks.clear()
        self._policy.cleared()
        self._changes.append(Change(ChangeKind.CLEARED))
        self.digest = 0
        self.num_blocks = 0

    def drain_changes(self) -> list[Change]:
        """What happened since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _append(
        self, node: RadixNode, tokens: bytes, block_ids: list[int], hashes: bytes
    ) -> RadixNode:
        """Put a new run of blocks under `node`, or several where the policy knows a past of the first ones."""
        sealed = split_hashes(hashes)
        for block_id in block_ids:
            self._pool.cache(block_id)
        self.num_blocks += len(block_ids)
        self._count(node.group, len(block_ids))
        self.digest ^= digest_of(sealed)
        self._changes.append(Change(ChangeKind.SEALED, tuple(sealed)))
        start = 0
        num_remembered = self._policy.num_remembered(sealed)
        for end in sorted({num_remembered, len(sealed)} - {0}):
            node = self._append_run(
                node,
                tokens[start * self._block_bytes : end * self._block_bytes],
                block_ids[start:end],
                sealed[start:end],
                is_recalled=start < num_remembered,
            )
            start = end
        return node

    def _append_run(
        self,
        node: RadixNode,
        tokens: bytes,
        block_ids: list[int],
        hashes: list[bytes],
        *,
        is_recalled: bool,
    ) -> RadixNode:
        has_same_past = node.num_hits == 0 and node.is_recalled == is_recalled
        if node.children or node.parent is None or not has_same_past:
            node = self._add_child(node, tokens[: self._block_bytes])
            node.is_recalled = is_recalled
        node.tokens += tokens
        node.block_ids += block_ids
        node.hashes += b"".join(hashes)
        node.last_used = self._tick
        self._policy.inserted(node, hashes)
        return node

    def _add_child(self, parent: RadixNode, key: bytes) -> RadixNode:
        depth = parent.depth + len(parent.block_ids)
        child = RadixNode(parent=parent, group=parent.group, depth=depth)
        parent.children[bytes(key)] = child
        insort(parent.sorted_keys, bytes(key))
        return child

    def _split(self, node: RadixNode, num_head_blocks: int) -> RadixNode:
        """Cut an edge in two and return its head, which becomes the parent of what was `node`.

        A head of the whole edge is the edge itself.
        """
        if num_head_blocks == len(node.block_ids):
            return node
        assert node.parent is not None
        head_bytes = num_head_blocks * self._block_bytes
        head = RadixNode(
            parent=node.parent,
            group=node.group,
            depth=node.depth,
            tokens=node.tokens[:head_bytes],
            hashes=node.hashes[: num_head_blocks * HASH_BYTES],
            block_ids=node.block_ids[:num_head_blocks],
            last_used=node.last_used,
            num_hits=node.num_hits,
            is_recalled=node.is_recalled,
        )
        node.parent.children[bytes(head.tokens[: self._block_bytes])] = head
        del node.tokens[:head_bytes], node.hashes[: num_head_blocks * HASH_BYTES]
        del node.block_ids[:num_head_blocks]
        node.parent = head
        node.depth += num_head_blocks
        key = bytes(node.tokens[: self._block_bytes])
        head.children[key] = node
        head.sorted_keys.append(key)
        self._policy.split(head, node)
        return head

    def _touch(self, node: RadixNode, is_reuse: bool) -> None:
        if node.last_used == self._tick:
            return
        node.last_used = self._tick
        node.num_hits += is_reuse
        self._policy.used(node, is_reuse)

    def _evict_from(self, node: RadixNode, num_wanted: int) -> int:
        evicted: list[bytes] = []
        while node.block_ids and len(evicted) < num_wanted:
            block_id = node.block_ids[-1]
            if self._pool.ref_count(block_id) > 0:
                break  # whoever uses it touches this path again when it is done
            node.block_ids.pop()
            evicted.append(bytes(node.hashes[-HASH_BYTES:]))
            if not node.block_ids:
                self._remove(node)
            del node.hashes[-HASH_BYTES:], node.tokens[-self._block_bytes :]
            self._pool.uncache(block_id)
        if not evicted:
            return 0
        self.num_blocks -= len(evicted)
        self._count(node.group, -len(evicted))
        self.num_evicted_total += len(evicted)
        self.digest ^= digest_of(evicted)
        self._changes.append(Change(ChangeKind.EVICTED, tuple(evicted)))
        self._policy.evicted(node, evicted)
        if node.block_ids and len(evicted) == num_wanted:
            self._policy.put_back(node)
        return len(evicted)

    def _remove(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None
        key = bytes(node.tokens[: self._block_bytes])
        del parent.children[key]
        del parent.sorted_keys[bisect_left(parent.sorted_keys, key)]
        if not parent.children:
            if parent.parent is not None:
                self._policy.exposed(parent)
            else:
                del self._roots[bytes(parent.hashes)]

    def _count(self, group: bytes, num_blocks: int) -> None:
        total = self._group_to_num_blocks.get(group, 0) + num_blocks
        if total:
            self._group_to_num_blocks[group] = total
        else:
            self._group_to_num_blocks.pop(group, None)

    def _nodes(self) -> Iterator[RadixNode]:
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
            assert node.sorted_keys == sorted(node.children)
            assert all(child.last_used <= node.last_used for child in node.children.values())
            num_blocks += len(node.block_ids)
            digest ^= digest_of(split_hashes(bytes(node.hashes)))
        assert num_blocks == self.num_blocks
        assert digest == self.digest
        num_cached = sum(self._pool.is_cached(b) for b in range(self._pool.num_blocks))
        assert num_cached == num_blocks, "the pool's marks and the tree differ"
        assert sum(self._group_to_num_blocks.values()) == num_blocks
        self._policy.check_invariants()
