"""Every other operation with Llama-3-8B's shapes: bytes that must move over the time it took."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.filled_pool import filled_pool
from bench.gpu.stage import Context, run_stage
from bench.gpu.timing import Call
from kernels import dispatch
from kvstore.kv_layout import KvDtype, KvLayout

_BYTES = torch.bfloat16.itemsize
_NUM_Q_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 32, 8, 128, 16
# Together more than the caches hold.
_NUM_COPIES = 4


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_sampled: int
    num_copied_blocks: int
    num_layers: int


_FULL = Shape(16384, 4096, 14336, 128256, 128, 256, 32)
_DRY = Shape(3, 64, 96, 200, 2, 2, 2)


@dataclass(frozen=True)
class Work:
    """Equal calls on different memory, and the least bytes one of them moves."""

    name: str
    calls: list[Call]
    num_bytes: int
    can_capture: bool = True


def run(context: Context) -> None:
    shape = _DRY if context.is_dry else _FULL
    for make in (rms_norm, add_rms_norm, silu_mul, rotate_and_write, copy_blocks, sample_tokens):
        for kv_dtype in (KvDtype.AUTO, KvDtype.FP8_E4M3):
            if kv_dtype is not KvDtype.AUTO and make not in (rotate_and_write, copy_blocks):
                continue
            with context.going_on(f"{make.__name__}, {kv_dtype}"):
                work = make(shape, context.device, kv_dtype)
                seconds = context.timer.seconds(work.calls, can_capture=work.can_capture)
                rate = work.num_bytes / seconds
                note = f"{seconds * 1e6:,.1f} µs"
                note += ", replayed as a graph" if context.timer.was_captured else ""
                context.add(work.name, rate / 1e9, "GB/s", context.copy_share(rate), note=note)


def _randn(*sizes: int, device: torch.device) -> Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_()


def rms_norm(shape: Shape, device: torch.device, _: KvDtype) -> Work:
    size = shape.hidden_size
    stacked = _randn(_NUM_COPIES, shape.num_tokens, size, device=device)
    weight = _randn(size, device=device)
    return Work(
        f"rms_norm, {shape.num_tokens} tokens",
        _for_each(stacked, lambda hidden: dispatch.rms_norm(hidden, weight, 1e-5)),
        2 * shape.num_tokens * size * _BYTES,
    )


def add_rms_norm(shape: Shape, device: torch.device, _: KvDtype) -> Work:
    size = shape.hidden_size
    stacked = _randn(_NUM_COPIES, 2, shape.num_tokens, size, device=device)
    weight = _randn(size, device=device)
    return Work(
        f"add_rms_norm, {shape.num_tokens} tokens",
        _for_each(stacked, lambda both: dispatch.add_rms_norm(both[0], both[1], weight, 1e-5)),
        4 * shape.num_tokens * size * _BYTES,
    )


def silu_mul(shape: Shape, device: torch.device, _: KvDtype) -> Work:
    size = shape.intermediate_size
    stacked = _randn(_NUM_COPIES, shape.num_tokens, 2 * size, device=device)
    return Work(
        f"silu_mul, {shape.num_tokens} tokens",
        _for_each(stacked, dispatch.silu_mul),
        3 * shape.num_tokens * size * _BYTES,
    )


def rotate_and_write(shape: Shape, device: torch.device, kv_dtype: KvDtype) -> Work:
    num_tokens = shape.num_tokens
    layout = _layout(1, kv_dtype)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    cache = filled_pool(layout, num_blocks, device).layer(0)
    num_heads = _NUM_Q_HEADS + 2 * _NUM_KV_HEADS
    stacked = _randn(_NUM_COPIES, num_tokens, num_heads, _HEAD_DIM, device=device)
    angles = torch.rand(num_tokens, 1, _HEAD_DIM, device=device)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    slots = torch.randperm(num_blocks * _BLOCK_SIZE, device=device)[:num_tokens]

    def call(heads: Tensor) -> Tensor:
        return dispatch.rotate_and_write(heads, cos, sin, cache, slots, num_q_heads=_NUM_Q_HEADS)

    num_read = num_tokens * (num_heads + 2) * _HEAD_DIM * _BYTES
    num_written = num_tokens * (_NUM_Q_HEADS * _HEAD_DIM * _BYTES + layout.bytes_per_token)
    name = f"rotate_and_write, {num_tokens} tokens, {_precision(kv_dtype)}"
    return Work(name, _for_each(stacked, call), num_read + num_written)


def copy_blocks(shape: Shape, device: torch.device, kv_dtype: KvDtype) -> Work:
    num_pairs = shape.num_copied_blocks
    layout = _layout(shape.num_layers, kv_dtype)
    pool = filled_pool(layout, 2 * num_pairs * _NUM_COPIES, device)
    order = torch.randperm(pool.num_blocks, device=device).view(_NUM_COPIES, 2, num_pairs)
    return Work(
        f"copy_blocks, {num_pairs} of {shape.num_layers} layers, {_precision(kv_dtype)}",
        _for_each(order, lambda pair: dispatch.copy_blocks(pool.layers, pair[0], pair[1])),
        2 * num_pairs * layout.block_bytes,
        can_capture=False,
    )


def sample_tokens(shape: Shape, device: torch.device, _: KvDtype) -> Work:
    """The least that can be read is each logit once."""
    n = shape.num_sampled
    stacked = torch.randn(_NUM_COPIES, n, shape.vocab_size, device=device).mul_(4)
    temperature, top_p = torch.full((n,), 0.8, device=device), torch.full((n,), 0.95, device=device)
    top_k = torch.full((n,), 50, dtype=torch.int32, device=device)
    min_p, uniform = torch.zeros(n, device=device), torch.rand(n, device=device)

    def call(logits: Tensor) -> Tensor:
        return dispatch.sample_tokens(logits, temperature, top_k, top_p, min_p, uniform)

    name = f"sample_tokens, {n} rows of {shape.vocab_size}, top 50, top 0.95"
    return Work(name, _for_each(stacked, call), n * shape.vocab_size * 4)


def _layout(num_layers: int, kv_dtype: KvDtype) -> KvLayout:
    return KvLayout(
        num_layers=num_layers,
        num_kv_heads=_NUM_KV_HEADS,
        head_dim=_HEAD_DIM,
        block_size=_BLOCK_SIZE,
        kv_dtype=kv_dtype,
        compute_dtype=torch.bfloat16,
    )


def _for_each(stacked: Tensor, call: Callable[[Tensor], object]) -> list[Call]:
    return [lambda part=part: call(part) for part in stacked]  # type: ignore[misc]


def _precision(kv_dtype: KvDtype) -> str:
    return "bf16" if kv_dtype is KvDtype.AUTO else "fp8"


if __name__ == "__main__":
    run_stage("kernels", run, sys.argv[1:])
