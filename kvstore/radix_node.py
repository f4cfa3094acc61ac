"""One edge of the radix tree with the node at its end, as the tree and its eviction policies see it; and ways down."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.prefix_hash import TOKEN_BYTES


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of whole blocks. Written by the tree alone; policies read it.

    `group` is what quotas are counted by: the root's hash, or nothing where there are no quotas.
    """

    parent: "RadixNode | None"
    group: bytes = b""
    depth: int = 0  # blocks between the root and this edge
    tokens: bytearray = field(default_factory=bytearray)  # packed; len(block_ids) whole blocks
    hashes: bytearray = field(default_factory=bytearray)  # of each block; of a root: the root hash
    block_ids: list[int] = field(default_factory=list)
    children: dict[bytes, "RadixNode"] = field(default_factory=dict)
    # The keys of `children` in bytewise order. Of all keys, one beside the place where a text would be put
    # shares the longest head with it, in bytes and therefore also in whole tokens.
    sorted_keys: list[bytes] = field(default_factory=list)
    last_used: int = 0  # the tree's clock, in matches and inserts
    num_hits: int = 0  # how many requests found it here
    is_recalled: bool = False  # computed again while its policy remembered it

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    @property
    def is_leaf(self) -> bool:
        """Whether its tail block could be evicted: it is still in the tree, and nothing hangs on it."""
        return bool(self.block_ids) and not self.children


@dataclass(frozen=True, slots=True)
class Step:
    """The first `num_blocks` blocks (at least 1) of `node`'s edge go on with a text."""

    node: RadixNode
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Nearest:
    """`node`'s first block begins with `num_tokens` (at least 1) tokens of a text."""

    node: RadixNode
    num_tokens: int


def walk(start: RadixNode | None, tokens: bytes, block_bytes: int) -> Iterator[Step]:
    """Down from a root along packed `tokens`, in whole blocks; ends at the first difference.

    The caller may split a step's edge before it asks for the next step.
    """
    node = start
    position = 0
    while node is not None:
        child = node.children.get(tokens[position : position + block_bytes])
        if child is None:
            return
        num_shared = _num_shared_blocks(child, tokens, position, block_bytes)
        position += num_shared * block_bytes
        is_whole = num_shared == child.num_blocks
        yield Step(child, num_shared)
        node = child if is_whole else None


def nearest_child(node: RadixNode, tokens: bytes) -> Nearest | None:
    """The child whose first block shares the most leading tokens with `tokens`, a block or less of them."""
    keys = node.sorted_keys
    place = bisect_left(keys, tokens)
    best_key, best_shared = b"", 0
    for key in keys[max(place - 1, 0) : place + 1]:
        num_shared = _num_shared_tokens(key, tokens)
        if num_shared > best_shared:
            best_key, best_shared = key, num_shared
    return None if best_shared == 0 else Nearest(node.children[best_key], best_shared)


def _num_shared_blocks(node: RadixNode, tokens: bytes, position: int, block_bytes: int) -> int:
    """Binary search over block borders; each probe is one memory compare."""
    remaining = (len(tokens) - position) // block_bytes
    low, high = 1, min(node.num_blocks, remaining)  # the first block matched by its key
    if node.tokens[: high * block_bytes] == tokens[position : position + high * block_bytes]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        span = middle * block_bytes
        if node.tokens[:span] == tokens[position : position + span]:
            low = middle
        else:
            high = middle - 1
    return low


def _num_shared_tokens(one: bytes, other: bytes) -> int:
    """How many leading tokens two packed texts have in common; the first differing bit tells."""
    size = min(len(one), len(other))
    difference = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    num_equal_bytes = size - (difference.bit_length() + 7) // 8
    return num_equal_bytes // TOKEN_BYTES
