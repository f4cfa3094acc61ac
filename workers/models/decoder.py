"""The Llama family: pre-norm decoder layers over a paged KV pool."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.batch import AttentionBatch
from kernels.paged_cache import PagedCache
from kvstore.kv_pool import KvPool
from workers.layers.attention import Attention
from workers.layers.linear import Projection
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
        self,
        hidden: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        batch: AttentionBatch,
        cache: PagedCache,
    ) -> Tensor:
        """What this layer's second half adds to the residual stream.

        Adding is left to the next norm, which reads the stream anyway: `hidden` is changed in place, and
        `delta` is what the layer before left to be added.
        """
        norm = self.attention_norm
        normed = norm(hidden) if delta is None else norm.add(hidden, delta)
        attended = self.attention(normed, rotation, batch, cache)
        return self.mlp(self.mlp_norm.add(hidden, attended))


@dataclass(frozen=True, eq=False)
class CausalLM:
    """A decoder-only language model with its weights.

    Callers should be in `torch.inference_mode()`; no weight asks for a gradient.

    Attributes:
        embedding: [vocab_size, hidden_size].
        head: the projection to the vocabulary, of `embedding` itself in a tied model.
    """

    spec: ModelSpec
    embedding: Tensor
    rotary: RotaryEmbedding
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    head: Projection

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
        delta: Tensor | None = None
        for layer, cache in zip(self.layers, pool.layers, strict=True):
            delta = layer(hidden, delta, rotation, batch, cache)
        return self.norm(hidden) if delta is None else self.norm.add(hidden, delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] → float32 [n, vocab_size]. Pass only the rows that will be sampled."""
        return self.head(hidden).float()
