"""Draws tokens without sorting: a threshold is found by halving the span of floats it can lie in.

Read as integers, floats that are not NaN keep their order. So a span of floats is halved in at most 32 passes
over the row, which stays in the device's cache; a pass adds up what lies above the middle. The search ends
sooner when one token at most is left between its ends.

    logits, in order     ·  ·   ·  | ·  ·  ·    |  ·   ·  · ·
                                  low          high
                                   enough      too little
                                   above it    above it

One program a row. Sums run in an order fixed by the vocabulary's size, so a row's token depends on that row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

_BLOCK = 8192
_LINE = 16  # numbers; Triton loads 128 bits at once where it knows that rows begin on such lines
_NUM_WARPS = 16  # 16 numbers a thread: four 128-bit loads
_LEAST_KEY = tl.constexpr(-0x7F800001)  # of -inf
_LEAST_FLOAT = tl.constexpr(float("-inf"))


@triton.jit
def _float_of(key):
    """The float whose place among floats is `key`'s among integers."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_of(number):
    bits = number.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _tile(row_ptr, start, vocab_size, BLOCK: tl.constexpr):
    offsets = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + offsets, mask=offsets < vocab_size, other=_LEAST_FLOAT)


@triton.jit
def _weights(logits, likeliest, temperature):
    return tl.exp((logits - likeliest) / temperature)


@triton.jit
def _likeliest(row_ptr, vocab_size, BLOCK: tl.constexpr):
    """The largest logit, its lowest id, and how many numbers are NaN."""
    best = tl.full((BLOCK,), _LEAST_FLOAT, tl.float32)
    best_id = tl.zeros((BLOCK,), tl.int32)
    num_nan = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        logits = _tile(row_ptr, start, vocab_size, BLOCK)
        is_better = logits > best
        best = tl.where(is_better, logits, best)
        best_id = tl.where(is_better, start + tl.arange(0, BLOCK), best_id)
        num_nan += (logits != logits).to(tl.int32)
    likeliest = tl.max(best, 0)
    token = tl.min(tl.where(best == likeliest, best_id, vocab_size), 0)
    return likeliest, token, tl.sum(num_nan, 0)


@triton.jit
def _above(
    row_ptr, threshold, likeliest, temperature, vocab_size, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How many logits are strictly above `threshold`, and with HAS_WEIGHT their weight."""
    count = tl.zeros((BLOCK,), tl.int32)
    weight = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        logits = _tile(row_ptr, start, vocab_size, BLOCK)
        is_above = logits > threshold
        count += is_above.to(tl.int32)
        if HAS_WEIGHT:
            weight += tl.where(is_above, _weights(logits, likeliest, temperature), 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _search(
    row_ptr, low, wanted, likeliest, temperature, vocab_size, IS_BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The last key above which lie `wanted` tokens, or that weight, or more; `low` when none is known to be.

    Any key with the same tokens above it is as good.
    """
    high = _key_of(likeliest)
    num_above_low = vocab_size
    num_above_high = 0
    # high - low may be over 2³¹, but never wraps to 0 or 1; num_* decide the rest.
    while (high != low + 1) & (high != low) & (num_above_low - num_above_high > 1):
        middle = (low & high) + ((low ^ high) >> 1)  # rounded down, without overflow
        count, weight = _above(
            row_ptr, _float_of(middle), likeliest, temperature, vocab_size, IS_BY_WEIGHT, BLOCK
        )
        reached = weight if IS_BY_WEIGHT else count
        is_enough = reached >= wanted
        low = tl.where(is_enough, middle, low)
        num_above_low = tl.where(is_enough, count, num_above_low)
        high = tl.where(is_enough, high, middle)
        num_above_high = tl.where(is_enough, num_above_high, count)
    return low


@triton.jit
def _top_p_low(row_ptr, low, top_p, likeliest, temperature, vocab_size, BLOCK: tl.constexpr):
    """The key above which the tokens lie that top_p keeps of those above `low`."""
    _, total = _above(row_ptr, _float_of(low), likeliest, temperature, vocab_size, True, BLOCK)
    # Tokens under an equal share of what may go weigh less than that all together, so none of them can stay.
    # The slack outweighs the rounding of exp and log.
    equal_share = (1.0 - tl.maximum(top_p, 0.0)) * total / vocab_size
    sure = likeliest + (tl.log(equal_share) - 0.01) * temperature
    low = tl.maximum(low, _key_of(sure))
    return _search(row_ptr, low, top_p * total, likeliest, temperature, vocab_size, True, BLOCK)


@triton.jit
def _kept(
    row_ptr, start, threshold, min_p, likeliest, temperature, vocab_size, BLOCK: tl.constexpr
):
    """The weights of a tile; 0 for tokens filtered out."""
    logits = _tile(row_ptr, start, vocab_size, BLOCK)
    weights = _weights(logits, likeliest, temperature)
    return tl.where((logits > threshold) & (weights >= min_p), weights, 0.0)


@triton.jit
def _draw(
    row_ptr, threshold, min_p, uniform, likeliest, temperature, vocab_size, BLOCK: tl.constexpr
):
    """The first token at which the running sum of weights passes uniform * total."""
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        kept = _kept(row_ptr, start, threshold, min_p, likeliest, temperature, vocab_size, BLOCK)
        total += tl.sum(kept, 0)
    target = uniform * total
    # The last tile that holds weight and begins at the target or before it.
    running = 0.0
    tile_start = 0
    before_tile = 0.0
    for start in range(0, vocab_size, BLOCK):
        kept = _kept(row_ptr, start, threshold, min_p, likeliest, temperature, vocab_size, BLOCK)
        weight = tl.sum(kept, 0)
        is_later = (weight > 0) & (running <= target)
        tile_start = tl.where(is_later, start, tile_start)
        before_tile = tl.where(is_later, running, before_tile)
        running += weight
    kept = _kept(row_ptr, tile_start, threshold, min_p, likeliest, temperature, vocab_size, BLOCK)
    ids = tile_start + tl.arange(0, BLOCK)
    has_passed = (kept > 0) & (tl.cumsum(kept, 0) + before_tile > target)
    first = tl.min(tl.where(has_passed, ids, vocab_size), 0)
    # Two orders of adding may differ in the last bit: never beyond the tile's last token that can be drawn.
    last = tl.max(tl.where(kept > 0, ids, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def _sample_kernel(
    logits_ptr,  # [n, vocab_size]
    temperature_ptr,  # [n]
    top_k_ptr,  # [n]
    top_p_ptr,  # [n]
    min_p_ptr,  # [n]
    uniform_ptr,  # [n]
    token_ptr,  # [n]
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + row)
    likeliest, token, num_nan = _likeliest(row_ptr, vocab_size, BLOCK)
    is_valid = (num_nan == 0) & (tl.abs(likeliest) < float("inf"))
    if is_valid & (temperature > 0):
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        low = tl.full((), _LEAST_KEY, tl.int32)
        if (top_k > 0) & (top_k < vocab_size):
            low = _search(row_ptr, low, top_k, likeliest, temperature, vocab_size, False, BLOCK)
        if top_p < 1.0:
            low = _top_p_low(row_ptr, low, top_p, likeliest, temperature, vocab_size, BLOCK)
        token = _draw(
            row_ptr, _float_of(low), tl.load(min_p_ptr + row), tl.load(uniform_ptr + row),
            likeliest, temperature, vocab_size, BLOCK,
        )  # fmt: skip
    tl.store(token_ptr + row, tl.where(is_valid, token, 0).to(tl.int64))


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """See `kernels.dispatch.sample_tokens`.

    Rows that do not all begin on a 64-byte line are copied first, with tokens added that cannot be drawn.
    """
    if logits.stride(1) != 1 or logits.stride(0) % _LINE or logits.shape[1] % _LINE:
        logits = functional.pad(logits, (0, -logits.shape[1] % _LINE), value=float("-inf"))
        logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _sample_kernel[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            uniform,
            tokens,
            logits.stride(0),
            vocab_size,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return tokens
