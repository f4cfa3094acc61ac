"""The tensors behind the block ids."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import dispatch
from kernels.paged_cache import PagedCache
from kvstore.kv_layout import KvLayout


class KvPool:
    """Keys and values of `num_blocks` blocks in every layer.

    Memory is taken at once and not initialized: contents count only where a sequence has written them.

    Raises:
        ValueError: `num_blocks` below 1.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1; got {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self.layers: tuple[PagedCache, ...] = tuple(
            self._new_layer() for _ in range(layout.num_layers)
        )

    def _new_layer(self) -> PagedCache:
        layout = self.layout
        slots = (self.num_blocks, layout.block_size, layout.num_kv_heads)

        def vectors() -> Tensor:
            shape = (*slots, layout.head_dim)
            return torch.empty(shape, dtype=layout.storage_dtype, device=self.device)

        def scales() -> Tensor | None:
            if not layout.is_quantized:
                return None
            return torch.empty(slots, dtype=torch.float32, device=self.device)

        return PagedCache(vectors(), vectors(), scales(), scales())

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def layer(self, index: int) -> PagedCache:
        """The share of layer `index`, 0 … num_layers - 1."""
        return self.layers[index]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies block source → target in every layer. All sources are read before any target is written.

        Raises:
            ValueError: a block id outside the pool, or a target named twice.
        """
        if not pairs:
            return
        for pair in pairs:
            if not all(0 <= block < self.num_blocks for block in pair):
                raise ValueError(f"copy {pair} leaves the pool's blocks 0…{self.num_blocks - 1}")
        if len({target for _, target in pairs}) < len(pairs):
            raise ValueError(f"a block is the target of two copies: {list(pairs)}")
        sources, targets = torch.tensor(pairs, device=self.device).unbind(1)
        dispatch.copy_blocks(self.layers, sources, targets)
