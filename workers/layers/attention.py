"""Grouped-query attention (arXiv 2305.13245) over the paged pool."""

from dataclasses import dataclass

from torch import Tensor

from kernels import dispatch
from kernels.batch import AttentionBatch
from kernels.paged_cache import PagedCache
from workers.layers.linear import Projection
from workers.layers.norm import RmsNorm
from workers.layers.rotary import Rotation


@dataclass(frozen=True, eq=False)
class Attention:
    """One layer's attention.

    Attributes:
        qkv: rows of all query heads, then all key heads, then all value heads.
        qk_norm: weight [num_q_heads + num_kv_heads, head_dim], applied before the rotation; or None.
        sliding_window: how many tokens a row sees, itself included; None: all.
    """

    qkv: Projection
    output: Projection
    qk_norm: RmsNorm | None
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None

    def __call__(
        self, x: Tensor, rotation: Rotation, batch: AttentionBatch, cache: PagedCache
    ) -> Tensor:
        """x [num_tokens, hidden_size] → same; writes this step's keys and values into `cache`."""
        num_tokens = x.shape[0]
        num_rotated = self.num_q_heads + self.num_kv_heads
        heads = self.qkv(x).view(num_tokens, num_rotated + self.num_kv_heads, self.head_dim)
        if self.qk_norm is not None:
            heads[:, :num_rotated] = self.qk_norm(heads[:, :num_rotated])
        query = dispatch.rotate_and_write(
            heads, rotation.cos, rotation.sin, cache, batch.slots, num_q_heads=self.num_q_heads
        )
        attended = dispatch.paged_attention(
            query, cache, batch, scale=self.head_dim**-0.5, sliding_window=self.sliding_window
        )
        return self.output(attended.reshape(num_tokens, self.num_q_heads * self.head_dim))
