"""The attention kernels against torch's own attention on contiguous copies, and against the twin."""

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import FP8, Step, make_step
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.device_batch import DeviceBatch
from kernels.gpu import attention
from kernels.gpu.attention_plan import AttentionShape, DeviceTraits, Launch, plan_attention
from kernels.paged_cache import PagedCache

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tensors here are the interpreter's"
)

SCALE = 0.2
DTYPE_TO_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
WIDE = DeviceTraits(num_sms=132, can_read_fp8=False)  # as many programs as an H200 wants


def attend(
    step: Step,
    *,
    device: DeviceTraits = WIDE,
    is_batch_invariant: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """By the plan for `device`, which decides how far the keys are split."""
    batch = DeviceBatch.of(step.batch)
    shape = attention.attention_shape(step.query, step.cache, batch)
    return attention.run_launches(
        step.query,
        step.cache,
        batch,
        plan_attention(shape, device, is_batch_invariant),
        scale=SCALE,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


def check(
    step: Step, sliding_window: int | None = None, *, is_batch_invariant: bool = False
) -> None:
    output = attend(step, sliding_window=sliding_window, is_batch_invariant=is_batch_invariant)
    assert output.dtype == step.query.dtype
    expected = step.sdpa(SCALE, sliding_window)
    tolerance = DTYPE_TO_TOLERANCE[step.query.dtype]
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)


MIXED = [(1, 1), (5, 70), (1, 70), (1, 33), (40, 40), (2, 17)]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_head_sizes(head_dim: int, kv_dtype: torch.dtype) -> None:
    check(make_step(MIXED, head_dim=head_dim, kv_dtype=kv_dtype))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_block_sizes(block_size: int, kv_dtype: torch.dtype) -> None:
    check(make_step([*MIXED, (1, 300)], block_size=block_size, kv_dtype=kv_dtype))


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads"),
    [(2, 2), (4, 2), (6, 2), (8, 2), (7, 1), (8, 1), (16, 1), (24, 1)],
)
def test_groups_of_heads(num_q_heads: int, num_kv_heads: int) -> None:
    check(make_step(MIXED, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads))


# The interpreter multiplies bfloat16 matrices as integers; over a float8 cache the products are float16.
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float16, torch.float16), (torch.float16, FP8), (torch.bfloat16, FP8)],
)
def test_half_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(make_step(MIXED, dtype=dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize("sliding_window", [1, 5, 32, 64, 1000])
@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_sliding_windows(sliding_window: int, is_batch_invariant: bool) -> None:
    step = make_step([*MIXED, (1, 700)])
    check(step, sliding_window, is_batch_invariant=is_batch_invariant)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
@pytest.mark.parametrize(
    "factor", [1.0, 1e4]
)  # the second takes scores / cap past 88, where e ** x overflows
def test_soft_cap_as_the_twin_has_it(soft_cap: float, kv_dtype: torch.dtype, factor: float) -> None:
    step = make_step(MIXED, kv_dtype=kv_dtype)
    step = replace(step, query=step.query * factor)
    expected = reference.paged_attention(
        step.query, step.cache, step.batch, scale=SCALE, soft_cap=soft_cap
    )
    torch.testing.assert_close(attend(step, soft_cap=soft_cap), expected, atol=2e-5, rtol=2e-5)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 200)).map(lambda pair: (pair[0], sum(pair))),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([8, 16, 32, 64]),
    st.sampled_from([torch.float32, FP8]),
    st.one_of(st.none(), st.integers(1, 100)),
    st.booleans(),
    st.integers(0, 99),
)
def test_ragged_steps(
    lengths: list[tuple[int, int]],
    block_size: int,
    kv_dtype: torch.dtype,
    sliding_window: int | None,
    is_batch_invariant: bool,
    seed: int,
) -> None:
    step = make_step(lengths, block_size=block_size, kv_dtype=kv_dtype, seed=seed)
    check(step, sliding_window, is_batch_invariant=is_batch_invariant)


def test_a_few_long_sequences_are_split() -> None:
    step = make_step([(1, 4096), (1, 2500), (1, 3)], num_q_heads=2, num_kv_heads=1)
    launches = plan_attention(
        attention.attention_shape(step.query, step.cache, DeviceBatch.of(step.batch)), WIDE, False
    )
    assert [launch.num_splits for launch in launches] == [8]
    check(step)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [torch.float16, FP8])
def test_every_length_around_a_tile_and_a_few_of_thousands(kv_dtype: torch.dtype) -> None:
    lengths = [(1, n) for n in (*range(1, 67), *range(127, 131), 1023, 1024, 1025, 4095, 4096)]
    check(make_step(lengths, head_dim=128, dtype=torch.float16, kv_dtype=kv_dtype))


def _with_splits(step: Step, num_splits: int) -> Tensor:
    """The step's plan with so many splits in every launch, whether or not there are keys for all."""
    batch = DeviceBatch.of(step.batch)
    shape = attention.attention_shape(step.query, step.cache, batch)
    narrow = DeviceTraits(num_sms=1, can_read_fp8=False)
    launches: tuple[Launch, ...] = tuple(
        replace(launch, num_splits=num_splits) for launch in plan_attention(shape, narrow, False)
    )
    return attention.run_launches(step.query, step.cache, batch, launches, scale=SCALE)


@pytest.mark.parametrize("num_splits", [1, 2, 5, 16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_any_number_of_splits_gives_the_same(num_splits: int, kv_dtype: torch.dtype) -> None:
    step = make_step([*MIXED, (1, 500)], num_q_heads=2, num_kv_heads=1, kv_dtype=kv_dtype)
    torch.testing.assert_close(
        _with_splits(step, num_splits), step.sdpa(SCALE), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("num_splits", [1, 4])
def test_rows_that_stand_for_no_sequence_are_zeros(num_splits: int) -> None:
    step = make_step([(1, 40), (1, 9), (1, 300)])
    expected = step.sdpa(SCALE)
    expected[1] = 0
    padded = replace(
        DeviceBatch.of(step.batch), context_lens=torch.tensor([40, 0, 300], dtype=torch.int32)
    )
    step.batch.memo[DeviceBatch] = padded
    torch.testing.assert_close(_with_splits(step, num_splits), expected, atol=1e-5, rtol=1e-5)


def test_launches_are_sized_by_the_host_and_read_the_device() -> None:
    """As a captured graph is replayed: same sizes, other contents, a bound on the context far above them."""
    step = make_step([(1, 40), (1, 130)], num_q_heads=2, num_kv_heads=1)
    known = DeviceBatch.of(step.batch)
    step.batch.memo[DeviceBatch] = replace(known, max_context_len=32768)
    torch.testing.assert_close(attend(step), step.sdpa(SCALE), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value_scale", [2.0**-120, 1e-30, 1e-12, 1.0, 1e6])
@pytest.mark.parametrize("query_scale", [1e-6, 1.0, 1e6])
def test_scales_far_from_one(value_scale: float, query_scale: float) -> None:
    """bfloat16 queries over float8: neither the queries nor the weights fit float16 as they are."""
    step = make_step([(1, 90), (20, 50)], dtype=torch.bfloat16, kv_dtype=FP8)
    cache = step.cache
    assert cache.key_scale is not None and cache.value_scale is not None
    # Half of the sequence's values keep their scale, so that small and large ones meet in a tile.
    value_scales = torch.where(
        torch.arange(cache.value_scale.numel()).view(cache.value_scale.shape) % 2 == 0,
        cache.value_scale * value_scale,
        cache.value_scale,
    )
    step = replace(
        step,
        query=step.query * query_scale,
        cache=replace(cache, key_scale=cache.key_scale / query_scale, value_scale=value_scales),
    )
    expected = reference.paged_attention(step.query, step.cache, step.batch, scale=SCALE)
    size = expected.float().abs().max().item()
    torch.testing.assert_close(
        attend(step).float() / size, expected.float() / size, atol=1e-2, rtol=1e-2
    )


def test_a_zero_value_keeps_its_weight() -> None:
    """Its scale is the least there is; the key's weight must not fall out of the total with it."""
    step = make_step([(1, 30)], kv_dtype=FP8)
    size = 2.0**40  # of the other values
    key, value = step.contexts[0]
    value *= size
    value[::2] = 0
    reference.write_kv(key, value, step.cache, _slots(step, 0))
    torch.testing.assert_close(attend(step) / size, step.sdpa(SCALE) / size, atol=2e-2, rtol=2e-2)


def _slots(step: Step, index: int) -> Tensor:
    positions = torch.arange(step.batch.context_lens[index])
    blocks = step.batch.block_tables[index].long()[positions // step.batch.block_size]
    return blocks * step.batch.block_size + positions % step.batch.block_size


def test_one_scale_for_the_whole_cache() -> None:
    step = make_step(MIXED, kv_dtype=FP8)
    shape = step.cache.key.shape[:-1]
    cache = replace(
        step.cache,
        key_scale=torch.tensor(0.01).expand(shape),
        value_scale=torch.tensor(0.02).expand(shape),
    )
    expected = reference.paged_attention(step.query, cache, step.batch, scale=SCALE)
    output = attend(replace(step, cache=cache))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_queries_that_are_views() -> None:
    step = make_step(MIXED)
    stacked = torch.cat([step.query, torch.full_like(step.query, math.nan)], 1)
    view = replace(step, query=stacked[:, : step.query.shape[1]])
    assert torch.equal(attend(view), attend(step))
    strided = torch.stack([step.query, step.query], -1)[..., 0]
    assert torch.equal(attend(replace(step, query=strided)), attend(step))


def test_refusals() -> None:
    step = make_step([(1, 5)])
    with pytest.raises(ValueError, match="scale must be positive; got 0"):
        attention.paged_attention(step.query, step.cache, step.batch, scale=0.0)
    apart = PagedCache(step.cache.key, torch.cat([step.cache.value] * 2, -1)[..., :64])
    with pytest.raises(ValueError, match="same strides"):
        attention.paged_attention(step.query, apart, step.batch, scale=SCALE)


def test_the_public_call() -> None:
    step = make_step(MIXED)
    output = attention.paged_attention(step.query, step.cache, step.batch, scale=SCALE)
    torch.testing.assert_close(output, step.sdpa(SCALE), atol=1e-5, rtol=1e-5)


@given(st.integers(1, 512), st.integers(1, 40), st.integers(1, 200_000), st.booleans())
def test_scratch_is_bounded(
    num_seqs: int, query_len: int, max_context_len: int, is_batch_invariant: bool
) -> None:
    shape = AttentionShape(
        num_rows=num_seqs * query_len,
        num_seqs=num_seqs,
        max_query_len=query_len,
        max_context_len=max_context_len,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        element_bytes=2,
        is_quantized=False,
    )
    for launch in plan_attention(shape, WIDE, is_batch_invariant):
        assert launch.num_splits >= 1
        assert launch.num_scratch_rows(shape) * 128 * 4 <= 256 * 2**20
