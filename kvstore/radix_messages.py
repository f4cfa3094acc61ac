"""What the radix tree answers and reports."""

from dataclasses import dataclass
from enum import StrEnum

from kvstore.radix_node import RadixNode


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
class PartialBlock:
    """A known block whose first `num_tokens` tokens (at least 1, less than asked for in all) go on where
    the whole blocks end. To be copied, never shared: what follows in it is another text's."""

    block_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest known prefix: whole blocks, first block first, and what goes on inside the next one.

    No reference was taken.
    """

    block_ids: tuple[int, ...]
    partial: PartialBlock | None = None


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Position `index` of the inserted path was known already, in another block."""

    index: int
    block_id: int


@dataclass(frozen=True, slots=True)
class Insertion:
    """What an offered path met. `end` is where it ends in the tree: from there it can be extended."""

    duplicates: list[Duplicate]
    end: RadixNode
