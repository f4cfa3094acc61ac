"""Root-mean-square normalization, a row a program, each row read once.

How a row is summed is fixed by its length and dtype, so its bits depend on nothing else in the batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import next_power_of_2

# 16 numbers a thread: two 128-bit loads of 16-bit numbers.
_NUMBERS_A_WARP = 32 * 16
_MAX_WARPS = 16


@dataclass(frozen=True)
class RowPlan:
    """How one row is spread over one program."""

    block: int  # numbers, a power of two, the row's length or more
    num_warps: int

    @classmethod
    def of(cls, size: int) -> "RowPlan":
        block = next_power_of_2(size)
        return cls(block, min(max(block // _NUMBERS_A_WARP, 1), _MAX_WARPS))


@triton.jit
def _norm_kernel(
    hidden_ptr,  # [num_tokens, size]; rewritten with the sum when HAS_DELTA
    delta_ptr,  # [num_tokens, size]
    weight_ptr,  # [size]
    output_ptr,  # [num_tokens, size]
    size,
    eps,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    is_inside = columns < size
    offsets = tl.program_id(0).to(tl.int64) * size + columns
    row = tl.load(hidden_ptr + offsets, mask=is_inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + offsets, mask=is_inside, other=0.0)
        # Rounded before it is normalized: the next layer reads the rounded sum too.
        row = (row.to(tl.float32) + delta.to(tl.float32)).to(row.dtype)
        tl.store(hidden_ptr + offsets, row, mask=is_inside)
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0)
    numbers = row.to(tl.float32)
    mean_square = tl.sum(numbers * numbers) / size
    normed = numbers * tl.rsqrt(mean_square + eps) * weight.to(tl.float32)
    tl.store(output_ptr + offsets, normed.to(row.dtype), mask=is_inside)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.dispatch.rms_norm`."""
    hidden = hidden.contiguous()
    return _norm(hidden, hidden, weight, eps, has_delta=False)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.dispatch.add_rms_norm`.

    Raises:
        ValueError: `hidden` is not contiguous; it is written in place.
    """
    if not hidden.is_contiguous():
        raise ValueError(f"hidden must be contiguous; its strides are {hidden.stride()}")
    return _norm(hidden, delta.contiguous(), weight, eps, has_delta=True)


def _norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, *, has_delta: bool) -> Tensor:
    output = torch.empty_like(hidden)
    size = hidden.shape[-1]
    num_rows = hidden.numel() // size
    if num_rows:
        plan = RowPlan.of(size)
        _norm_kernel[(num_rows,)](
            hidden,
            delta,
            weight,
            output,
            size,
            eps,
            HAS_DELTA=has_delta,
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
    return output
