"""The operations the engine calls. Which code runs is decided by the device the tensors lie on."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kernels import cpu, reference
from kernels.batch import AttentionBatch
from kernels.paged_cache import PagedCache


class Backend(Protocol):
    """What a module of device code offers."""

    def write_kv(self, key: Tensor, value: Tensor, cache: PagedCache, slots: Tensor, /) -> None: ...

    def paged_attention(
        self,
        query: Tensor,
        cache: PagedCache,
        batch: AttentionBatch,
        /,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> Tensor: ...

    def copy_blocks(
        self, caches: Sequence[PagedCache], sources: Tensor, targets: Tensor, /
    ) -> None: ...


_device_type_to_backend: dict[str, Backend] = {"cpu": cpu}


def _backend(tensor: Tensor) -> Backend:
    return _device_type_to_backend.get(tensor.device.type, reference)


def write_kv(key: Tensor, value: Tensor, cache: PagedCache, slots: Tensor) -> None:
    """Writes the new tokens' keys and values into the pool.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim]; keys already rotated.
        cache: written in place. A float8 cache gets one scale a token and head; numbers are clamped to
            ±448 before the cast, and a zero vector is stored as zeros.
        slots: int64 [num_tokens], all different.
    """
    _backend(key).write_kv(key, value, cache, slots)


def paged_attention(
    query: Tensor,
    cache: PagedCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of each query row over its own sequence, read through the block table
    (PagedAttention, arXiv 2309.06180, §4).

    This step's keys and values must have been written. Slots outside a sequence's context never reach
    the result, whatever they hold.

    Args:
        query: [num_tokens, num_q_heads, head_dim]; the rows of a sequence are its last positions.
        scale: what scores are multiplied by before the softmax.
        sliding_window: a row sees itself and at most `sliding_window - 1` tokens before it.

    Returns:
        [num_tokens, num_q_heads, head_dim] in the query's dtype.
    """
    return _backend(query).paged_attention(
        query, cache, batch, scale=scale, sliding_window=sliding_window
    )


def copy_blocks(caches: Sequence[PagedCache], sources: Tensor, targets: Tensor) -> None:
    """Copies whole blocks, scales included, in each of `caches`.

    Args:
        sources, targets: int64 [num_pairs]. All sources are read before any target is written; the
            targets are all different.
    """
    if caches:
        _backend(sources).copy_blocks(caches, sources, targets)
