"""silu(gate) * up, each number read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import ceil_div

_BLOCK = 1024
_NUM_WARPS = 4  # 8 numbers a thread: one 128-bit load of 16-bit numbers


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [num_tokens, 2 * size]
    output_ptr,  # [num_tokens, size]
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    gate_start = gate_up_ptr + row * 2 * size
    gate = tl.load(gate_start + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_start + size + columns, mask=is_inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(
        output_ptr + row * size + columns,
        product.to(output_ptr.dtype.element_ty),
        mask=is_inside,
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.dispatch.silu_mul`. float32 until the product is rounded."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    output = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    num_rows = output.numel() // size
    if num_rows:
        grid = (num_rows, ceil_div(size, _BLOCK))
        _silu_mul_kernel[grid](gate_up, output, size, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return output
