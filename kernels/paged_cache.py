"""One layer's share of the KV pool, as tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PagedCache:
    """Keys (already rotated) and values of one layer.

    Attributes:
        key, value: [num_blocks, block_size, num_kv_heads, head_dim], the compute dtype or float8_e4m3fn.
        key_scale, value_scale: float32 [num_blocks, block_size, num_kv_heads] beside float8 tensors, else
            None. A stored number stands for `number * scale`.

    Slots no sequence wrote hold garbage, NaN included; no reader may let them reach a result.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def is_quantized(self) -> bool:
        return self.key.dtype == torch.float8_e4m3fn

    def tensors(self) -> list[Tensor]:
        """All tensors, each with the block as its first axis."""
        scales = [self.key_scale, self.value_scale]
        return [self.key, self.value, *(scale for scale in scales if scale is not None)]
