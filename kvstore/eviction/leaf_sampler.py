"""Leaves of a tree, drawn at random in constant time."""

import random
from collections.abc import Collection, Iterator

from kvstore.radix_node import RadixNode


class LeafSampler:
    """Nodes that were leaves when added; those that are none any more drop out when they are drawn.

    Args:
        randomness: where the draws come from.
    """

    def __init__(self, randomness: random.Random) -> None:
        self._random = randomness
        self._group_to_leaves: dict[bytes, list[RadixNode]] = {}
        self._node_to_place: dict[RadixNode, int] = {}

    def __contains__(self, node: RadixNode) -> bool:
        return node in self._node_to_place

    def add(self, node: RadixNode) -> None:
        """Does nothing for a node that is no leaf, or was added before."""
        if node.is_leaf and node not in self._node_to_place:
            leaves = self._group_to_leaves.setdefault(node.group, [])
            self._node_to_place[node] = len(leaves)
            leaves.append(node)

    def discard(self, node: RadixNode) -> None:
        place = self._node_to_place.pop(node, None)
        if place is None:
            return
        leaves = self._group_to_leaves[node.group]
        last = leaves.pop()
        if last is not node:
            leaves[place] = last
            self._node_to_place[last] = place
        if not leaves:
            del self._group_to_leaves[node.group]

    def sample(self, groups: Collection[bytes] | None, num_leaves: int) -> Iterator[RadixNode]:
        """Up to `num_leaves` draws from these groups (None: from all); at least one leaf where there is one."""
        while True:
            drawn = self._draw(groups, num_leaves)
            leaves = [node for node in drawn if node.is_leaf]
            for node in drawn:
                if not node.is_leaf:
                    self.discard(node)
            if leaves or not drawn:
                yield from leaves
                return

    def clear(self) -> None:
        self._group_to_leaves.clear()
        self._node_to_place.clear()

    def _draw(self, groups: Collection[bytes] | None, num_leaves: int) -> list[RadixNode]:
        names = self._group_to_leaves if groups is None else groups
        lists = [self._group_to_leaves[name] for name in names if name in self._group_to_leaves]
        num_known = sum(map(len, lists))
        if num_known <= num_leaves:
            return [node for leaves in lists for node in leaves]
        if len(lists) > 1:
            lists = self._random.choices(lists, weights=list(map(len, lists)), k=num_leaves)
        else:
            lists *= num_leaves
        draw = self._random.random
        return [leaves[int(draw() * len(leaves))] for leaves in lists]
