"""x · weightᵀ whose row bits depend on nothing but the row and the weight.

Libraries choose another kernel, and so another order of adding, for another number of rows. Here the tile and
the order along K are fixed by the weight's shape, and K is never split among programs.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import ceil_div

# 64 rows fill one warpgroup's instruction. With one row the other 63 are wasted, but the weight is what has
# to be read.
BLOCK_M = 64
_GROUP_M = 8  # row tiles that pass over the same weight tiles together, for the device's cache
_WIDE_FEATURES = 16384


@dataclass(frozen=True)
class LinearPlan:
    """How [num_rows, out_features] is cut into tiles. Nothing but the grid depends on the number of rows."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, out_features: int, itemsize: int) -> "LinearPlan":
        # Narrow tiles where wide ones would leave most of the device idle at one row tile.
        block_n = 128 if out_features >= _WIDE_FEATURES else 64
        block_k = 128 if itemsize == 2 else 32
        return cls(block_n, block_k, num_warps=block_n // 16, num_stages=3)


# One build for any number of rows: another could add in another order.
@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,  # [num_rows, in_features]
    weight_ptr,  # [out_features, in_features]
    bias_ptr,  # [out_features], unread without HAS_BIAS
    output_ptr,  # [num_rows, out_features]
    num_rows,
    in_features,
    out_features,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    program = tl.program_id(0)
    num_m, num_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    group_start = program // (GROUP_M * num_n) * GROUP_M
    group_size = min(num_m - group_start, GROUP_M)
    row = (group_start + program % group_size) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = program % (GROUP_M * num_n) // group_size * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_feature = row < num_rows, feature < out_features
    k = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + row.to(tl.int64)[:, None] * in_features + k[None, :]
    weight_tile = weight_ptr + feature.to(tl.int64)[None, :] * in_features + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_features, BLOCK_K):
        is_k = start + k < in_features
        x = tl.load(x_tile + start, mask=is_row[:, None] & is_k[None, :], other=0.0)
        weight = tl.load(weight_tile + start, mask=is_feature[None, :] & is_k[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + feature, mask=is_feature, other=0.0)
        total += bias.to(tl.float32)[None, :]
    output = output_ptr + row.to(tl.int64)[:, None] * out_features + feature[None, :]
    tl.store(
        output, total.to(output_ptr.dtype.element_ty), mask=is_row[:, None] & is_feature[None, :]
    )


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in_features] → [..., out_features]; a row has the same bits among any others.

    Sums are float32; the twin is `torch.nn.functional.linear`.

    Args:
        weight: [out_features, in_features], in x's dtype: float16, bfloat16 or float32.
        bias: [out_features].
    """
    out_features, in_features = weight.shape
    x, weight = x.contiguous(), weight.contiguous()
    output = x.new_empty(*x.shape[:-1], out_features)
    num_rows = x.numel() // in_features
    if num_rows:
        plan = LinearPlan.of(out_features, x.element_size())
        num_programs = ceil_div(num_rows, BLOCK_M) * ceil_div(out_features, plan.block_n)
        _linear_kernel[(num_programs,)](
            x,
            weight,
            weight if bias is None else bias,
            output,
            num_rows,
            in_features,
            out_features,
            HAS_BIAS=bias is not None,
            BLOCK_M=BLOCK_M,
            BLOCK_N=plan.block_n,
            BLOCK_K=plan.block_k,
            GROUP_M=_GROUP_M,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
        )
    return output
