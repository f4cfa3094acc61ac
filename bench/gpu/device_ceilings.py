"""What the device gives to a program that does nothing else; all shares in the check are of these."""

import sys

import torch

from bench.gpu.stage import COPY_RATE, MATMUL_RATE, Context, run_stage

_COPY_BYTES = 4 << 30
_MATMUL_SIZE = 8192


def run(context: Context) -> None:
    _copy(context, (1 << 22) if context.is_dry else _COPY_BYTES)
    _matmul(context, 128 if context.is_dry else _MATMUL_SIZE)


def _copy(context: Context, num_bytes: int) -> None:
    """Bytes read and bytes written both count."""
    source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=context.device).normal_()
    target = torch.empty_like(source)
    seconds = context.timer.seconds([lambda: target.copy_(source)])
    context.add(COPY_RATE, 2 * num_bytes / seconds / 1e9, "GB/s", note=f"{num_bytes:,} bytes")


def _matmul(context: Context, size: int) -> None:
    """Random numbers: zeros draw less power and run faster."""
    left, right = torch.randn(2, size, size, device=context.device).bfloat16().unbind()
    seconds = context.timer.seconds([lambda: left @ right])
    note = f"{size} × {size} × {size}, random numbers"
    context.add(MATMUL_RATE, 2 * size**3 / seconds / 1e12, "TFLOP/s", note=note)


if __name__ == "__main__":
    run_stage("ceilings", run, sys.argv[1:])
