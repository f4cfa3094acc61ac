"""S3-FIFO (Yang et al., SOSP'23) over the leaves of a tree.

new ──▶ small (a tenth of all blocks) ── found twice ──▶ main ──┐ found: once more round
          │ not                             ▲             └◀────┘
          ▼                                 │               │ not
        forgotten, but remembered ── computed again         ▼ forgotten
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kvstore.eviction.ghosts import GhostList
from kvstore.eviction.policy import EvictionPolicy, Regrets, Victim
from kvstore.radix_node import RadixNode

_MAX_COUNT = 3


@dataclass(slots=True)
class _State:
    num_uses: int = 0
    is_main: bool = False
    is_queued: bool = False


@dataclass(slots=True)
class _Queues:
    """Leaves of one group, oldest first; the counts are of all its blocks, inner nodes' too."""

    small: deque[RadixNode] = field(default_factory=deque)
    main: deque[RadixNode] = field(default_factory=deque)
    num_small: int = 0
    num_main: int = 0


class S3FifoPolicy(EvictionPolicy):
    """Quick to forget what was never found again. Between groups, the one with most blocks loses.

    Args:
        small_share: of all blocks, for the small queue.
        num_uses_to_promote: hits in the small queue that earn a place in the main one.
    """

    def __init__(self, small_share: float = 0.1, num_uses_to_promote: int = 2) -> None:
        if not 0 <= small_share <= 1:
            raise ValueError(f"small_share must lie between 0 and 1, not {small_share}")
        self._small_share = small_share
        self._num_uses_to_promote = num_uses_to_promote
        self._group_to_queues: dict[bytes, _Queues] = {}
        self._node_to_state: dict[RadixNode, _State] = {}
        self._ghosts: GhostList[None] = GhostList()
        self._num_main = 0

    def used(self, node: RadixNode, is_reuse: bool) -> None:
        state = self._node_to_state[node]
        if is_reuse:
            state.num_uses = min(state.num_uses + 1, _MAX_COUNT)
        self.put_back(node)

    def inserted(self, node: RadixNode, hashes: list[bytes]) -> None:
        is_remembered = self.num_remembered(hashes[:1]) > 0
        for prefix_hash in hashes:
            self._ghosts.take(prefix_hash)
        if node not in self._node_to_state:
            self._node_to_state[node] = _State(is_main=is_remembered)
        self._count(node, len(hashes))
        self.put_back(node)

    def split(self, head: RadixNode, tail: RadixNode) -> None:
        state = self._node_to_state[tail]
        self._node_to_state[head] = _State(state.num_uses, state.is_main)

    def victim(self, groups: Collection[bytes] | None) -> Victim | None:
        all_queues = self._group_to_queues
        names = [g for g in (all_queues if groups is None else groups) if g in all_queues]
        for queues in sorted(
            (all_queues[g] for g in names), key=lambda q: -q.num_small - q.num_main
        ):
            node = self._next(queues)
            if node is not None:
                return Victim(node, node.num_blocks)
        return None

    def put_back(self, node: RadixNode) -> None:
        state = self._node_to_state[node]
        if node.is_leaf and not state.is_queued:
            state.is_queued = True
            self._queue(node, state).append(node)

    def exposed(self, node: RadixNode) -> None:
        """It is older than anything that hung on it: next in its queue."""
        state = self._node_to_state[node]
        if not state.is_queued:
            state.is_queued = True
            self._queue(node, state).appendleft(node)

    def evicted(self, node: RadixNode, hashes: list[bytes]) -> None:
        self._count(node, -len(hashes))
        self._ghosts.add(hashes, None)
        self._ghosts.trim(self._num_main)
        if not node.block_ids:
            del self._node_to_state[node]

    def rebuild(self, leaves: Iterable[RadixNode]) -> None:
        for queues in self._group_to_queues.values():
            queues.small.clear()
            queues.main.clear()
        for state in self._node_to_state.values():
            state.is_queued = False
        for node in leaves:
            self.put_back(node)

    def cleared(self) -> None:
        self._group_to_queues.clear()
        self._node_to_state.clear()
        self._ghosts.trim(0)
        self._num_main = 0

    def num_remembered(self, hashes: list[bytes]) -> int:
        return self._ghosts.num_known(hashes)

    def regrets(self) -> Regrets:
        return self._ghosts.regrets()

    def _next(self, queues: _Queues) -> RadixNode | None:
        while queues.small or queues.main:
            limit = self._small_share * (queues.num_small + queues.num_main)
            takes_small = bool(queues.small) and (queues.num_small >= limit or not queues.main)
            node = (queues.small if takes_small else queues.main).popleft()
            state = self._node_to_state.get(node)
            if state is None:
                continue
            state.is_queued = False
            if not node.is_leaf:
                continue  # queued again when it is exposed
            if takes_small and state.num_uses >= self._num_uses_to_promote:
                self._promote(node, state)
            elif not takes_small and state.num_uses > 0:
                state.num_uses -= 1
                self.put_back(node)
            else:
                return node
        return None

    def _promote(self, node: RadixNode, state: _State) -> None:
        self._count(node, -node.num_blocks)
        state.is_main, state.num_uses = True, 0
        self._count(node, node.num_blocks)
        self.put_back(node)

    def _queue(self, node: RadixNode, state: _State) -> deque[RadixNode]:
        queues = self._group_to_queues[node.group]
        return queues.main if state.is_main else queues.small

    def _count(self, node: RadixNode, num_blocks: int) -> None:
        queues = self._group_to_queues.setdefault(node.group, _Queues())
        if self._node_to_state[node].is_main:
            queues.num_main += num_blocks
            self._num_main += num_blocks
        else:
            queues.num_small += num_blocks

    def check_invariants(self) -> None:
        counts = {True: 0, False: 0}
        for node, state in self._node_to_state.items():
            assert node.block_ids, "the state of an edge that is gone"
            counts[state.is_main] += node.num_blocks
        assert counts[True] == self._num_main
        all_queues = self._group_to_queues.values()
        assert counts[True] == sum(queues.num_main for queues in all_queues)
        assert counts[False] == sum(queues.num_small for queues in all_queues)
        assert len(self._ghosts) <= self._num_main
