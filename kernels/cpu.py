"""The CPU path: gather each context through its block table, then torch's fused attention.

Decoding sequences of similar length are gathered into one padded batch, so that a step costs a few calls
a layer and not a few for each sequence. Padding points at a slot the sequence owns, never at a foreign or
unwritten one: its score is masked to -inf, its weight is exactly 0, and 0 times a finite value is 0.

    contexts 5, 4, 4      s0 s1 s2 s3 s4
                          s0 s1 s2 s3 s3*      * padding: the last own slot again, masked
                          s0 s1 s2 s3 s3*

Longer chunks of queries run one sequence at a time, in tiles of rows. What a tile's rows all see needs no mask,
and the query heads of a KV head are rows of one matrix there; the square in which they see each other is causal.
Both halves are added up by their log-sum-exps. With a sliding window tiles are masked instead.

    keys     0 ─────────────── past ───────────────┼─ own ─┐
    rows     ██████████████████████████████████████│█      │
             ██████████████████████████████████████│██████ │
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import fp8, reference
from kernels.batch import AttentionBatch
from kernels.paged_cache import PagedCache
from kernels.reference import (
    add_rms_norm,
    as_bytes,
    copy_blocks,
    invariant_linear,
    rms_norm,
    sample_tokens,
    silu_mul,
    visible_keys,
)

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "invariant_linear",
    "paged_attention",
    "rms_norm",
    "rotate_and_write",
    "sample_tokens",
    "silu_mul",
    "write_kv",
]

_TILE_ROWS = 512
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# A group may pad at most this share beyond its shortest member, plus a little that costs less than a call.
_MAX_PADDING_SHARE = 0.25
_FREE_PADDING = 64
# Keys gathered at once: a group's copies should stay in the core's own cache until they are used.
_MAX_GROUP_KEYS = 2048


def write_kv(key: Tensor, value: Tensor, cache: PagedCache, slots: Tensor) -> None:
    """See `dispatch.write_kv`."""
    _write(key, cache.key, cache.key_scale, slots)
    _write(value, cache.value, cache.value_scale, slots)


def _write(vectors: Tensor, store: Tensor, scale_store: Tensor | None, slots: Tensor) -> None:
    if scale_store is None:
        store.flatten(0, 1).index_copy_(0, slots, vectors)
        return
    quantized = fp8.quantize(vectors)
    as_bytes(store).flatten(0, 1).index_copy_(0, slots, quantized.values.view(torch.uint8))
    scale_store.flatten(0, 1).index_copy_(0, slots, quantized.scale)


def rotate_and_write(
    heads: Tensor, cos: Tensor, sin: Tensor, cache: PagedCache, slots: Tensor, *, num_q_heads: int
) -> Tensor:
    """See `dispatch.rotate_and_write`."""
    num_kv_heads = cache.key.shape[2]
    rotated, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    swapped = rotated.roll(heads.shape[-1] // 2, -1)
    rotated = (rotated * cos).addcmul_(swapped, sin)
    write_kv(rotated[:, num_q_heads:], value, cache, slots)
    return rotated[:, :num_q_heads]


def paged_attention(
    query: Tensor,
    cache: PagedCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """See `dispatch.paged_attention`."""
    if soft_cap is not None:
        return reference.paged_attention(
            query,
            cache,
            batch,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
    plan = _plan(batch, sliding_window, query.dtype)
    if plan.is_one_decode:
        return _decode(query, cache, plan.decodes[0], scale)
    output = torch.empty(query.shape, dtype=query.dtype)
    for decode in plan.decodes:
        output[decode.rows] = _decode(query[decode.rows], cache, decode, scale)
    for chunk in plan.chunks:
        _chunk(query, cache, chunk, scale, output)
    return output


@dataclass(frozen=True)
class _Decode:
    """Sequences with one query row each."""

    rows: Tensor  # int64 [num_seqs]
    width: int  # keys gathered for each sequence
    slots: Tensor  # int64 [num_seqs * width]
    bias: Tensor | None  # [num_seqs, 1, 1, width], 0 or -inf


@dataclass(frozen=True)
class _Tile:
    rows: slice  # of the step's token rows
    keys: slice  # of the chunk's gathered keys; the last ones are the rows' own
    bias: Tensor | None  # [num_rows, num_keys], 0 or -inf; None: all that is past is seen


@dataclass(frozen=True)
class _Chunk:
    """One sequence with several query rows."""

    slots: Tensor  # int64 [num_keys]
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True)
class _Plan:
    decodes: tuple[_Decode, ...]
    chunks: tuple[_Chunk, ...]

    @property
    def is_one_decode(self) -> bool:
        """All rows of the step in one group, hence in order: nothing to scatter."""
        return len(self.decodes) == 1 and not self.chunks


def _plan(batch: AttentionBatch, sliding_window: int | None, dtype: torch.dtype) -> _Plan:
    """The gathers and masks of one step, made at the first layer that asks."""
    memo_key = (__name__, sliding_window, dtype)
    plan = batch.memo.get(memo_key)
    if isinstance(plan, _Plan):
        return plan
    decoding = [i for i in range(batch.num_seqs) if batch.query_len(i) == 1]
    chunked = [i for i in range(batch.num_seqs) if batch.query_len(i) > 1]
    plan = _Plan(
        tuple(
            _plan_decode(batch, group, sliding_window, dtype)
            for group in _similar_lengths(batch, decoding, sliding_window)
        ),
        tuple(_plan_chunk(batch, i, sliding_window, dtype) for i in chunked),
    )
    batch.memo[memo_key] = plan
    return plan


def _first_key(batch: AttentionBatch, index: int, sliding_window: int | None) -> int:
    """The first position that any query row of the sequence sees."""
    if sliding_window is None:
        return 0
    first_query = batch.context_lens[index] - batch.query_len(index)
    return max(0, first_query - sliding_window + 1)


def _similar_lengths(
    batch: AttentionBatch, indices: list[int], sliding_window: int | None
) -> Iterator[list[int]]:
    """Splits `indices` into groups worth padding to their longest member."""
    width = {i: batch.context_lens[i] - _first_key(batch, i, sliding_window) for i in indices}
    group: list[int] = []
    for i in sorted(indices, key=lambda i: width[i]):
        is_padded_too_far = (
            bool(group) and width[i] > width[group[0]] * (1 + _MAX_PADDING_SHARE) + _FREE_PADDING
        )
        if group and (is_padded_too_far or width[i] * (len(group) + 1) > _MAX_GROUP_KEYS):
            yield sorted(group)
            group = []
        group.append(i)
    if group:
        yield sorted(group)


def _plan_decode(
    batch: AttentionBatch, group: list[int], sliding_window: int | None, dtype: torch.dtype
) -> _Decode:
    firsts = [_first_key(batch, i, sliding_window) for i in group]
    lengths = [batch.context_lens[i] - first for i, first in zip(group, firsts, strict=True)]
    width = max(lengths)
    first = torch.tensor(firsts)[:, None]
    length = torch.tensor(lengths)[:, None]
    column = torch.arange(width)[None, :]
    positions = first + torch.minimum(column, length - 1)  # [num_seqs, width]
    bias = None
    if min(lengths) < width:
        bias = torch.zeros(len(group), width, dtype=dtype)
        bias = bias.masked_fill_(column >= length, float("-inf"))[:, None, None, :]
    rows = torch.tensor([batch.query_starts[i] for i in group])
    slots = _slots(batch.block_tables[torch.tensor(group)], positions, batch.block_size)
    return _Decode(rows, width, slots, bias)


def _slots(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Pool slots of `positions` [num_seqs, width], flat. int64: slot numbers may pass 2**31."""
    blocks = block_tables.long().gather(1, positions // block_size)
    return (blocks * block_size + positions % block_size).flatten()


def _plan_chunk(
    batch: AttentionBatch, index: int, sliding_window: int | None, dtype: torch.dtype
) -> _Chunk:
    start, end = batch.query_starts[index : index + 2]
    context_len = batch.context_lens[index]
    first = _first_key(batch, index, sliding_window)
    key_positions = torch.arange(first, context_len)
    tiles = []
    for row in range(start, end, _TILE_ROWS):
        row_end = min(row + _TILE_ROWS, end)
        position, position_end = context_len - (end - row), context_len - (end - row_end)
        rows = slice(row, row_end)
        if sliding_window is None:
            tiles.append(_Tile(rows, slice(0, position_end), None))
            continue
        begin = max(first, position - sliding_window + 1)
        keys = slice(begin - first, position_end - first)
        visible = visible_keys(
            torch.arange(position, position_end), key_positions[keys], sliding_window
        )
        bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        tiles.append(_Tile(rows, keys, bias))
    table = batch.block_tables[index : index + 1]
    return _Chunk(_slots(table, key_positions[None], batch.block_size), tuple(tiles))


def _decode(query: Tensor, cache: PagedCache, decode: _Decode, scale: float) -> Tensor:
    """One row a sequence: the query heads that share a KV head become the rows of one small matrix."""
    num_seqs, num_q_heads, head_dim = query.shape
    num_kv_heads = cache.key.shape[2]
    shape = (num_seqs, decode.width, num_kv_heads, head_dim)
    key = _gather(cache.key, cache.key_scale, decode.slots, query.dtype).view(shape)
    value = _gather(cache.value, cache.value_scale, decode.slots, query.dtype).view(shape)
    attended = functional.scaled_dot_product_attention(
        query.reshape(num_seqs, num_kv_heads, num_q_heads // num_kv_heads, head_dim),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=decode.bias,
        scale=scale,
    )
    return attended.reshape(query.shape)


def _chunk(query: Tensor, cache: PagedCache, chunk: _Chunk, scale: float, output: Tensor) -> None:
    key = _gather(cache.key, cache.key_scale, chunk.slots, query.dtype).transpose(0, 1)[None]
    value = _gather(cache.value, cache.value_scale, chunk.slots, query.dtype).transpose(0, 1)[None]
    for tile in chunk.tiles:
        rows = query[tile.rows].transpose(0, 1)[None]
        keys, values = key[:, :, tile.keys], value[:, :, tile.keys]
        if tile.bias is None:
            attended = _causal(rows, keys, values, scale)
        else:
            attended = functional.scaled_dot_product_attention(
                rows, keys, values, attn_mask=tile.bias, scale=scale, enable_gqa=True
            )
        output[tile.rows] = attended[0].transpose(0, 1)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Rows that are the last of the keys: query [1, num_q_heads, n, head_dim], keys [1, num_kv_heads, m, …]."""
    _, num_q_heads, num_rows, head_dim = query.shape
    num_kv_heads, num_past = key.shape[1], key.shape[2] - num_rows
    group = num_q_heads // num_kv_heads
    own, own_sums = _FLASH(
        query,
        key[:, :, num_past:].repeat_interleave(group, 1),
        value[:, :, num_past:].repeat_interleave(group, 1),
        is_causal=True,
        scale=scale,
    )
    if not num_past:
        assert isinstance(own, Tensor)
        return own
    past, past_sums = _FLASH(
        query.reshape(1, num_kv_heads, group * num_rows, head_dim),
        key[:, :, :num_past],
        value[:, :, :num_past],
        scale=scale,
    )
    # Shares of the two softmaxes' sums, which are given as logarithms.
    share = torch.sigmoid(own_sums - past_sums.reshape(own_sums.shape))[..., None].to(own.dtype)
    attended: Tensor = torch.lerp(past.reshape(own.shape), own, share)
    return attended


def _gather(store: Tensor, scale_store: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """[len(slots), num_kv_heads, head_dim] in `dtype`."""
    num_kv_heads, head_dim = store.shape[2:]
    rows = as_bytes(store).view(-1, num_kv_heads * head_dim).index_select(0, slots)
    vectors = rows.view(-1, num_kv_heads, head_dim)
    if scale_store is None:
        return vectors
    scale = scale_store.view(-1, num_kv_heads).index_select(0, slots)
    return _dequantize(vectors, scale, dtype)


# An e4m3 number's 4 exponent and 3 mantissa bits, put into a float16's low exponent and high mantissa
# bits, read as the number times 2⁻⁸ (the exponent biases are 7 and 15), subnormals included.
#   e4m3     s eeee mmm
#   float16  s 0eeee mmm0000000
_SIGN_AND_LOW_BITS = ~(1 << 14)
_BIAS_CORRECTION = 256.0


def _dequantize(vectors: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 bytes uint8 [n, num_kv_heads, head_dim] times scale [n, num_kv_heads].

    Shifts whole arrays of integers: torch's own cast from float8 goes number by number and takes twelve
    times as long. The bytes of NaN, which `write_kv` stores only beside a NaN scale, read as 480.
    """
    bits = vectors.view(torch.int8).to(torch.int16)
    halves = bits.bitwise_left_shift_(7).bitwise_and_(_SIGN_AND_LOW_BITS).view(torch.float16)
    numbers = halves.to(torch.float32)
    return numbers.mul_((scale * _BIAS_CORRECTION).unsqueeze(-1)).to(dtype)
