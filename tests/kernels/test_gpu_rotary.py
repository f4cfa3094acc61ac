"""Rotation, quantization and the write into the pool, against the twin and against torch's cast to float8."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import fp8, reference
from kernels.gpu import rotary
from kernels.gpu.e4m3 import e4m3_bits
from kernels.paged_cache import PagedCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3 = torch.float8_e4m3fn
NUM_BLOCKS, BLOCK_SIZE = 5, 8


@triton.jit
def _encode_kernel(numbers_ptr, codes_ptr, block: tl.constexpr):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(codes_ptr + offsets, e4m3_bits(tl.load(numbers_ptr + offsets)))


def encode(numbers: Tensor) -> Tensor:
    """float32 [a multiple of 1024] → uint8"""
    codes = torch.empty(len(numbers), dtype=torch.uint8, device=DEVICE)
    _encode_kernel[(len(numbers) // 1024,)](numbers, codes, block=1024)
    return codes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number_is_encoded_as_torch_casts_it(dtype: torch.dtype) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = patterns.float().clamp(-fp8.FP8_MAX, fp8.FP8_MAX)
    expected = numbers.to(E4M3)
    codes = encode(numbers.to(DEVICE)).cpu()
    is_nan = numbers.isnan()
    assert torch.equal(codes[~is_nan], expected.view(torch.uint8)[~is_nan])
    assert codes[is_nan].view(E4M3).float().isnan().all()


def test_halves_between_two_codes_go_to_the_even_one() -> None:
    steps = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    halves = torch.cat([(steps[1:] + steps[:-1]) / 2, torch.zeros(1024 - 126)])
    for numbers in (halves, -halves, halves * (1 + 2.0**-20), halves * (1 - 2.0**-20)):
        expected = numbers.to(E4M3).view(torch.uint8)
        assert torch.equal(encode(numbers.to(DEVICE)).cpu(), expected)


def nan_cache(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagedCache:
    """As a pool is before anything was written, at its worst."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    if dtype != E4M3:
        key = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
        return PagedCache(key, key.clone())
    codes = torch.full(shape, 0x7F, dtype=torch.uint8, device=DEVICE)
    scale = torch.full(shape[:-1], float("nan"), device=DEVICE)
    return PagedCache(codes.view(E4M3), codes.clone().view(E4M3), scale, scale.clone())


def angles(num_tokens: int, head_dim: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    half = torch.rand(num_tokens, 1, head_dim // 2, generator=generator) * 6
    cos, sin = half.cos().to(dtype), half.sin().to(dtype)
    return torch.cat((cos, cos), -1).to(DEVICE), torch.cat((-sin, sin), -1).to(DEVICE)


def make_heads(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, seed: int
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randn(num_tokens, num_heads, head_dim, generator=generator) * 2
    return heads.to(dtype).to(DEVICE)


def make_slots(num_tokens: int, seed: int) -> Tensor:
    """All different; about a third stand for rows of padding."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:num_tokens]
    is_padding = torch.rand(num_tokens, generator=generator) < 0.3
    return slots.masked_fill(is_padding, -1).to(DEVICE)


def restored(cache: PagedCache) -> list[Tensor]:
    stores = [(cache.key, cache.key_scale), (cache.value, cache.value_scale)]
    return [t.float() if s is None else fp8.dequantize(t, s) for t, s in stores]


# Of the largest number in a vector: the kernel rounds once after rotating, the twin after each product; the
# interpreter cuts bfloat16 off; and a number near the middle of two e4m3 codes may go to either.
DTYPE_TO_TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@settings(max_examples=60)
@given(
    num_tokens=st.integers(0, 12),
    num_kv_heads=st.sampled_from([1, 2, 3, 8]),
    group=st.sampled_from([1, 2, 3, 7]),
    head_dim=st.sampled_from([2, 16, 64, 80, 96, 128]),
    dtype=st.sampled_from(list(DTYPE_TO_TOLERANCE)),
    is_quantized=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_agrees_with_its_twin_and_touches_nothing_else(
    num_tokens: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    is_quantized: bool,
    seed: int,
) -> None:
    num_q_heads = num_kv_heads * group
    heads = make_heads(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim, dtype, seed)
    before = heads.clone()
    cos, sin = angles(num_tokens, head_dim, dtype, seed)
    slots = make_slots(num_tokens, seed)
    ours = nan_cache(num_kv_heads, head_dim, E4M3 if is_quantized else dtype)
    theirs = nan_cache(num_kv_heads, head_dim, E4M3 if is_quantized else dtype)
    query = rotary.rotate_and_write(heads, cos, sin, ours, slots, num_q_heads=num_q_heads)
    expected = reference.rotate_and_write(heads, cos, sin, theirs, slots, num_q_heads=num_q_heads)
    tolerance = DTYPE_TO_TOLERANCE[dtype]
    torch.testing.assert_close(query, expected, rtol=0, atol=8 * tolerance)
    assert torch.equal(heads, before)
    tolerance += 2.0**-4 if is_quantized else 0.0
    written = slots[slots >= 0]
    for one, other in zip(restored(ours), restored(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=8 * tolerance, equal_nan=True)
        assert one.flatten(0, 1)[written].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-7, 5e3])
def test_without_a_turn_the_pool_holds_the_twins_bits(dtype: torch.dtype, scale: float) -> None:
    heads = make_heads(20, 8, 64, dtype, 3) * scale
    heads[4] = 0
    cos, sin = torch.ones(20, 1, 64, dtype=dtype), torch.zeros(20, 1, 64, dtype=dtype)
    slots = make_slots(20, 3)
    for store in (E4M3, dtype):
        ours, theirs = nan_cache(2, 64, store), nan_cache(2, 64, store)
        given_ = (heads, cos.to(DEVICE), sin.to(DEVICE))
        rotary.rotate_and_write(*given_, ours, slots, num_q_heads=4)
        reference.rotate_and_write(*given_, theirs, slots, num_q_heads=4)
        for one, other in zip(ours.tensors(), theirs.tensors(), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_number_breaks_its_own_head_alone(broken: float) -> None:
    heads = make_heads(2, 8, 16, torch.float32, 5)
    heads[0, 4, 3] = broken  # key head 0
    heads[1, 7, 9] = broken  # value head 1
    cos, sin = angles(2, 16, torch.float32, 5)
    slots = torch.tensor([3, 17], device=DEVICE)
    cache = nan_cache(2, 16, E4M3)
    rotary.rotate_and_write(heads, cos, sin, cache, slots, num_q_heads=4)
    key, value = (store.flatten(0, 1)[slots] for store in restored(cache))
    # All of it, by its scale: not every reader knows the byte of NaN.
    assert key[0, 0].isnan().all() and value[1, 1].isnan().all()
    assert key[0, 1].isfinite().all() and key[1].isfinite().all()
    assert value[0].isfinite().all() and value[1, 0].isfinite().all()


def test_a_step_of_rows_is_read_in_place_from_a_wider_tensor() -> None:
    wide = make_heads(6, 9, 32, torch.float32, 1)
    heads = wide[:, :8]
    assert not heads.is_contiguous()
    cos, sin = angles(6, 32, torch.float32, 1)
    slots = torch.arange(6, device=DEVICE)
    ours, theirs = nan_cache(2, 32, torch.float32), nan_cache(2, 32, torch.float32)
    query = rotary.rotate_and_write(heads, cos, sin, ours, slots, num_q_heads=4)
    expected = reference.rotate_and_write(heads, cos, sin, theirs, slots, num_q_heads=4)
    torch.testing.assert_close(query, expected)
    torch.testing.assert_close(ours.key, theirs.key, equal_nan=True)
    torch.testing.assert_close(ours.value, theirs.value, equal_nan=True)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    heads = make_heads(9, 12, 64, torch.float16, 2)
    cos, sin = angles(9, 64, torch.float16, 2)
    slots = torch.arange(9, device=DEVICE)
    together, alone = nan_cache(2, 64, E4M3), nan_cache(2, 64, E4M3)
    query = rotary.rotate_and_write(heads, cos, sin, together, slots, num_q_heads=8)
    for i in range(9):
        row = slice(i, i + 1)
        query_row = rotary.rotate_and_write(
            heads[row], cos[row], sin[row], alone, slots[row], num_q_heads=8
        )
        assert torch.equal(query_row, query[row])
    for one, other in zip(together.tensors(), alone.tensors(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_slots_past_two_billion_numbers_are_reached() -> None:
    """The pool is address space that is never touched but at one slot near its end."""
    num_slots = (1 << 31) // 64 + 64  # of 64 numbers: over 2**31 in all
    store = torch.empty(num_slots // 8, 8, 1, 64, dtype=torch.uint8, device=DEVICE)
    scale = torch.empty(num_slots // 8, 8, 1, device=DEVICE)
    cache = PagedCache(store.view(E4M3), store.view(E4M3), scale, scale)
    heads = make_heads(1, 3, 64, torch.float16, 8)
    heads[0, 1] = heads[0, 2]  # key and value share the memory
    cos = torch.ones(1, 1, 64, dtype=torch.float16, device=DEVICE)
    slot = num_slots - 3
    slots = torch.tensor([slot], device=DEVICE)
    rotary.rotate_and_write(heads, cos, torch.zeros_like(cos), cache, slots, num_q_heads=1)
    expected = fp8.quantize(heads[0, 2])
    assert torch.equal(store.flatten(0, 1)[slot, 0], expected.values.view(torch.uint8))
    assert scale.flatten(0, 1)[slot, 0] == expected.scale
