"""Random steps for attention, in a pool full of NaN, and the same attention by torch on contiguous copies."""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import fp8, reference
from kernels.batch import AttentionBatch
from kernels.paged_cache import PagedCache

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Step:
    """Sequences whose contexts are written, and the query rows of their last positions."""

    query: Tensor
    cache: PagedCache
    batch: AttentionBatch
    contexts: list[
        tuple[Tensor, Tensor]
    ]  # keys and values as a reader of the cache should see them

    def sdpa(self, scale: float, sliding_window: int | None = None) -> Tensor:
        """torch's own attention, one sequence at a time, in float32."""
        outputs = []
        for i, (key, value) in enumerate(self.contexts):
            rows = slice(self.batch.query_starts[i], self.batch.query_starts[i + 1])
            positions = torch.arange(len(key))
            visible = reference.visible_keys(
                positions[len(key) - self.batch.query_len(i) :], positions, sliding_window
            )
            outputs.append(
                functional.scaled_dot_product_attention(
                    self.query[rows].float().transpose(0, 1),
                    key.float().transpose(0, 1),
                    value.float().transpose(0, 1),
                    visible,
                    scale=scale,
                    enable_gqa=True,
                ).transpose(0, 1)
            )
        return torch.cat(outputs)


def nan_cache(
    num_blocks: int, block_size: int, heads: tuple[int, int], dtype: torch.dtype
) -> PagedCache:
    """Full of NaN, scales included. heads: num_kv_heads, head_dim."""
    shape = (num_blocks, block_size, *heads)
    if dtype != FP8:
        return PagedCache(*(torch.full(shape, math.nan, dtype=dtype) for _ in range(2)))
    vectors = [torch.full(shape, 0x7F, dtype=torch.uint8).view(FP8) for _ in range(2)]
    return PagedCache(*vectors, *(torch.full(shape[:-1], math.nan) for _ in range(2)))


def make_step(
    lengths: list[tuple[int, int]],
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Step:
    """lengths: (query_len, context_len) of each sequence. Blocks are dealt out in random order."""
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-context // block_size) for _, context in lengths]
    free = list(range(sum(blocks_of) + 2))
    random.Random(seed).shuffle(free)
    kv_dtype = kv_dtype or dtype
    cache = nan_cache(len(free), block_size, (num_kv_heads, head_dim), kv_dtype)
    width = max(blocks_of) + 1
    tables, slots, starts, contexts = [], [], [0], []
    for (query_len, context), num_blocks in zip(lengths, blocks_of, strict=True):
        table = torch.tensor([free.pop() for _ in range(num_blocks)])
        positions = torch.arange(context)
        where = table[positions // block_size] * block_size + positions % block_size
        key = torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype)
        value = torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype)
        reference.write_kv(key, value, cache, where)
        if kv_dtype == FP8:
            key, value = (fp8.dequantize(*fp8.quantize(tensor)) for tensor in (key, value))
        contexts.append((key, value))
        # Behind the context a table may hold anything: here, blocks of NaN.
        tables.append(functional.pad(table, (0, width - num_blocks), value=free[0]))
        slots.append(where[context - query_len :])
        starts.append(starts[-1] + query_len)
    query = torch.randn(starts[-1], num_q_heads, head_dim, generator=generator).to(dtype)
    batch = AttentionBatch(
        torch.cat(slots),
        torch.stack(tables).int(),
        tuple(starts),
        tuple(context for _, context in lengths),
        block_size,
    )
    return Step(query, cache, batch, contexts)


def part_of(
    step: Step, index: int, query_len: int, context_len: int
) -> tuple[Tensor, AttentionBatch]:
    """One sequence alone, at an earlier point: its queries and its batch, over the same pool.

    The sequence must have all its rows in the step.
    """
    first = step.batch.query_starts[index] + context_len - query_len
    rows = slice(first, first + query_len)
    batch = AttentionBatch(
        step.batch.slots[rows],
        step.batch.block_tables[index : index + 1],
        (0, query_len),
        (context_len,),
        step.batch.block_size,
    )
    return step.query[rows], batch
