"""A KV pool that holds numbers as if prompts had been computed: what a step costs does not depend on which."""

import torch
from torch import Tensor

from kernels import fp8
from kernels.batch import AttentionBatch
from kernels.paged_cache import PagedCache
from kvstore.kv_layout import KvLayout
from kvstore.kv_pool import KvPool

_CHUNK_BLOCKS = 1024


def filled_pool(layout: KvLayout, num_blocks: int, device: torch.device) -> KvPool:
    """Normally distributed keys and values in every block."""
    pool = KvPool(layout, num_blocks, device)
    for cache in pool.layers:
        _fill(cache.key, cache.key_scale)
        _fill(cache.value, cache.value_scale)
    return pool


def _fill(store: Tensor, scale_store: Tensor | None) -> None:
    if scale_store is None:
        store.normal_()
        return
    # In chunks: quantizing holds several times as many bytes as its result.
    for start in range(0, store.shape[0], _CHUNK_BLOCKS):
        end = min(start + _CHUNK_BLOCKS, store.shape[0])
        quantized = fp8.quantize(torch.randn(store[start:end].shape, device=store.device))
        store.view(torch.uint8)[start:end] = quantized.values.view(torch.uint8)
        scale_store[start:end] = quantized.scale


def scattered_batches(
    cache: PagedCache, num_batches: int, batch: int, context_len: int, query_len: int = 1
) -> list[AttentionBatch]:
    """Batches over different blocks each, in the scrambled order that blocks have in a pool long in use.

    The last `query_len` positions of each sequence are the step's.
    """
    block_size = cache.key.shape[1]
    blocks_a_sequence = -(-context_len // block_size)
    wanted = num_batches * batch * blocks_a_sequence
    device = cache.key.device
    order = torch.randperm(cache.key.shape[0], device=device)[:wanted]
    tables = order.to(torch.int32).view(num_batches, batch, blocks_a_sequence)
    positions = torch.arange(context_len - query_len, context_len, device=device)
    columns, offsets = positions // block_size, positions % block_size
    return [
        AttentionBatch(
            slots=(table[:, columns].long() * block_size + offsets).flatten(),
            block_tables=table.contiguous(),
            query_starts=tuple(range(0, batch * query_len + 1, query_len)),
            context_lens=(context_len,) * batch,
            block_size=block_size,
        )
        for table in tables
    ]


def num_blocks_for(num_batches: int, batch: int, context_len: int, block_size: int) -> int:
    return num_batches * batch * -(-context_len // block_size)
