"""The operations the engine calls. Which code runs is decided by the device the tensors lie on."""

from collections.abc import Sequence
from typing import Protocol

import torch
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
        soft_cap: float | None = None,
    ) -> Tensor: ...

    def copy_blocks(
        self, caches: Sequence[PagedCache], sources: Tensor, targets: Tensor, /
    ) -> None: ...

    def rotate_and_write(
        self,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: PagedCache,
        slots: Tensor,
        /,
        *,
        num_q_heads: int,
    ) -> Tensor: ...

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...

    def add_rms_norm(
        self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, /
    ) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor, /) -> Tensor: ...

    def sample_tokens(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor,
        /,
    ) -> Tensor: ...

    def invariant_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor: ...


_device_type_to_backend: dict[str, Backend] = {"cpu": cpu}
# Triton's tensor-core instructions for bf16 begin here; older devices run the twins.
_LEAST_CAPABILITY = (8, 0)


def _backend(tensor: Tensor) -> Backend:
    device_type = tensor.device.type
    backend = _device_type_to_backend.get(device_type)
    if backend is None:
        backend = _first_use(device_type)
        install(device_type, backend)
    return backend


def _first_use(device_type: str) -> Backend:
    if device_type == "cuda" and torch.cuda.get_device_capability() >= _LEAST_CAPABILITY:
        # Here and not above: Triton takes a second to import and has no use without a device.
        from kernels.gpu.backend import CudaBackend

        return CudaBackend()
    return reference


def install_batch_invariant(device_type: str) -> None:
    """From now on, in this process, a row's bits do not depend on what shares its batch; "cuda" only."""
    from kernels.gpu.backend import CudaBackend

    install(device_type, CudaBackend(is_batch_invariant=True))


def install(device_type: str, backend: Backend) -> None:
    """From now on `backend` serves all tensors on such devices, in this process.

    For a backend other than the usual one, such as `CudaBackend(is_batch_invariant=True)`.
    """
    _device_type_to_backend[device_type] = backend


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
    soft_cap: float | None = None,
) -> Tensor:
    """Causal attention of each query row over its own sequence, read through the block table
    (PagedAttention, arXiv 2309.06180, §4).

    This step's keys and values must have been written. Slots outside a sequence's context never reach
    the result, whatever they hold.

    Args:
        query: [num_tokens, num_q_heads, head_dim]; the rows of a sequence are its last positions.
        scale: what scores are multiplied by before the softmax.
        sliding_window: a row sees itself and at most `sliding_window - 1` tokens before it.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` before they are masked.

    Returns:
        [num_tokens, num_q_heads, head_dim] in the query's dtype.
    """
    return _backend(query).paged_attention(
        query, cache, batch, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
    )


def copy_blocks(caches: Sequence[PagedCache], sources: Tensor, targets: Tensor) -> None:
    """Copies whole blocks, scales included, in each of `caches`.

    Args:
        sources, targets: int64 [num_pairs]. All sources are read before any target is written; the
            targets are all different.
    """
    if caches:
        _backend(sources).copy_blocks(caches, sources, targets)


def rotate_and_write(
    heads: Tensor, cos: Tensor, sin: Tensor, cache: PagedCache, slots: Tensor, *, num_q_heads: int
) -> Tensor:
    """Rotates query and key heads, and writes keys and values into the pool.

    Pairs (d, d + head_dim / 2) are rotated (RoFormer, arXiv 2104.09864, in the order of halves).

    Args:
        heads: [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim]: queries, keys, values, as the
            projection stacks them; not changed.
        cos: [num_tokens, 1, head_dim], both halves alike.
        sin: [num_tokens, 1, head_dim], the first half negated.
        cache, slots: as for `write_kv`; a slot of -1 is written nowhere.

    Returns:
        The rotated queries [num_tokens, num_q_heads, head_dim].
    """
    return _backend(heads).rotate_and_write(heads, cos, sin, cache, slots, num_q_heads=num_q_heads)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """hidden [num_tokens, hidden_size] over its root mean square, times weight [hidden_size] (arXiv 1910.07467).

    The mean of squares is float32 whatever the dtype.
    """
    return _backend(hidden).rms_norm(hidden, weight, eps)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `delta` to `hidden` in place, and returns the sum's `rms_norm`, in one pass over both."""
    return _backend(hidden).add_rms_norm(hidden, delta, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [num_tokens, 2 * size] → silu(first half) * second half, [num_tokens, size]."""
    return _backend(gate_up).silu_mul(gate_up)


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """Draws one token a row.

    Logits over the temperature become weights; then `top_k` keeps all tokens as likely as the k-th likeliest
    or likelier; then `top_p` keeps a token while the strictly likelier ones have less than that share of
    what is left (arXiv 1904.09751); then `min_p` keeps those with at least that share of the likeliest's
    weight (arXiv 2407.01082). The drawn token is the first, by id, at which the running sum of the weights
    kept passes `uniform` times their total. Equal logits share their fate.

    A row's token depends on that row alone.

    Args:
        logits: float32 [n, vocab_size]; not changed. A row that holds NaN or +inf, or -inf alone, gives
            token 0.
        temperature: float32 [n]; finite; 0 or less: the likeliest token, the lowest id of equals.
        top_k: int32 [n]; 0 or less: off.
        top_p: float32 [n]; 1 or more: off. The likeliest always stays.
        min_p: float32 [n], 0 to 1; 0: off.
        uniform: float32 [n], in [0, 1).

    Returns:
        int64 [n]. Never a token whose weight is 0.
    """
    return _backend(logits).sample_tokens(logits, temperature, top_k, top_p, min_p, uniform)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [num_rows, in_features] · weight [out_features, in_features]ᵀ + bias [out_features].

    On a CUDA device a row has the same bits among any others, which libraries do not promise. The twin is torch's
    own product and promises nothing either.
    """
    return _backend(x).invariant_linear(x, weight, bias)
