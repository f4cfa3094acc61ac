"""Our own policy: keep what is expected to be used again soonest for the memory it holds, by what was measured.

In the spirit of LHD (Beckmann et al., NSDI'18), with three changes. Reuse is watched beyond eviction, through a
ghost list, so that the estimate does not depend on what the policy itself threw away. A block is worth the best
rate of hits that waiting for it could bring, not the rate under today's evictions (`ReuseAges.worth`). And its
class comes from its place in the tree:

    how often its run of blocks was found, evictions in between included       0, 1, 2, 3, 4 and more
    whether another text turned off before it, after it was last used          what was said instead
    whether it is the last block of a text that was never found                 seldom asked for again whole

A victim is the worst of a bounded number of leaves drawn at random.
"""

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

from kvstore.eviction.ghosts import GhostList
from kvstore.eviction.leaf_sampler import LeafSampler
from kvstore.eviction.policy import EvictionPolicy, Regrets, Victim
from kvstore.eviction.reuse_ages import ReuseAges, Span
from kvstore.radix_node import RadixNode

_MAX_HITS = 4


@dataclass(slots=True)
class _History:
    """Of one run of blocks. Its last block may have a span of its own: `end`."""

    span: Span
    end: Span | None = None
    num_hits: int = 0
    is_cut: bool = False

    @property
    def tail(self) -> Span:
        return self.span if self.end is None else self.end

    def key(self, is_end: bool = False) -> int:
        return min(self.num_hits, _MAX_HITS) + (_MAX_HITS + 1) * (self.is_cut + 2 * is_end)


@dataclass(frozen=True, slots=True)
class _Ghost:
    span: Span
    num_hits: int


class _Candidate(NamedTuple):
    worth: float
    since: int
    node: RadixNode
    span: Span


_worth_and_age = itemgetter(0, 1)


def same_cost(depth: int) -> float:
    """Every block costs the same to compute again."""
    return 1.0


class HitDensityPolicy(EvictionPolicy):
    """Expected hits for each block of memory and unit of time, times what computing the block again costs.

    Args:
        num_samples: leaves looked at for each victim.
        ghost_factor: evicted blocks remembered, in multiples of the most blocks the tree ever held, and
            `min_ghosts` at least: what a small cache forgets returns late. About 250 bytes each.
        cost: from a block's depth (blocks above it) to what computing it costs, in any unit. Attention
            makes deep blocks dearer; with equal costs the policy maximizes the number of hits.
        ages: what is known of reuse from the start; nothing by default.
        seed: of the draws.
    """

    def __init__(
        self,
        *,
        num_samples: int = 32,
        ghost_factor: float = 8.0,
        min_ghosts: int = 65_536,
        cost: Callable[[int], float] = same_cost,
        ages: ReuseAges | None = None,
        seed: int = 0,
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, not {num_samples}")
        if ghost_factor < 0:
            raise ValueError(f"ghost_factor must be at least 0, not {ghost_factor}")
        self._ages = ReuseAges() if ages is None else ages
        self._leaves = LeafSampler(random.Random(seed))
        self._num_samples = num_samples
        self._ghost_factor = ghost_factor
        self._cost = cost
        self._num_kept = max(num_samples // 16, 1)
        self._next: list[_Candidate] = []
        self._drawn_at = -1
        self._min_ghosts = min_ghosts
        self._node_to_history: dict[RadixNode, _History] = {}
        self._ghosts: GhostList[_Ghost] = GhostList(lambda ghost: self._ages.leave(ghost.span, 1))
        self._num_blocks = 0
        self._most_blocks = 0

    @property
    def ages(self) -> ReuseAges:
        return self._ages

    def used(self, node: RadixNode, is_reuse: bool) -> None:
        history = self._node_to_history[node]
        self._leaves.add(node)
        if is_reuse:
            for span, num_blocks in self._parts(node, history):
                self._ages.hit(span, num_blocks)
            history.num_hits += 1
            history.is_cut = False
            history.end = None
            self._start(node, history)
            self._ages.advance(node.num_blocks)
        elif history.span.since != self._ages.now:
            self._leave(node, history)
            self._start(node, history)

    def inserted(self, node: RadixNode, hashes: list[bytes]) -> None:
        self._num_blocks += len(hashes)
        self._most_blocks = max(self._most_blocks, self._num_blocks)
        history = self._node_to_history.get(node)
        if history is None:
            history = self._new_history(node, hashes)
        else:
            self._leave(node, history, num_new=len(hashes))
            self._recall(hashes)
            self._start(node, history)
        self._ages.advance(len(hashes))
        self._leaves.add(node)

    def split(self, head: RadixNode, tail: RadixNode) -> None:
        history = self._node_to_history[tail]
        self._node_to_history[head] = replace(history, end=None)
        # The tail's blocks are of another class from here on, and that class's age counts from here.
        self._leave(tail, history)
        history.is_cut = True
        self._start(tail, history)

    def victim(self, groups: Collection[bytes] | None) -> Victim | None:
        if not self._next or self._ages.now != self._drawn_at or groups is not None:
            self._draw(groups)
        while self._next:
            candidate = self._next.pop()
            node = candidate.node
            history = self._node_to_history.get(node)
            is_known = history is not None and node.is_leaf and node in self._leaves
            if history is not None and is_known and history.tail is candidate.span:
                self._leaves.discard(node)
                return Victim(node, node.num_blocks if history.end is None else 1)
            if not self._next:
                self._draw(groups)
        return None

    def _draw(self, groups: Collection[bytes] | None) -> None:
        """The worst of a sample, worst last. Until the clock moves they are the next ones to go."""
        histories, worth_of, cost = self._node_to_history, self._ages.worth, self._cost
        drawn: list[_Candidate] = []
        for node in self._leaves.sample(groups, self._num_samples):
            span = histories[node].tail
            worth = worth_of(span.key, span.since)
            if cost is not same_cost:
                worth *= cost(node.depth + len(node.block_ids) - 1)
            drawn.append(_Candidate(worth, span.since, node, span))
        drawn.sort(key=_worth_and_age, reverse=True)
        self._next = drawn[-self._num_kept :]
        self._drawn_at = self._ages.now

    def put_back(self, node: RadixNode) -> None:
        self._leaves.add(node)

    def exposed(self, node: RadixNode) -> None:
        self._leaves.add(node)

    def evicted(self, node: RadixNode, hashes: list[bytes]) -> None:
        self._num_blocks -= len(hashes)
        history = self._node_to_history[node]
        num_ends = 0
        if history.end is not None:
            self._ghosts.add(hashes[:1], _Ghost(history.end, history.num_hits))
            history.end = None
            num_ends = 1
        self._ghosts.add(hashes[num_ends:], _Ghost(history.span, history.num_hits))
        self._ghosts.trim(max(int(self._ghost_factor * self._most_blocks), self._min_ghosts))
        if not node.block_ids:
            del self._node_to_history[node]
            self._leaves.discard(node)

    def rebuild(self, leaves: Iterable[RadixNode]) -> None:
        self._leaves.clear()
        for node in leaves:
            self._leaves.add(node)

    def cleared(self) -> None:
        """What was learned stays; no block of before will be used again."""
        self._leaves.clear()
        for node, history in self._node_to_history.items():
            self._leave(node, history)
        self._node_to_history.clear()
        self._ghosts.trim(0)
        self._num_blocks = 0

    def num_remembered(self, hashes: list[bytes]) -> int:
        return self._ghosts.num_known(hashes)

    def regrets(self) -> Regrets:
        return self._ghosts.regrets()

    def _new_history(self, node: RadixNode, hashes: list[bytes]) -> _History:
        first = self._recall(hashes)
        history = _History(span=self._ages.start(0, 0))
        if first is not None:
            history.num_hits = first.num_hits + 1
        else:
            history.end = history.span
        self._start(node, history)
        self._node_to_history[node] = history
        return history

    def _recall(self, hashes: list[bytes]) -> _Ghost | None:
        """Blocks computed again are reuse that eviction made a miss of. The first block's past, if it has one."""
        first = None
        for index, prefix_hash in enumerate(hashes):
            ghost = self._ghosts.take(prefix_hash)
            if ghost is not None:
                self._ages.hit(ghost.span, 1)
                first = ghost if index == 0 else first
        return first

    def _parts(
        self, node: RadixNode, history: _History, num_new: int = 0
    ) -> list[tuple[Span, int]]:
        num_blocks = node.num_blocks - num_new
        if history.end is None:
            return [(history.span, num_blocks)]
        return [(history.span, num_blocks - 1), (history.end, 1)]

    def _leave(self, node: RadixNode, history: _History, num_new: int = 0) -> None:
        for span, num_blocks in self._parts(node, history, num_new):
            self._ages.leave(span, num_blocks)

    def _start(self, node: RadixNode, history: _History) -> None:
        has_end = history.end is not None
        history.span = self._ages.start(history.key(), node.num_blocks - has_end)
        if has_end:
            history.end = self._ages.start(history.key(is_end=True), 1)

    def check_invariants(self) -> None:
        assert self._num_blocks == sum(node.num_blocks for node in self._node_to_history)
        assert len(self._ghosts) <= max(self._ghost_factor * self._most_blocks, self._min_ghosts)
        assert all(node.block_ids for node in self._node_to_history)
        span_to_num: dict[Span, int] = {}
        for node, history in self._node_to_history.items():
            for span, num_blocks in self._parts(node, history):
                span_to_num[span] = span_to_num.get(span, 0) + num_blocks
        for ghost in self._ghosts.pasts():
            span_to_num[ghost.span] = span_to_num.get(ghost.span, 0) + 1
        assert all(span.num_blocks == num for span, num in span_to_num.items())
