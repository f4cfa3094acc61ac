"""The torch twins: each operation in its plainest form, on any device, to compare the fast ones with.

Shapes here and in `dispatch`:

    query                 [num_tokens, num_q_heads, head_dim]
    key, value            [num_tokens, num_kv_heads, head_dim]
    cache tensors         [num_blocks, block_size, num_kv_heads, head_dim]

Query head h reads KV head h // (num_q_heads // num_kv_heads).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels import fp8
from kernels.batch import AttentionBatch
from kernels.paged_cache import PagedCache


def write_kv(key: Tensor, value: Tensor, cache: PagedCache, slots: Tensor) -> None:
    """See `dispatch.write_kv`."""
    _write(key, cache.key, cache.key_scale, slots)
    _write(value, cache.value, cache.value_scale, slots)


def _write(vectors: Tensor, store: Tensor, scale_store: Tensor | None, slots: Tensor) -> None:
    if scale_store is None:
        store.flatten(0, 1)[slots] = vectors.to(store.dtype)
        return
    quantized = fp8.quantize(vectors)
    as_bytes(store).flatten(0, 1)[slots] = quantized.values.view(torch.uint8)
    scale_store.flatten(0, 1)[slots] = quantized.scale


def as_bytes(tensor: Tensor) -> Tensor:
    """float8 tensors as uint8: torch indexes bytes on every device, float8 only on some."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def paged_attention(
    query: Tensor,
    cache: PagedCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """See `dispatch.paged_attention`. Scores, softmax and sums are float32."""
    output = torch.empty_like(query)
    for i, context_len in enumerate(batch.context_lens):
        rows = slice(batch.query_starts[i], batch.query_starts[i + 1])
        key_positions = torch.arange(context_len, device=query.device)
        blocks = batch.block_tables[i, key_positions // batch.block_size].long()
        slots = blocks * batch.block_size + key_positions % batch.block_size  # [context_len]
        output[rows] = _attend(
            query[rows],
            _read(cache.key, cache.key_scale, slots),
            _read(cache.value, cache.value_scale, slots),
            scale,
            sliding_window,
            soft_cap,
        )
    return output


def _read(store: Tensor, scale_store: Tensor | None, slots: Tensor) -> Tensor:
    """float32 [len(slots), num_kv_heads, head_dim]"""
    picked = as_bytes(store).flatten(0, 1)[slots].view(store.dtype)
    if scale_store is None:
        return picked.float()
    return fp8.dequantize(picked, scale_store.flatten(0, 1)[slots])


def _attend(
    query: Tensor,  # [num_rows, num_q_heads, head_dim], the last rows of the context
    key: Tensor,  # [context_len, num_kv_heads, head_dim]
    value: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Tensor:
    num_rows, num_q_heads, _ = query.shape
    context_len, num_kv_heads, _ = key.shape
    group = num_q_heads // num_kv_heads
    key = key.repeat_interleave(group, dim=1)
    value = value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    key_positions = torch.arange(context_len, device=query.device)
    visible = visible_keys(key_positions[context_len - num_rows :], key_positions, sliding_window)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def visible_keys(
    query_positions: Tensor, key_positions: Tensor, sliding_window: int | None
) -> Tensor:
    """bool [num_queries, num_keys]: a query sees itself and what came before, `sliding_window` keys at most."""
    distance = query_positions[:, None] - key_positions[None, :]
    visible = distance >= 0
    return visible if sliding_window is None else visible & (distance < sliding_window)


def copy_blocks(caches: Sequence[PagedCache], sources: Tensor, targets: Tensor) -> None:
    """See `dispatch.copy_blocks`."""
    for cache in caches:
        for tensor in cache.tensors():
            blocks = as_bytes(tensor)
            blocks[targets] = blocks[sources]


def rotate_and_write(
    heads: Tensor, cos: Tensor, sin: Tensor, cache: PagedCache, slots: Tensor, *, num_q_heads: int
) -> Tensor:
    """See `dispatch.rotate_and_write`."""
    num_kv_heads = cache.key.shape[2]
    rotated, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    swapped = rotated.roll(heads.shape[-1] // 2, -1)
    rotated = (rotated * cos).addcmul_(swapped, sin)
    is_real = slots >= 0
    write_kv(rotated[is_real, num_q_heads:], value[is_real], cache, slots[is_real])
    return rotated[:, :num_q_heads]


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `dispatch.rms_norm`."""
    return functional.rms_norm(hidden, (hidden.shape[-1],), weight, eps)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `dispatch.add_rms_norm`."""
    hidden.add_(delta)
    return rms_norm(hidden, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `dispatch.silu_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


_DRAW_CHUNK = 256


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """See `dispatch.sample_tokens`. Reads its inputs on the host; only tokens that can matter are sorted."""
    likeliest = logits.amax(-1)  # [n], NaN when the row holds one
    is_valid = likeliest.isfinite()
    is_greedy = temperature <= 0
    if bool(is_greedy.all()):
        return logits.argmax(-1).masked_fill_(~is_valid, 0)
    heat = temperature.masked_fill(is_greedy, 1.0)
    weights = (logits - likeliest[:, None]).div_(heat[:, None]).exp_()  # 1 for the likeliest
    if not bool(is_valid.all()):
        weights[~is_valid] = 1.0
    _drop_beyond_top_k(weights, logits, top_k)
    floor = torch.maximum(_top_p_floors(weights, top_p.tolist()), min_p)
    if bool((floor > 0).any()):
        weights.masked_fill_(weights < floor[:, None], 0.0)
    tokens = _invert_cumulative(weights, uniform)
    if bool(is_greedy.any()):
        tokens = torch.where(is_greedy, logits.argmax(-1), tokens)
    return tokens.masked_fill_(~is_valid, 0)


def _drop_beyond_top_k(weights: Tensor, logits: Tensor, top_k: Tensor) -> None:
    limited = ((top_k > 0) & (top_k < logits.shape[-1])).nonzero()[:, 0]
    if not len(limited):
        return
    counts = top_k[limited].long()
    best = logits[limited].topk(int(counts.max())).values
    kth_logit = logits.new_full((logits.shape[0], 1), float("-inf"))
    kth_logit[limited] = best.gather(1, counts[:, None] - 1)
    weights.masked_fill_(logits < kth_logit, 0.0)


def _top_p_floors(weights: Tensor, top_p: list[float]) -> Tensor:
    """The smallest weight that stays, for each row; 0 where all do."""
    floors = torch.zeros(len(top_p), device=weights.device)
    for i, share in enumerate(top_p):
        if share < 1:
            floors[i] = _top_p_floor(weights[i], share)
    return floors


def _top_p_floor(weights: Tensor, top_p: float) -> Tensor:
    total = float(weights.sum(dtype=torch.float64))
    may_go = (1 - max(top_p, 0.0)) * total
    kept = weights
    while True:
        # Those under an equal share of what may go weigh less than that all together, so none can stay.
        heavier = kept[kept >= may_go / len(kept)]
        if 2 * len(heavier) > len(kept):
            break
        may_go -= float(kept.sum(dtype=torch.float64) - heavier.sum(dtype=torch.float64))
        kept = heavier
    ordered = kept.sort(descending=True).values
    cumulative = ordered.cumsum(0, dtype=torch.float64)
    num_kept = int((cumulative - ordered < top_p * total).sum())
    return ordered[max(num_kept, 1) - 1]


def _invert_cumulative(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token at which the running sum passes uniform * total; int64 [n]."""
    num_rows, vocab_size = weights.shape
    if vocab_size % _DRAW_CHUNK:
        weights = functional.pad(weights, (0, -vocab_size % _DRAW_CHUNK))
    chunks = weights.view(num_rows, -1, _DRAW_CHUNK)
    ends = functional.pad(chunks.sum(-1, dtype=torch.float64).cumsum(-1), (1, 0))
    target = (uniform.double() * ends[:, -1])[:, None]
    chunk = (ends[:, 1:] <= target).sum(-1)  # [n], the first that ends beyond the target
    inside = chunks[torch.arange(num_rows, device=weights.device), chunk]  # [n, _DRAW_CHUNK]
    running = inside.cumsum(-1, dtype=torch.float64) + ends.gather(1, chunk[:, None])
    # Two orders of adding may differ in the last bit: never beyond the chunk's last token that can be drawn.
    positions = torch.arange(_DRAW_CHUNK, device=weights.device)
    last = torch.where(inside > 0, positions, 0).amax(-1)
    return chunk * _DRAW_CHUNK + torch.minimum((running <= target).sum(-1), last)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `dispatch.invariant_linear`."""
    return functional.linear(x, weight, bias)
