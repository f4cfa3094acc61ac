"""The contract between the radix tree and whoever decides what it forgets.

The tree tells the policy what happens to its edges, and asks for a victim when memory is short. A policy only
ever names a leaf; the tree takes blocks from that leaf's tail, so that what is resident of a text stays a
contiguous head of it, and it takes none that is in use.

    tree                                     policy
    match, insert ── used(node) ───────────▶ recency, hit counts
           insert ── inserted(node) ───────▶ a leaf grew, or a new one is there
                     split(head, tail) ────▶ one edge became two; both keep its history
            evict ── victim(groups) ───────▶ names a leaf and forgets that it could be one …
                     evicted(node, hashes)   … these blocks of it are gone; `put_back` when some are left,
                     exposed(parent)         or its parent has become a leaf by it
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvstore.radix_node import RadixNode


@dataclass(frozen=True, slots=True)
class Regrets:
    """What a policy can say about its own mistakes, as far back as it remembers what it evicted.

    `age_to_num_blocks` counts blocks that were wanted again by how many blocks had been evicted since
    (rounded down to a power of two).
    """

    num_remembered: int
    num_evicted_total: int
    num_regretted_total: int
    age_to_num_blocks: dict[int, int]


@dataclass(frozen=True, slots=True)
class Victim:
    """Leaf `node` shall lose its tail, at most `num_blocks` blocks of it before the policy is asked again."""

    node: RadixNode
    num_blocks: int


class EvictionPolicy(ABC):
    """Ranks the leaves of one tree. An instance belongs to one tree and keeps what it needs of its nodes.

    Calls cost O(log n) amortized. A node may stop being a leaf, and be one again, without the policy being
    told; `RadixNode.is_leaf` is the truth, and is checked before a node is named.
    """

    @abstractmethod
    def used(self, node: RadixNode, is_reuse: bool) -> None:
        """`last_used` has moved; with `is_reuse` also `num_hits`. At most once for each operation and node."""

    @abstractmethod
    def inserted(self, node: RadixNode, hashes: list[bytes]) -> None:
        """Blocks with these hashes were appended to leaf `node`; all of its blocks, where it is new."""

    @abstractmethod
    def split(self, head: RadixNode, tail: RadixNode) -> None:
        """The first blocks of `tail` now belong to its new parent `head`, with the same statistics."""

    @abstractmethod
    def victim(self, groups: Collection[bytes] | None) -> Victim | None:
        """The leaf whose tail block is worth least, of these groups (None: of all).

        The policy does not name it again before it was used, inserted to, exposed or put back: whoever uses
        its blocks at the moment uses the path once more when done. None: no leaf is known.
        """

    @abstractmethod
    def put_back(self, node: RadixNode) -> None:
        """The victim is still a leaf that has blocks to give."""

    @abstractmethod
    def exposed(self, node: RadixNode) -> None:
        """Its last child is gone, so that it is a leaf now."""

    def evicted(self, node: RadixNode, hashes: list[bytes]) -> None:  # noqa: B027
        """Blocks with these hashes, the tail of `node`, are gone, last block first.

        The node keeps `num_blocks − len(hashes)` blocks, and is out of the tree when those are none.
        """

    @abstractmethod
    def rebuild(self, leaves: Iterable[RadixNode]) -> None:
        """Forget which leaves are known; these are all. For leaves whose use ended without a further use."""

    def cleared(self) -> None:
        """The tree is empty."""
        self.rebuild(())

    def num_remembered(self, hashes: list[bytes]) -> int:
        """How many of the first of these blocks, about to be inserted, had a past that the policy remembers.

        The tree gives those an edge of their own, because their statistics differ from the others'.
        """
        return 0

    def regrets(self) -> Regrets | None:
        """None: this policy remembers nothing of what it evicted."""
        return None

    def check_invariants(self) -> None:  # noqa: B027
        """Assert what must hold between any two calls; for tests."""
