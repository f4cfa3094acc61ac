"""Policies that rank a leaf by what is known of it alone, so that a heap orders them: LRU, LFU, SLRU."""

import heapq
from abc import abstractmethod
from collections.abc import Collection, Iterable
from itertools import count

from kvstore.eviction.ghosts import GhostList
from kvstore.eviction.policy import EvictionPolicy, Regrets, Victim
from kvstore.radix_node import RadixNode

Rank = tuple[int, int]
_Entry = tuple[Rank, int, RadixNode]


class RankedPolicy(EvictionPolicy):
    """A heap of leaves for each group. An entry is stale when its node is ranked otherwise by now, or no leaf."""

    def __init__(self) -> None:
        self._numbers = count()  # decides between equals as they came
        self._group_to_heap: dict[bytes, list[_Entry]] = {}
        self._group_to_limit: dict[bytes, int] = {}  # of a heap's length before it is cleaned

    @abstractmethod
    def rank(self, node: RadixNode) -> Rank:
        """Lowest goes first."""

    def used(self, node: RadixNode, is_reuse: bool) -> None:
        if not node.children:
            self.put_back(node)

    def inserted(self, node: RadixNode, hashes: list[bytes]) -> None:
        self.put_back(node)

    def split(self, head: RadixNode, tail: RadixNode) -> None:
        pass  # `tail` is still the leaf it was, ranked as before

    def exposed(self, node: RadixNode) -> None:
        self.put_back(node)

    def victim(self, groups: Collection[bytes] | None) -> Victim | None:
        heaps = self._group_to_heap
        best: _Entry | None = None
        best_group = b""
        for group in list(heaps if groups is None else groups):
            first = self._first(group)
            if first is not None and (best is None or first < best):
                best, best_group = first, group
        if best is None:
            return None
        heapq.heappop(heaps[best_group])
        return Victim(best[2], best[2].num_blocks)

    def put_back(self, node: RadixNode) -> None:
        heap = self._group_to_heap.setdefault(node.group, [])
        if len(heap) > self._group_to_limit.get(node.group, 64):
            heap[:] = [entry for entry in heap if self._is_current(entry)]
            heapq.heapify(heap)
            self._group_to_limit[node.group] = 2 * len(heap) + 64
        heapq.heappush(heap, (self.rank(node), next(self._numbers), node))

    def rebuild(self, leaves: Iterable[RadixNode]) -> None:
        self._group_to_heap.clear()
        self._group_to_limit.clear()
        for node in leaves:
            self.put_back(node)

    def _first(self, group: bytes) -> _Entry | None:
        heap = self._group_to_heap.get(group)
        while heap:
            if self._is_current(heap[0]):
                return heap[0]
            heapq.heappop(heap)
        self._group_to_heap.pop(group, None)
        self._group_to_limit.pop(group, None)
        return None

    def _is_current(self, entry: _Entry) -> bool:
        rank, _, node = entry
        return node.is_leaf and rank == self.rank(node)


class LruPolicy(RankedPolicy):
    """Least recently used first."""

    def rank(self, node: RadixNode) -> Rank:
        return (node.last_used, 0)


class LfuPolicy(RankedPolicy):
    """Least often found first, among equals least recently used.

    Args:
        num_remembered_blocks: evicted blocks whose counts go on when they are computed again, each time
            as one hit more; none by default.
    """

    def __init__(self, num_remembered_blocks: int = 0) -> None:
        super().__init__()
        if num_remembered_blocks < 0:
            raise ValueError(
                f"num_remembered_blocks must be at least 0, not {num_remembered_blocks}"
            )
        self._num_remembered = num_remembered_blocks
        self._ghosts: GhostList[int] = GhostList()
        self._node_to_earlier_hits: dict[RadixNode, int] = {}  # those before its last eviction

    def rank(self, node: RadixNode) -> Rank:
        return (node.num_hits + self._node_to_earlier_hits.get(node, 0), node.last_used)

    def inserted(self, node: RadixNode, hashes: list[bytes]) -> None:
        pasts = [self._ghosts.take(prefix_hash) for prefix_hash in hashes]
        if len(hashes) == node.num_blocks and pasts[0] is not None:
            self._node_to_earlier_hits[node] = pasts[0] + 1
        super().inserted(node, hashes)

    def split(self, head: RadixNode, tail: RadixNode) -> None:
        earlier = self._node_to_earlier_hits.get(tail)
        if earlier is not None:
            self._node_to_earlier_hits[head] = earlier

    def evicted(self, node: RadixNode, hashes: list[bytes]) -> None:
        if self._num_remembered:
            self._ghosts.add(hashes, self.rank(node)[0])
            self._ghosts.trim(self._num_remembered)
        if not node.block_ids:
            self._node_to_earlier_hits.pop(node, None)

    def cleared(self) -> None:
        super().cleared()
        self._node_to_earlier_hits.clear()
        self._ghosts.trim(0)

    def num_remembered(self, hashes: list[bytes]) -> int:
        return self._ghosts.num_known(hashes)

    def regrets(self) -> Regrets | None:
        return self._ghosts.regrets() if self._num_remembered else None


class SlruPolicy(RankedPolicy):
    """Segmented LRU (Karedla et al., IEEE Computer 1994): what was never found again goes first.

    A hit protects an edge. Protected edges hold at most `protected_share` of all blocks; beyond that the one
    used longest ago is on probation again, as recent as it is.
    """

    def __init__(self, protected_share: float = 0.8) -> None:
        super().__init__()
        if not 0 <= protected_share <= 1:
            raise ValueError(f"protected_share must lie between 0 and 1, not {protected_share}")
        self._share = protected_share
        self._protected: set[RadixNode] = set()
        self._by_age: list[
            tuple[int, int, RadixNode]
        ] = []  # (last_used, …) of protected ones, some stale
        self._num_protected = 0
        self._num_blocks = 0

    def rank(self, node: RadixNode) -> Rank:
        return (int(node in self._protected), node.last_used)

    def used(self, node: RadixNode, is_reuse: bool) -> None:
        if node in self._protected:
            self._remember_age(node)
        elif is_reuse:
            self._protected.add(node)
            self._remember_age(node)
            self._num_protected += node.num_blocks
            self._demote()
        super().used(node, is_reuse)

    def inserted(self, node: RadixNode, hashes: list[bytes]) -> None:
        self._num_blocks += len(hashes)
        if node in self._protected:
            self._num_protected += len(hashes)
        super().inserted(node, hashes)

    def split(self, head: RadixNode, tail: RadixNode) -> None:
        if tail in self._protected:
            self._protected.add(head)
            self._remember_age(head)

    def evicted(self, node: RadixNode, hashes: list[bytes]) -> None:
        self._num_blocks -= len(hashes)
        if node in self._protected:
            self._num_protected -= len(hashes)
            if not node.block_ids:
                self._protected.remove(node)

    def cleared(self) -> None:
        super().cleared()
        self._protected.clear()
        self._by_age.clear()
        self._num_protected = self._num_blocks = 0

    def _remember_age(self, node: RadixNode) -> None:
        if len(self._by_age) > 4 * len(self._protected) + 64:
            self._by_age = [(n.last_used, next(self._numbers), n) for n in self._protected]
            heapq.heapify(self._by_age)
        heapq.heappush(self._by_age, (node.last_used, next(self._numbers), node))

    def _demote(self) -> None:
        while self._num_protected > self._share * self._num_blocks and self._by_age:
            last_used, _, node = heapq.heappop(self._by_age)
            if node not in self._protected or node.last_used != last_used:
                continue
            self._protected.remove(node)
            self._num_protected -= node.num_blocks
            if node.is_leaf:
                self.put_back(node)

    def check_invariants(self) -> None:
        assert self._num_protected == sum(node.num_blocks for node in self._protected)
        assert all(node.block_ids for node in self._protected)
