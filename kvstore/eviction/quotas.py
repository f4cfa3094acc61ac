"""How many blocks each root may keep, whatever the others do."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on one root's cached blocks; in-use blocks count, and are never evicted for a ceiling's sake.

    floor: others' evictions leave it at least this many blocks.
    ceiling: while it holds more, its own blocks go first. None: no ceiling.
    """

    floor: int = 0
    ceiling: int | None = None

    def __post_init__(self) -> None:
        if self.floor < 0:
            raise ValueError(f"floor must be at least 0, not {self.floor}")
        if self.ceiling is not None and self.ceiling < self.floor:
            raise ValueError(f"ceiling {self.ceiling} is below floor {self.floor}")


@dataclass(frozen=True, slots=True)
class Quotas:
    """A quota for each root that has one, and one for every other root."""

    root_to_quota: Mapping[bytes, Quota] = field(default_factory=dict)
    default: Quota = field(default_factory=Quota)

    def of(self, root: bytes) -> Quota:
        return self.root_to_quota.get(root, self.default)

    def takeable(self, root_to_num_blocks: Mapping[bytes, int]) -> dict[bytes, int]:
        """Root to the number of its blocks above its floor, for roots that have any."""
        root_to_num = {r: n - self.of(r).floor for r, n in root_to_num_blocks.items()}
        return {root: num for root, num in root_to_num.items() if num > 0}

    def excess(self, root_to_num_blocks: Mapping[bytes, int]) -> dict[bytes, int]:
        """Root to the number of its blocks above its ceiling, for roots that have any."""
        root_to_excess: dict[bytes, int] = {}
        for root, num_blocks in root_to_num_blocks.items():
            ceiling = self.of(root).ceiling
            if ceiling is not None and num_blocks > ceiling:
                root_to_excess[root] = num_blocks - ceiling
        return root_to_excess

    def num_held_back(self, root_to_num_blocks: Mapping[bytes, int]) -> int:
        """At most so many idle blocks are out of an eviction's reach."""
        return sum(min(self.of(root).floor, num) for root, num in root_to_num_blocks.items())
