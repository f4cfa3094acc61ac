"""Inputs for the tests on a GPU. When the check dry-runs, the same lines run on the CPU, with less."""

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.paged_cache import PagedCache
from kvstore.kv_layout import KvDtype, KvLayout
from kvstore.kv_pool import KvPool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_DRY = DEVICE.type == "cpu"
NUM_BLOCKS = 400
# The interpreter's products of bf16 numbers are wrong.
HALVES = [torch.float16] if IS_DRY else [torch.bfloat16, torch.float16]


def randn(*sizes: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator).to(dtype).to(DEVICE)


def nan_pool(
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: KvDtype,
    *,
    block_size: int = 16,
    num_layers: int = 1,
) -> KvPool:
    """NaN in every slot, as memory that nobody has written may hold."""
    layout = KvLayout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        kv_dtype=kv_dtype,
        compute_dtype=dtype,
    )
    pool = KvPool(layout, NUM_BLOCKS, DEVICE)
    for cache in pool.layers:
        for tensor in cache.tensors():
            if tensor.dtype == torch.float8_e4m3fn:
                tensor.view(torch.uint8).fill_(0x7F)
            else:
                tensor.fill_(float("nan"))
    return pool


def clone(cache: PagedCache) -> PagedCache:
    return PagedCache(
        cache.key.clone(),
        cache.value.clone(),
        None if cache.key_scale is None else cache.key_scale.clone(),
        None if cache.value_scale is None else cache.value_scale.clone(),
    )


def ragged_batch(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], block_size: int = 16, seed: int = 0
) -> tuple[AttentionBatch, Tensor]:
    """A batch over scattered blocks, and the slots of all its contexts, one after another."""
    counts = [-(-length // block_size) for length in context_lens]
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed))
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    new_slots, all_slots, start = [], [], 0
    for i, count in enumerate(counts):
        blocks = order[start : start + count]
        start += count
        tables[i, :count] = blocks
        positions = torch.arange(context_lens[i])
        slots = blocks[positions // block_size] * block_size + positions % block_size
        all_slots.append(slots)
        new_slots.append(slots[context_lens[i] - query_lens[i] :])
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    batch = AttentionBatch(
        slots=torch.cat(new_slots).to(DEVICE),
        block_tables=tables.to(DEVICE),
        query_starts=tuple(starts),
        context_lens=context_lens,
        block_size=block_size,
    )
    return batch, torch.cat(all_slots).to(DEVICE)
