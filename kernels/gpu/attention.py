"""Paged attention on CUDA devices: chunks and decoding rows in one step, keys read through the block table.

The kernels are in `attention_kernel`, how they are launched is decided in `attention_plan`.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.device_batch import DeviceBatch
from kernels.gpu.attention_kernel import attention_kernel, merge_kernel
from kernels.gpu.attention_plan import (
    AttentionShape,
    DeviceTraits,
    Launch,
    can_read_fp8,
    plan_attention,
)
from kernels.gpu.launch import next_power_of_2
from kernels.paged_cache import PagedCache

MERGE_STAGES = 4
_LOG2_E = math.log2(math.e)


def paged_attention(
    query: Tensor,
    cache: PagedCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    is_batch_invariant: bool = False,
) -> Tensor:
    """See `kernels.dispatch.paged_attention`. Rows of a sequence whose context is 0 tokens are zeros.

    Never waits for the device: once the batch has its `DeviceBatch`, the call can be captured in a graph.
    One scale for all of a float8 cache is a scale tensor expanded from it (all strides 0).

    Args:
        is_batch_invariant: a row's bits then depend on its own sequence alone, not on what shares the
            step nor on how its prompt was cut into chunks. Chunks take longer.

    Raises:
        ValueError: `scale` is not positive, or keys and values are laid out differently.
    """
    return run_launches(
        query,
        cache,
        DeviceBatch.of(batch),
        plan_attention(
            attention_shape(query, cache, DeviceBatch.of(batch)),
            device_traits(query.device),
            is_batch_invariant,
        ),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


def attention_shape(query: Tensor, cache: PagedCache, batch: DeviceBatch) -> AttentionShape:
    """The sizes that a plan is made from."""
    num_rows, num_q_heads, head_dim = query.shape
    return AttentionShape(
        num_rows=num_rows,
        num_seqs=batch.num_seqs,
        max_query_len=batch.max_query_len,
        max_context_len=batch.max_context_len,
        num_q_heads=num_q_heads,
        num_kv_heads=cache.key.shape[2],
        head_dim=head_dim,
        element_bytes=query.element_size(),
        is_quantized=cache.is_quantized,
    )


@lru_cache
def device_traits(device: torch.device) -> DeviceTraits:
    """Of a CUDA device; any other stands for Triton's interpreter."""
    if device.type != "cuda":
        return DeviceTraits(num_sms=1, can_read_fp8=False)
    properties = torch.cuda.get_device_properties(device)
    return DeviceTraits(
        num_sms=properties.multi_processor_count,
        can_read_fp8=can_read_fp8((properties.major, properties.minor)),
    )


def run_launches(
    query: Tensor,
    cache: PagedCache,
    batch: DeviceBatch,
    launches: tuple[Launch, ...],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """`paged_attention` by a plan of the caller's."""
    if not scale > 0:
        raise ValueError(f"scale must be positive; got {scale}")
    if cache.key.stride() != cache.value.stride():
        raise ValueError(
            f"keys and values must have the same strides; got {cache.key.stride()} and {cache.value.stride()}"
        )
    query = query if query.stride(-1) == 1 else query.contiguous()
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for launch in launches:
        _run(launch, query, cache, batch, output, scale, sliding_window or 0, soft_cap or 0.0)
    return output


def _run(
    launch: Launch,
    query: Tensor,
    cache: PagedCache,
    batch: DeviceBatch,
    output: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
) -> None:
    shape = attention_shape(query, cache, batch)
    num_scratch_rows = launch.num_scratch_rows(shape)
    sums = torch.empty(num_scratch_rows, shape.head_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(num_scratch_rows, 2, dtype=torch.float32, device=query.device)
    key, value = _readable(cache, device_traits(query.device))
    has_scales = cache.key_scale is not None and cache.value_scale is not None
    attention_kernel[(launch.num_tiles * shape.num_kv_heads, launch.num_splits)](
        query,
        key,
        value,
        cache.key_scale if has_scales else sums,
        cache.value_scale if has_scales else sums,
        output,
        sums,
        stats,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        scale * _LOG2_E,
        batch.num_seqs,
        launch.num_splits,
        *query.stride()[:2],
        *key.stride()[:3],
        *(cache.key_scale.stride() if cache.key_scale is not None else (0, 0, 0)),
        batch.block_tables.stride(0),
        **kernel_constants(launch, shape),
        **kernel_switches(launch, shape, batch.block_size, window, soft_cap),
        **launch.tile.options,
    )
    if launch.is_split:
        merge_kernel[(launch.num_tiles * shape.num_kv_heads, shape.group * launch.block_q)](
            output,
            sums,
            stats,
            batch.query_starts,
            batch.num_seqs,
            launch.num_splits,
            STAGES=MERGE_STAGES,
            num_warps=1,
            **kernel_constants(launch, shape),
        )


def kernel_constants(launch: Launch, shape: AttentionShape) -> dict[str, int]:
    """The compile-time sizes that both kernels take."""
    return {
        "HEAD_DIM": shape.head_dim,
        "PADDED_DIM": next_power_of_2(shape.head_dim),
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "BLOCK_Q": launch.block_q,
        "IS_DECODE": launch.is_decode,
    }


def kernel_switches(
    launch: Launch, shape: AttentionShape, block_size: int, window: int, soft_cap: float
) -> dict[str, float]:
    """The compile-time values that the attention kernel takes besides. 0: no window, no cap."""
    return {
        "BLOCK_SIZE": block_size,
        "BLOCK_M": launch.tile.block_m,
        "BLOCK_N": launch.tile.block_n,
        "SEGMENT_LEN": launch.segment_len,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "IS_QUANTIZED": shape.is_quantized,
        "IS_SPLIT": launch.is_split,
    }


def _readable(cache: PagedCache, device: DeviceTraits) -> tuple[Tensor, Tensor]:
    """float8 tensors as bytes where the device cannot convert them."""
    if cache.is_quantized and not device.can_read_fp8:
        return cache.key.view(torch.int8), cache.value.view(torch.int8)
    return cache.key, cache.value
