"""The attention kernels' parts: float8 bytes, offsets past 2**31, the host's plan, what is compiled, what is moved."""

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import make_step
from hypothesis import given
from hypothesis import strategies as st

from kernels import reference
from kernels.batch import AttentionBatch
from kernels.gpu import attention
from kernels.gpu.attention_cost import attention_traffic
from kernels.gpu.attention_plan import (
    AttentionShape,
    DeviceTraits,
    can_read_fp8,
    plan_attention,
)
from kernels.gpu.attention_tile import fit_float16, locate_rows, widen
from kernels.paged_cache import PagedCache

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tensors here are the interpreter's"
)
H200 = DeviceTraits(num_sms=132, can_read_fp8=True)


@triton.jit
def _widen_kernel(bytes_ptr, output_ptr):
    numbers = tl.arange(0, 256)
    tl.store(output_ptr + numbers, widen(tl.load(bytes_ptr + numbers), tl.float16))


@interpreted
def test_every_float8_byte_is_read_as_torch_reads_it() -> None:
    every_byte = torch.arange(256).to(torch.uint8)
    output = torch.empty(256, dtype=torch.float16)
    _widen_kernel[(1,)](every_byte.view(torch.int8), output)
    expected = every_byte.view(torch.float8_e4m3fn).half()
    expected[[0x7F, 0xFF]] = torch.tensor([480.0, -480.0]).half()  # NaN, which is never written
    assert torch.equal(output.view(torch.int16), expected.view(torch.int16))


@triton.jit
def _fit_kernel(query_ptr, numbers_ptr, factor_ptr):
    rows, dims = tl.arange(0, 16), tl.arange(0, 64)
    offsets = rows[:, None] * 64 + dims[None, :]
    numbers, factor = fit_float16(tl.load(query_ptr + offsets))
    tl.store(numbers_ptr + offsets, numbers)
    tl.store(factor_ptr + rows, factor)


@interpreted
@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0, 3e20])
def test_queries_of_any_size_fit_float16(size: float) -> None:
    query = (torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * size).bfloat16()
    numbers, factor = torch.empty(16, 64, dtype=torch.float16), torch.empty(16)
    _fit_kernel[(1,)](query, numbers, factor)
    restored = numbers.float() * factor[:, None]
    largest = query.float().abs().amax(1, keepdim=True)
    assert numbers.isfinite().all()
    assert ((restored - query.float()).abs() <= largest * 2.0**-24).all()


@triton.jit
def _locate_kernel(
    starts_ptr, num_seqs, output_ptr, block_q: tl.constexpr, is_decode: tl.constexpr
):
    tile = tl.program_id(0)
    seq, start, _, first, count = locate_rows(starts_ptr, num_seqs, tile, block_q, is_decode)
    tl.store(output_ptr + tile * 3, seq)
    tl.store(output_ptr + tile * 3 + 1, start + first)
    tl.store(output_ptr + tile * 3 + 2, count)


@interpreted
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 5))
def test_every_row_is_in_one_tile_of_one_launch(query_lens: list[int], block_q: int) -> None:
    num_seqs, num_rows = len(query_lens), sum(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    found = []
    for is_decode, num_tiles in ((True, num_seqs), (False, num_rows // block_q + num_seqs)):
        output = torch.empty(num_tiles, 3, dtype=torch.int32)
        _locate_kernel[(num_tiles,)](starts, num_seqs, output, block_q, is_decode)
        for seq, first, count in output.tolist():
            assert (query_lens[seq] == 1) == is_decode or count <= 0
            found += [(seq, row) for row in range(first, first + count)]
    owners = [seq for seq, query_len in enumerate(query_lens) for _ in range(query_len)]
    assert sorted(found) == list(zip(owners, range(num_rows), strict=True))


@interpreted
def test_a_pool_of_more_than_2_to_the_31_numbers() -> None:
    """Blocks around the end of a pool of 2**31 bytes a tensor and more, whose other pages are never touched."""
    step = make_step([(1, 40)], num_q_heads=2, num_kv_heads=1, kv_dtype=torch.float8_e4m3fn)
    small = step.cache
    assert small.key_scale is not None and small.value_scale is not None
    block_numbers = small.key[0].numel()
    num_blocks = 2**31 // block_numbers + 8
    targets = torch.arange(len(small.key)) + num_blocks - len(small.key)
    huge = PagedCache(
        *(_huge(tensor, num_blocks, targets) for tensor in (small.key, small.value)),
        *(_huge(tensor, num_blocks, targets) for tensor in (small.key_scale, small.value_scale)),
    )
    tables = targets[step.batch.block_tables.long()]
    assert int(tables[0, 0]) * block_numbers >= 2**31
    batch = AttentionBatch(
        step.batch.slots, tables.int(), step.batch.query_starts, step.batch.context_lens, 16
    )
    output = attention.paged_attention(step.query, huge, batch, scale=0.2)
    torch.testing.assert_close(output, step.sdpa(0.2), atol=1e-5, rtol=1e-5)


def _huge(tensor: torch.Tensor, num_blocks: int, targets: torch.Tensor) -> torch.Tensor:
    huge = torch.empty(num_blocks, *tensor.shape[1:], dtype=tensor.dtype)
    reference.as_bytes(huge)[targets] = reference.as_bytes(tensor)
    return huge


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)],
)
def test_who_reads_float8(capability: tuple[int, int], expected: bool) -> None:
    assert can_read_fp8(capability) is expected


def shape_of(
    num_seqs: int, query_len: int, context: int, *, is_quantized: bool = False, head_dim: int = 128
) -> AttentionShape:
    """Llama-3-8B's heads."""
    return AttentionShape(
        num_rows=num_seqs * query_len,
        num_seqs=num_seqs,
        max_query_len=query_len,
        max_context_len=context,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        element_bytes=2,
        is_quantized=is_quantized,
    )


@pytest.mark.parametrize(
    ("num_seqs", "context", "num_splits"),
    [(1, 32768, 64), (8, 8192, 9), (32, 4096, 3), (128, 2048, 1), (1, 100, 1)],
)
def test_decode_splits_fill_the_device(num_seqs: int, context: int, num_splits: int) -> None:
    (launch,) = plan_attention(shape_of(num_seqs, 1, context), H200, False)
    assert launch.is_decode
    assert launch.num_splits == num_splits


def test_a_mixed_step_has_two_launches_and_one_chunk_has_one() -> None:
    assert [launch.is_decode for launch in plan_attention(shape_of(4, 64, 2000), H200, False)] == [
        False,
        True,
    ]
    assert [launch.is_decode for launch in plan_attention(shape_of(1, 64, 2000), H200, False)] == [
        False
    ]


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 100_000), st.booleans())
def test_batch_invariant_plans_differ_in_nothing_that_rounds(
    num_seqs: int, query_len: int, context: int, is_quantized: bool
) -> None:
    shape = shape_of(num_seqs, query_len, context, is_quantized=is_quantized)
    launches = plan_attention(shape, H200, True)
    (alone,) = plan_attention(shape_of(1, 1, 1, is_quantized=is_quantized), H200, True)
    assert {launch.tile for launch in launches} == {alone.tile}
    assert {launch.segment_len for launch in launches} == {alone.segment_len}
    assert alone.segment_len % alone.tile.block_n == 0


def test_bytes_of_one_decoding_step() -> None:
    """Counted by hand: batch 32 at 4,096 tokens, Llama-3-8B's heads, 3 splits."""
    plain = attention_traffic(shape_of(32, 1, 4096), [(1, 4096)] * 32, H200)
    rows = 2 * 32 * 32 * 128 * 2  # queries and outputs
    kv = 2 * 32 * 4096 * 8 * 128 * 2
    assert plain.least_bytes == rows + kv
    scratch = 2 * 32 * 32 * 3 * (128 + 2) * 4
    tables = 32 * 8 * 4096 * 4  # every program of a KV head reads the ids of its keys
    assert plain.named_bytes == rows + kv + scratch + tables
    quantized = attention_traffic(shape_of(32, 1, 4096, is_quantized=True), [(1, 4096)] * 32, H200)
    assert quantized.least_bytes == rows + kv // 2 + 2 * 32 * 4096 * 8 * 4


def test_bytes_of_a_chunk() -> None:
    """Keys are read once for each tile of 32 positions that sees them, and with a window from its start."""
    shape = shape_of(1, 64, 64)
    kv_row = 2 * 8 * 128 * 2 + 8 * 4
    traffic = attention_traffic(shape, [(64, 64)], DeviceTraits(1, True))
    rows = 2 * 64 * 32 * 128 * 2
    assert traffic.least_bytes == rows + 64 * (kv_row - 8 * 4)
    assert traffic.named_bytes == rows + (32 + 64) * kv_row
    windowed = attention_traffic(
        shape_of(1, 1, 1000), [(1, 1000)], DeviceTraits(1, True), sliding_window=100
    )
    assert windowed.least_bytes == 2 * 32 * 128 * 2 + 100 * (kv_row - 8 * 4)
    assert windowed.named_bytes == 2 * 32 * 128 * 2 + (1000 - 896) * kv_row
