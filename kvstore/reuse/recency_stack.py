"""How many other blocks were used since a block's last use: the LRU stack distance, on a sample of blocks.

    deepest = next to be evicted                          newest
    | tail of an old prompt … its head | … | tail of the last prompt … its head |

A radix tree that evicts least recently used paths, leaves first, holds exactly the newest blocks of this order:
one prompt's blocks are used together, and of equals the deeper goes first. A block is therefore a hit in a pool
of C blocks when fewer than C others are newer (Mattson et al. 1970, for trees).

Blocks are sampled by their hash, so that all uses of one block are seen or none (SHARDS, FAST 2015). The rate
starts at 1 and halves whenever more than `max_samples` blocks are in the stack.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvstore.prefix_hash import HASH_BYTES

_KEY_BITS = 64
_KEYS_A_HASH = HASH_BYTES * 8 // _KEY_BITS


class RecencyStack:
    """The sampled blocks in the order of their last use.

    Args:
        max_samples: bounds the memory (some 200 bytes each) and sets the accuracy.
        max_distance: blocks that lie deeper are forgotten: no pool of interest would still hold them.
    """

    def __init__(self, max_samples: int, max_distance: int) -> None:
        if max_samples < 2 or max_distance < 1:
            raise ValueError(
                f"max_samples must be at least 2 and max_distance at least 1, not {max_samples} and {max_distance}"
            )
        self._max_samples = max_samples
        self._max_distance = max_distance
        self._halvings = 0
        self._threshold = 1 << _KEY_BITS
        # Oldest first, both; positions only ever grow.
        self._key_to_position: OrderedDict[int, int] = OrderedDict()
        self._positions: list[int] = []
        self._next_position = 0

    @property
    def weight(self) -> int:
        """How many blocks one sampled block stands for; 1 / rate."""
        return 1 << self._halvings

    def __len__(self) -> int:
        return len(self._positions)

    def sample(self, hashes: bytes) -> list[int]:
        """Keys of the sampled blocks among concatenated prefix hashes, in their order."""
        words = array("Q", hashes)
        threshold = self._threshold
        return [key for key in words[::_KEYS_A_HASH] if key < threshold]

    def is_sampled(self, key: int) -> bool:
        """Whether `key`, sampled once, would be sampled at today's rate."""
        return key < self._threshold

    def distances(self, keys: Iterable[int]) -> list[int | None]:
        """For each key, about how many blocks are newer; None for one that is not in the stack."""
        positions, weight = self._positions, self.weight
        newest_rank = len(positions) - 1
        found: list[int | None] = []
        index, last_position = 0, -1
        for key in keys:
            position = self._key_to_position.get(key)
            if position is None:
                found.append(None)
                continue
            # Blocks that were used together last time lie together: then one step replaces the search.
            index = index - 1 if position == last_position - 1 else bisect_left(positions, position)
            last_position = position
            found.append((newest_rank - index) * weight)
        return found

    def use(self, keys: Sequence[int]) -> bool:
        """Make the sampled blocks of one path, first block first, the newest. Whether one of them was unknown."""
        num_left = len(self._positions)
        self._lift(keys)
        has_new = len(self._positions) + len(keys) > num_left
        begin, end = self._next_position, self._next_position + len(keys)
        self._key_to_position.update(zip(reversed(keys), range(begin, end), strict=True))
        self._positions.extend(range(begin, end))
        self._next_position = end
        self._shrink()
        return has_new

    def _lift(self, keys: Sequence[int]) -> None:
        """Take the keys out, a run of adjacent positions at a time."""
        pop = self._key_to_position.pop
        low, length = -1, 0
        for key in keys:
            position = pop(key, None)
            if position is None:
                continue
            if position != low - 1:
                self._cut(low, length)
                length = 0
            low = position
            length += 1
        self._cut(low, length)

    def _cut(self, low: int, length: int) -> None:
        if length:
            index = bisect_left(self._positions, low)
            del self._positions[index : index + length]

    def _shrink(self) -> None:
        num_too_deep = len(self._positions) - (self._max_distance // self.weight + 1)
        for _ in range(num_too_deep):
            self._key_to_position.popitem(last=False)
        if num_too_deep > 0:
            del self._positions[:num_too_deep]
        while len(self._positions) > self._max_samples:
            self._halvings += 1
            self._threshold >>= 1
            for key in [k for k in self._key_to_position if k >= self._threshold]:
                del self._key_to_position[key]
            self._positions = list(self._key_to_position.values())

    def check_invariants(self) -> None:
        assert list(self._key_to_position.values()) == self._positions == sorted(self._positions)
        assert len(self._positions) <= self._max_samples
        assert all(self.is_sampled(key) for key in self._key_to_position)
