"""Copies KV blocks inside the pool, all layers in one launch.

A block copied to may be one that another pair copies from. So a program owns the same few bytes of every
block: it reads them from all sources, waits, and writes them to all targets. Different bytes never meet.

    program (tensor 0, run 0)   (tensor 0, run 1) …  (last tensor, last run)
    bytes 0…4095 of each source block of tensor 0, then of each target block
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.gpu.launch import ceil_div, next_power_of_2
from kernels.paged_cache import PagedCache

# 16 KiB in 128 threads' registers: 32 of 4 bytes each.
_TILE_WORDS = 4096
_NUM_WARPS = 4
# Runs under 64 bytes would waste most of each sector that is read.
_MIN_RUN_WORDS = 16
_MAX_PAIRS = _TILE_WORDS // _MIN_RUN_WORDS


@dataclass(frozen=True)
class CopyPlan:
    """How many pairs, and 4-byte words of each block, a program holds."""

    num_pairs: int  # a power of two, the pairs or more
    run_words: int

    @classmethod
    def of(cls, num_pairs: int, max_block_words: int) -> "CopyPlan":
        padded = next_power_of_2(num_pairs)
        longest = max(next_power_of_2(max_block_words), _MIN_RUN_WORDS)
        return cls(padded, min(_TILE_WORDS // padded, longest))


@triton.jit(do_not_specialize=["source_stride", "target_stride", "num_pairs"])
def _copy_kernel(
    table_ptr,  # int64 [num_tensors, 2]: address, words a block
    sources_ptr,  # int64 [num_pairs]
    targets_ptr,  # int64 [num_pairs]
    source_stride,
    target_stride,
    num_pairs,
    PAIRS: tl.constexpr,
    RUN: tl.constexpr,
    IS_ALIGNED: tl.constexpr,  # every address and block is a multiple of 16 bytes
):
    tensor = tl.program_id(0)
    address = tl.load(table_ptr + 2 * tensor)
    block_words = tl.load(table_ptr + 2 * tensor + 1)
    words = address.to(tl.pointer_type(tl.int32))
    if IS_ALIGNED:
        words = tl.multiple_of(words, 16)
        block_words = tl.multiple_of(block_words, 4)
    run = tl.program_id(1) * RUN + tl.arange(0, RUN)
    pair = tl.arange(0, PAIRS)
    is_pair = pair < num_pairs
    source = tl.load(sources_ptr + pair * source_stride, mask=is_pair, other=0)
    target = tl.load(targets_ptr + pair * target_stride, mask=is_pair, other=0)
    is_copied = is_pair[:, None] & (run < block_words)[None, :]
    source_words = words + (source * block_words)[:, None] + run[None, :]
    target_words = words + (target * block_words)[:, None] + run[None, :]
    held = tl.load(source_words, mask=is_copied)
    tl.debug_barrier()  # all of this program's reads are done before any of its writes
    tl.store(target_words, held, mask=is_copied)


def copy_blocks(caches: Sequence[PagedCache], sources: Tensor, targets: Tensor) -> None:
    """See `kernels.dispatch.copy_blocks`.

    The first call with these caches sends their addresses to the device; later ones send nothing. More than
    256 pairs, or tensors that are not whole 4-byte words a block, go through the torch twin.
    """
    num_pairs = sources.numel()
    tensors = [tensor for cache in caches for tensor in cache.tensors()]
    shapes = tuple((t.data_ptr(), t.stride(0) * t.element_size()) for t in tensors)
    if (
        num_pairs == 0
        or num_pairs > _MAX_PAIRS
        or any(size % 4 for shape in shapes for size in shape)
    ):
        reference.copy_blocks(caches, sources, targets)
        return
    max_block_words = max(block_bytes for _, block_bytes in shapes) // 4
    plan = CopyPlan.of(num_pairs, max_block_words)
    _copy_kernel[(len(tensors), ceil_div(max_block_words, plan.run_words))](
        _table(shapes, sources.device),
        sources,
        targets,
        sources.stride(0),  # often the columns of one tensor of pairs
        targets.stride(0),
        num_pairs,
        PAIRS=plan.num_pairs,
        RUN=plan.run_words,
        IS_ALIGNED=all(size % 16 == 0 for shape in shapes for size in shape),
        num_warps=_NUM_WARPS,
    )


@lru_cache(maxsize=16)
def _table(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """int64 [num_tensors, 2]: address, 4-byte words a block."""
    rows = [(address, block_bytes // 4) for address, block_bytes in shapes]
    return torch.tensor(rows, dtype=torch.int64, device=device)
