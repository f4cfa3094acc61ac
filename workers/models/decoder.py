"""The Llama family: pre-norm decoder layers over a paged KV pool."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.batch import AttentionBatch
from kernels.paged_cache import PagedCache
from kvstore.kv_pool import KvPool
from workers.layers.attention import Attention
from workers.layers.linear import Linear
from workers.layers.mlp import GatedMlp
from workers.layers.norm import RmsNorm
from workers.layers.rotary import RotaryEmbedding, Rotation
from workers.models.spec import ModelSpec


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    attention_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: GatedMlp

    def __call__(
        self, hidden: Tensor, rotation: Rotation, batch: AttentionBatch, cache: PagedCache
    ) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, batch, cache)
        return hidden + self.mlp(self.mlp_norm(hidden))


@dataclass(frozen=True, eq=False)
class CausalLM:
    """A decoder-only language model with its weights.

    Callers should be in `torch.inference_mode()`; no weight asks for a gradient.

    Attributes:
        embedding: [vocab_size, hidden_size].
        head: the projection to the vocabulary; its weight is `embedding` itself in a tied model.
    """

    spec: ModelSpec
    embedding: Tensor
    rotary: RotaryEmbedding
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    head: Linear

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, pool: KvPool
    ) -> Tensor:
        """One step over a ragged batch; writes its keys and values into `pool`.

        Args:
            token_ids, positions: int64 [num_tokens]; the rows `batch` describes, each with its position
                in its own sequence.

        Returns:
            [num_tokens, hidden_size], after the last norm.
        """
        hidden = functional.embedding(token_ids, self.embedding)
        rotation = self.rotary(positions)
        for layer, cache in zip(self.layers, pool.layers, strict=True):
            hidden = layer(hidden, rotation, batch, cache)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] → float32 [n, vocab_size]. Pass only the rows that will be sampled."""
        return self.head(hidden).float()
