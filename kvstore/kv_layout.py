"""How many bytes KV takes under each scheme."""

from dataclasses import dataclass
from enum import StrEnum

import torch


class KvDtype(StrEnum):
    """The pool's number format."""

    AUTO = "auto"  # the model's compute dtype
    FP8_E4M3 = "fp8_e4m3"  # float8 e4m3, one float32 scale a token and head


_SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class KvLayout:
    """The shape of a model's KV.

    Raises:
        ValueError: a count below 1.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: KvDtype
    compute_dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")

    @property
    def is_quantized(self) -> bool:
        return self.kv_dtype is KvDtype.FP8_E4M3

    @property
    def storage_dtype(self) -> torch.dtype:
        """What key and value tensors hold."""
        return torch.float8_e4m3fn if self.is_quantized else self.compute_dtype

    @property
    def bytes_per_token(self) -> int:
        """Key and value of one token over all layers, scales included."""
        vector_bytes = self.head_dim * self.storage_dtype.itemsize
        vector_bytes += _SCALE_BYTES if self.is_quantized else 0
        return 2 * self.num_layers * self.num_kv_heads * vector_bytes

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.bytes_per_token
