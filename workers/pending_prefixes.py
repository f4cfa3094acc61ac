"""Blocks that running sequences are about to seal, so that siblings can wait for them instead of computing them too."""

from collections import Counter
from collections.abc import Iterable


class PendingPrefixes:
    """A multiset of prefix hashes: announced when a sequence starts, settled as its blocks are sealed or given up."""

    def __init__(self) -> None:
        self._hash_to_count: Counter[bytes] = Counter()

    def __contains__(self, prefix_hash: bytes) -> bool:
        return prefix_hash in self._hash_to_count

    @property
    def num_announced(self) -> int:
        """Announcements not settled yet, equal ones counted apart."""
        return self._hash_to_count.total()

    def announce(self, hashes: Iterable[bytes]) -> None:
        self._hash_to_count.update(hashes)

    def settle(self, hashes: Iterable[bytes]) -> None:
        """Each must have been announced as often as it is settled."""
        for prefix_hash in hashes:
            count = self._hash_to_count[prefix_hash]
            assert count > 0, "settled more often than announced"
            if count == 1:
                del self._hash_to_count[prefix_hash]
            else:
                self._hash_to_count[prefix_hash] = count - 1
