"""What runs on a CUDA device."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels import reference
from kernels.batch import AttentionBatch
from kernels.gpu import activation, attention, block_copy, matmul, norm, rotary, sampling
from kernels.paged_cache import PagedCache


@dataclass(frozen=True)
class CudaBackend:
    """The operations of `kernels.dispatch` as Triton kernels, for compute capability 8.0 and above.

    None of them waits for the device. All but `copy_blocks` can be captured in a graph.

    Attributes:
        is_batch_invariant: attention takes the same steps for a row whatever shares its batch. The other
            operations always do.
    """

    is_batch_invariant: bool = False

    def write_kv(self, key: Tensor, value: Tensor, cache: PagedCache, slots: Tensor) -> None:
        """See `kernels.dispatch.write_kv`. The twin: no step of a model writes without rotating."""
        reference.write_kv(key, value, cache, slots)

    def paged_attention(
        self,
        query: Tensor,
        cache: PagedCache,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """See `kernels.dispatch.paged_attention`."""
        return attention.paged_attention(
            query,
            cache,
            batch,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            is_batch_invariant=self.is_batch_invariant,
        )

    def copy_blocks(self, caches: Sequence[PagedCache], sources: Tensor, targets: Tensor) -> None:
        """See `kernels.dispatch.copy_blocks`."""
        block_copy.copy_blocks(caches, sources, targets)

    def rotate_and_write(
        self,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: PagedCache,
        slots: Tensor,
        *,
        num_q_heads: int,
    ) -> Tensor:
        """See `kernels.dispatch.rotate_and_write`."""
        return rotary.rotate_and_write(heads, cos, sin, cache, slots, num_q_heads=num_q_heads)

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `kernels.dispatch.rms_norm`."""
        return norm.rms_norm(hidden, weight, eps)

    def add_rms_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `kernels.dispatch.add_rms_norm`."""
        return norm.add_rms_norm(hidden, delta, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `kernels.dispatch.silu_mul`."""
        return activation.silu_mul(gate_up)

    def sample_tokens(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor,
    ) -> Tensor:
        """See `kernels.dispatch.sample_tokens`."""
        return sampling.sample_tokens(logits, temperature, top_k, top_p, min_p, uniform)

    def invariant_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `kernels.dispatch.invariant_linear`."""
        return matmul.invariant_linear(x, weight, bias)
