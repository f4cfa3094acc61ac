"""Rotation, quantization and the write into the pool, in one launch: every head is read once.

heads of a token   q0 q1 q2 q3 q4 q5 q6 q7 | k0 k1 | v0 v1
programs           [     ] [     ]           [   ]   [   ]
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.fp8 import FP8_MAX, MIN_SCALE
from kernels.gpu.e4m3 import e4m3_bits
from kernels.gpu.launch import ceil_div, next_power_of_2
from kernels.paged_cache import PagedCache
from kernels.reference import as_bytes

_MAX_HEADS = 8
_LEAST_NUMBERS = 256  # of each half: one 128-bit load of 16-bit numbers for each thread of a warp
_NUM_WARPS = 4
_FP8_MAX = tl.constexpr(FP8_MAX)
_MIN_SCALE = tl.constexpr(MIN_SCALE)


@dataclass(frozen=True)
class RotaryPlan:
    """How heads are dealt to programs."""

    block_heads: int
    half: int  # numbers, a power of two, half a head or more
    num_q_programs: int
    num_kv_programs: int
    num_warps: int

    @classmethod
    def of(cls, num_q_heads: int, num_kv_heads: int, head_dim: int) -> "RotaryPlan":
        half = next_power_of_2(head_dim // 2)
        block_heads = min(next_power_of_2(num_kv_heads), _MAX_HEADS)
        block_heads = max(block_heads, _LEAST_NUMBERS // half)
        return cls(
            block_heads,
            half,
            ceil_div(num_q_heads, block_heads),
            ceil_div(num_kv_heads, block_heads),
            min(_NUM_WARPS, max(1, block_heads * half // _LEAST_NUMBERS)),
        )

    @property
    def num_programs(self) -> int:
        """For each token."""
        return self.num_q_programs + 2 * self.num_kv_programs


@triton.jit
def _rotated(first, second, cos_ptr, sin_ptr, token, dims, is_dim, HEAD_DIM: tl.constexpr):
    """Both halves, float32, of heads whose halves are `first` and `second` [heads, half]."""
    start = token * HEAD_DIM + dims
    cos_first = tl.load(cos_ptr + start, mask=is_dim, other=0.0).to(tl.float32)
    cos_second = tl.load(cos_ptr + start + HEAD_DIM // 2, mask=is_dim, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr + start, mask=is_dim, other=0.0).to(tl.float32)
    sin_second = tl.load(sin_ptr + start + HEAD_DIM // 2, mask=is_dim, other=0.0).to(tl.float32)
    # The first half of sin is stored negated.
    turned_first = first * cos_first[None, :] + second * sin_first[None, :]
    turned_second = second * cos_second[None, :] + first * sin_second[None, :]
    return turned_first, turned_second


@triton.jit
def _scales(first, second):
    """float32 [heads], NaN for a head that holds NaN."""
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    num_nan = tl.sum((first != first).to(tl.int32), 1) + tl.sum((second != second).to(tl.int32), 1)
    scale = tl.maximum(tl.div_rn(largest, _FP8_MAX), _MIN_SCALE)
    return tl.where(num_nan > 0, float("nan"), scale)


@triton.jit
def _quantized(half, scale):
    scaled = tl.div_rn(half, tl.broadcast_to(scale[:, None], half.shape))
    is_nan = scaled != scaled
    clamped = tl.minimum(tl.maximum(scaled, -_FP8_MAX), _FP8_MAX)
    return e4m3_bits(tl.where(is_nan, scaled, clamped))


@triton.jit
def _write(
    store_ptr,
    scale_ptr,
    first,
    second,
    slot,
    head,
    is_written,
    dims,
    is_element,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
):
    """Writes heads [heads, half] twice at `slot`; int64, a pool may hold over 2³¹ numbers."""
    vector = slot * NUM_KV_HEADS + head  # [heads]
    start = store_ptr + (vector * HEAD_DIM)[:, None] + dims[None, :]
    if IS_QUANTIZED:
        scale = _scales(first, second)
        tl.store(scale_ptr + vector, scale, mask=is_written)
        tl.store(start, _quantized(first, scale), mask=is_element)
        tl.store(start + HEAD_DIM // 2, _quantized(second, scale), mask=is_element)
    else:
        element = store_ptr.dtype.element_ty
        tl.store(start, first.to(element), mask=is_element)
        tl.store(start + HEAD_DIM // 2, second.to(element), mask=is_element)


@triton.jit
def _rotate_and_write_kernel(
    heads_ptr,  # [num_tokens, NUM_Q_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]
    cos_ptr,  # [num_tokens, HEAD_DIM]
    sin_ptr,  # [num_tokens, HEAD_DIM]
    slots_ptr,  # int64 [num_tokens]
    query_ptr,  # [num_tokens, NUM_Q_HEADS, HEAD_DIM]
    key_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]
    value_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]
    key_scale_ptr,  # [num_slots, NUM_KV_HEADS]
    value_scale_ptr,  # [num_slots, NUM_KV_HEADS]
    token_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NUM_Q_PROGRAMS: tl.constexpr,
    NUM_KV_PROGRAMS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    is_query = program < NUM_Q_PROGRAMS
    is_value = program >= NUM_Q_PROGRAMS + NUM_KV_PROGRAMS
    kv_program = (program - NUM_Q_PROGRAMS) % NUM_KV_PROGRAMS
    first_head = tl.where(is_query, program, kv_program) * BLOCK_HEADS
    head = first_head + tl.arange(0, BLOCK_HEADS)  # among its own kind
    is_head = head < tl.where(is_query, NUM_Q_HEADS, NUM_KV_HEADS)
    skipped = tl.where(is_query, 0, NUM_Q_HEADS) + tl.where(is_value, NUM_KV_HEADS, 0)
    dims = tl.arange(0, HALF)
    is_dim = dims < HEAD_DIM // 2
    is_element = is_head[:, None] & is_dim[None, :]
    start = heads_ptr + token * token_stride
    start = start + ((skipped + head) * HEAD_DIM)[:, None] + dims[None, :]
    first = tl.load(start, mask=is_element, other=0.0)
    second = tl.load(start + HEAD_DIM // 2, mask=is_element, other=0.0)
    element = heads_ptr.dtype.element_ty
    slot = tl.load(slots_ptr + token)
    is_real = slot >= 0
    if is_value:
        _write(
            value_ptr, value_scale_ptr, first.to(tl.float32), second.to(tl.float32), slot, head,
            is_head & is_real, dims, is_element & is_real, NUM_KV_HEADS, HEAD_DIM, IS_QUANTIZED,
        )  # fmt: skip
    else:
        first, second = _rotated(
            first.to(tl.float32), second.to(tl.float32), cos_ptr, sin_ptr, token, dims, is_dim, HEAD_DIM,
        )  # fmt: skip
        # Rounded as the query is, so that what is quantized does not depend on how it is stored.
        first, second = first.to(element), second.to(element)
        if is_query:
            start = query_ptr + ((token * NUM_Q_HEADS + head) * HEAD_DIM)[:, None] + dims[None, :]
            tl.store(start, first, mask=is_element)
            tl.store(start + HEAD_DIM // 2, second, mask=is_element)
        else:
            _write(
                key_ptr, key_scale_ptr, first.to(tl.float32), second.to(tl.float32), slot, head,
                is_head & is_real, dims, is_element & is_real, NUM_KV_HEADS, HEAD_DIM, IS_QUANTIZED,
            )  # fmt: skip


def rotate_and_write(
    heads: Tensor, cos: Tensor, sin: Tensor, cache: PagedCache, slots: Tensor, *, num_q_heads: int
) -> Tensor:
    """See `kernels.dispatch.rotate_and_write`."""
    num_tokens, num_heads, head_dim = heads.shape
    num_kv_heads = (num_heads - num_q_heads) // 2
    if heads.stride()[1:] != (head_dim, 1):
        heads = heads.contiguous()
    query = heads.new_empty(num_tokens, num_q_heads, head_dim)
    if not num_tokens:
        return query
    plan = RotaryPlan.of(num_q_heads, num_kv_heads, head_dim)
    key, value = as_bytes(cache.key), as_bytes(cache.value)
    _rotate_and_write_kernel[(num_tokens, plan.num_programs)](
        heads,
        cos.contiguous(),
        sin.contiguous(),
        slots,
        query,
        key,
        value,
        key if cache.key_scale is None else cache.key_scale,
        value if cache.value_scale is None else cache.value_scale,
        heads.stride(0),
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        IS_QUANTIZED=cache.is_quantized,
        BLOCK_HEADS=plan.block_heads,
        HALF=plan.half,
        NUM_Q_PROGRAMS=plan.num_q_programs,
        NUM_KV_PROGRAMS=plan.num_kv_programs,
        num_warps=plan.num_warps,
    )
    return query
