"""Block copies in all layers at once, against the twin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.gpu import block_copy
from kernels.gpu.block_copy import CopyPlan
from kernels.paged_cache import PagedCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_caches(
    num_layers: int, num_blocks: int, slot_shape: tuple[int, int, int], dtype: torch.dtype
) -> list[PagedCache]:
    """Random bytes, NaN patterns among them."""
    generator = torch.Generator().manual_seed(num_layers)

    def random_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        data = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        return data.view(dtype).view(shape).to(DEVICE)

    def layer() -> PagedCache:
        shape = (num_blocks, *slot_shape)
        vectors = [random_bytes(shape, dtype) for _ in range(2)]
        if dtype != torch.float8_e4m3fn:
            return PagedCache(*vectors)
        return PagedCache(*vectors, *(random_bytes(shape[:-1], torch.float32) for _ in range(2)))

    return [layer() for _ in range(num_layers)]


def as_bytes(caches: list[PagedCache]) -> list[Tensor]:
    return [tensor.view(torch.uint8) for cache in caches for tensor in cache.tensors()]


def check(caches: list[PagedCache], pairs: list[tuple[int, int]]) -> None:
    copies = [PagedCache(*(t.clone() for t in cache.tensors())) for cache in caches]
    sources, targets = torch.tensor(pairs, dtype=torch.int64, device=DEVICE).view(-1, 2).unbind(1)
    block_copy.copy_blocks(caches, sources, targets)
    reference.copy_blocks(copies, sources, targets)
    for ours, theirs in zip(as_bytes(caches), as_bytes(copies), strict=True):
        assert torch.equal(ours, theirs)


@st.composite
def block_pairs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    num_blocks = draw(st.integers(1, 40))
    targets = draw(st.lists(st.integers(0, num_blocks - 1), unique=True, max_size=num_blocks))
    sources = [draw(st.integers(0, num_blocks - 1)) for _ in targets]
    return num_blocks, list(zip(sources, targets, strict=True))


@settings(max_examples=50)
@given(
    block_pairs(),
    st.integers(1, 3),
    st.sampled_from([(1, 1, 1), (8, 1, 16), (16, 3, 64), (16, 2, 80), (32, 2, 128)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
)
def test_it_agrees_with_its_twin(
    pairs: tuple[int, list[tuple[int, int]]],
    num_layers: int,
    slot_shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    num_blocks, copies = pairs
    check(make_caches(num_layers, num_blocks, slot_shape, dtype), copies)


@pytest.mark.parametrize("num_pairs", [2, 33, 256, 257])
def test_a_ring_of_copies_reads_before_it_writes(num_pairs: int) -> None:
    ring = [(i, (i + 1) % num_pairs) for i in range(num_pairs)]
    check(make_caches(2, num_pairs, (16, 1, 16), torch.float8_e4m3fn), ring)


def test_a_swap_of_long_blocks() -> None:
    check(make_caches(1, 2, (64, 8, 128), torch.float32), [(0, 1), (1, 0)])


def test_views_that_begin_off_a_16_byte_line_are_copied_too() -> None:
    store = torch.arange(4 * 8 * 3 + 1, dtype=torch.float32, device=DEVICE)[1:].view(4, 8, 1, 3)
    check([PagedCache(store, store.clone())], [(0, 3), (2, 1)])


@given(st.integers(1, 256), st.integers(1, 1 << 20))
def test_a_program_holds_what_its_registers_hold(num_pairs: int, block_words: int) -> None:
    plan = CopyPlan.of(num_pairs, block_words)
    assert num_pairs <= plan.num_pairs < 2 * num_pairs
    assert plan.num_pairs * plan.run_words <= 4096
    assert plan.run_words >= 16
