"""Paged attention with Llama-3-8B's heads, beside torch's attention over contiguous keys and values."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from bench.gpu.filled_pool import filled_pool, num_blocks_for, scattered_batches
from bench.gpu.stage import Context, run_stage
from bench.gpu.timing import Call
from kernels import dispatch
from kvstore.kv_layout import KvDtype, KvLayout

_NUM_Q_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 32, 8, 128
_SCALE = _HEAD_DIM**-0.5
_BLOCK_SIZE = 16
# More than the caches hold, so that each call finds its keys and values in memory.
_WORKING_SET_BYTES = 1 << 30
_MAX_BATCHES = 16
_KV_DTYPES = (KvDtype.AUTO, KvDtype.FP8_E4M3)
_DTYPE_TO_TARGET = {KvDtype.AUTO: 0.75, KvDtype.FP8_E4M3: 0.60}
_TARGET_FROM_BATCH = 32


@dataclass(frozen=True)
class Case:
    """`batch` sequences, each with `query_len` new tokens at the end of its context."""

    batch: int
    context_len: int
    query_len: int = 1

    @property
    def name(self) -> str:
        if self.query_len > 1:
            return f"chunk of {self.query_len} at {self.context_len}"
        return f"decode {self.batch} × {self.context_len}"

    @property
    def flops(self) -> int:
        """Scores and weighted sum over the pairs a causal mask leaves."""
        before = self.context_len - self.query_len
        pairs = self.query_len * before + self.query_len * (self.query_len + 1) // 2
        return 4 * self.batch * _NUM_Q_HEADS * _HEAD_DIM * pairs


_DECODES = (Case(32, 8192), Case(32, 4096), Case(128, 2048), Case(8, 8192), Case(1, 32768))
_CHUNK = Case(1, 8192, 2048)
_DRY_DECODES = (Case(2, 24), Case(1, 40))
_DRY_CHUNK = Case(1, 24, 5)


def run(context: Context) -> None:
    decodes = _DRY_DECODES if context.is_dry else _DECODES
    chunk = _DRY_CHUNK if context.is_dry else _CHUNK
    for kv_dtype in _KV_DTYPES:
        for case in decodes:
            with context.going_on(_name(case, kv_dtype)):
                _decode(context, case, kv_dtype)
        with context.going_on(_name(chunk, kv_dtype)):
            _prefill(context, chunk, kv_dtype)
    for case in decodes:
        with context.going_on(f"torch, {case.name}"):
            _torch_decode(context, case)
    with context.going_on(f"torch, {chunk.name}"):
        _torch_prefill(context, chunk)


def _name(case: Case, kv_dtype: KvDtype) -> str:
    return f"{case.name}, {'bf16' if kv_dtype is KvDtype.AUTO else 'fp8'}"


def _decode(context: Context, case: Case, kv_dtype: KvDtype) -> None:
    layout = _layout(kv_dtype)
    num_bytes = case.batch * case.context_len * layout.bytes_per_token
    rate = num_bytes / context.timer.seconds(_calls(context, case, layout))
    share = context.copy_share(rate)
    has_target = case.batch >= _TARGET_FROM_BATCH
    target = _DTYPE_TO_TARGET[kv_dtype] if has_target else None
    context.add(_name(case, kv_dtype), rate / 1e9, "GB/s", share, target, note=_note(context))


def _prefill(context: Context, case: Case, kv_dtype: KvDtype) -> None:
    seconds = context.timer.seconds(_calls(context, case, _layout(kv_dtype)))
    rate = case.flops / seconds
    share = context.matmul_share(rate)
    context.add(_name(case, kv_dtype), rate / 1e12, "TFLOP/s", share, note=_note(context))


def _note(context: Context) -> str:
    return "replayed as a graph" if context.timer.was_captured else ""


def _layout(kv_dtype: KvDtype) -> KvLayout:
    """Of one layer: what a call reads."""
    return KvLayout(
        num_layers=1,
        num_kv_heads=_NUM_KV_HEADS,
        head_dim=_HEAD_DIM,
        block_size=_BLOCK_SIZE,
        kv_dtype=kv_dtype,
        compute_dtype=torch.bfloat16,
    )


def _num_batches(context: Context, num_bytes: int) -> int:
    return 2 if context.is_dry else min(_WORKING_SET_BYTES // num_bytes + 1, _MAX_BATCHES)


def _calls(context: Context, case: Case, layout: KvLayout) -> Sequence[Call]:
    num_bytes = case.batch * case.context_len * layout.bytes_per_token
    num_batches = _num_batches(context, num_bytes)
    num_blocks = num_blocks_for(num_batches, case.batch, case.context_len, _BLOCK_SIZE)
    cache = filled_pool(layout, num_blocks, context.device).layer(0)
    batches = scattered_batches(cache, num_batches, case.batch, case.context_len, case.query_len)
    query = torch.randn(
        case.batch * case.query_len, _NUM_Q_HEADS, _HEAD_DIM, device=context.device
    ).bfloat16()
    return [
        lambda batch=batch: dispatch.paged_attention(query, cache, batch, scale=_SCALE)  # type: ignore[misc]
        for batch in batches
    ]


def _torch_decode(context: Context, case: Case) -> None:
    num_bytes = case.batch * case.context_len * _layout(KvDtype.AUTO).bytes_per_token
    shape = (_num_batches(context, num_bytes), 2, case.batch, _NUM_KV_HEADS, case.context_len)
    stored = torch.empty(*shape, _HEAD_DIM, dtype=torch.bfloat16, device=context.device).normal_()
    query = torch.randn(case.batch, _NUM_Q_HEADS, 1, _HEAD_DIM, device=context.device).bfloat16()
    calls: list[Call] = [
        lambda key=key, value=value: functional.scaled_dot_product_attention(  # type: ignore[misc]
            query, key, value, enable_gqa=True
        )
        for key, value in stored
    ]
    rate = num_bytes / context.timer.seconds(calls)
    context.add(
        f"torch, {case.name}", rate / 1e9, "GB/s", context.copy_share(rate), note="contiguous, bf16"
    )


def _torch_prefill(context: Context, case: Case) -> None:
    """With each KV head repeated for its query heads: what torch's fastest kernel accepts everywhere."""
    shape = (1, _NUM_Q_HEADS, case.context_len, _HEAD_DIM)
    key, value = (torch.randn(shape, device=context.device).bfloat16() for _ in range(2))
    query = key[:, :, : case.query_len].clone()
    mask = causal_lower_right(case.query_len, case.context_len)
    seconds = context.timer.seconds(
        [lambda: functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)]
    )
    rate = case.flops / seconds
    share = context.matmul_share(rate)
    context.add(f"torch, {case.name}", rate / 1e12, "TFLOP/s", share, note="contiguous, bf16")


if __name__ == "__main__":
    run_stage("attention", run, sys.argv[1:])
