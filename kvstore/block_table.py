"""One sequence's map from token positions to blocks, and what a fork must copy."""

from dataclasses import dataclass, field

from kvstore.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block's content, all layers, before anything of the next step runs."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Fork:
    """A child table, and the one copy that makes its tail its own (None when the tail was full)."""

    table: "BlockTable"
    copy: BlockCopy | None


@dataclass(slots=True)
class BlockTable:
    """Blocks of one sequence, in order; each entry owns one reference in the pool.

    position p lives in slot  block_ids[p // block_size] · block_size + p % block_size

    `version` counts the changes other than growth, for those who keep a copy.
    """

    block_size: int
    block_ids: list[int] = field(default_factory=list)
    version: int = field(default=0, compare=False)

    @property
    def num_slots(self) -> int:
        """Token positions that fit now."""
        return len(self.block_ids) * self.block_size

    def num_blocks_to_hold(self, num_tokens: int) -> int:
        """How many more blocks are needed until `num_tokens` tokens fit."""
        return max(0, -(-num_tokens // self.block_size) - len(self.block_ids))

    def slot(self, position: int) -> int:
        return (
            self.block_ids[position // self.block_size] * self.block_size
            + position % self.block_size
        )

    def append(self, block_ids: list[int]) -> None:
        """Take over blocks that the caller allocated or acquired."""
        self.block_ids.extend(block_ids)

    def replace(self, index: int, block_id: int, pool: BlockPool) -> None:
        """Point at an equal block (same tokens, same positions) and give the own copy back."""
        pool.acquire((block_id,))
        pool.release((self.block_ids[index],))
        self.block_ids[index] = block_id
        self.version += 1

    def fork(self, num_tokens: int, pool: BlockPool) -> Fork:
        """Share every full block of the first `num_tokens` positions; copy at most the one partial block.

        The caller has made sure that one block is free when `num_tokens` is no multiple of the block size.
        """
        num_full, num_partial_tokens = divmod(num_tokens, self.block_size)
        shared = self.block_ids[:num_full]
        pool.acquire(shared)
        child = BlockTable(self.block_size, list(shared))
        if num_partial_tokens == 0:
            return Fork(child, None)
        child.append(pool.allocate(1))
        return Fork(child, BlockCopy(self.block_ids[num_full], child.block_ids[num_full]))

    def release(self, pool: BlockPool) -> None:
        """Give all references back; the table is empty afterwards."""
        pool.release(self.block_ids)
        self.block_ids = []
        self.version += 1
