"""Every operation on the device against its twin in plain torch, on the same tensors.

When the check dry-runs, the kernels run in Triton's interpreter.
"""

from collections.abc import Iterator

import pytest
import torch
from gpu_cases import DEVICE, HALVES, IS_DRY, clone, nan_pool, ragged_batch, randn

from bench.gpu.stage import interpret_kernels
from kernels import cpu, dispatch, reference
from kernels.gpu.backend import CudaBackend
from kernels.paged_cache import PagedCache
from kvstore.kv_layout import KvDtype

pytestmark = pytest.mark.gpu

KV_DTYPES = [KvDtype.AUTO, KvDtype.FP8_E4M3]


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    if IS_DRY:
        interpret_kernels()
    yield
    if IS_DRY:
        dispatch.install("cpu", cpu)


# A unit in the last place of bf16's 8 bits, for numbers around 1; sums are rounded once at the end.
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 4e-3, torch.float32: 1e-5}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def as_numbers(cache: PagedCache) -> list[torch.Tensor]:
    """What each slot stands for; NaN where nothing was written."""
    if cache.key_scale is None or cache.value_scale is None:
        return [cache.key.float(), cache.value.float()]
    return [
        cache.key.float() * cache.key_scale[..., None],
        cache.value.float() * cache.value_scale[..., None],
    ]


def test_the_device_runs_the_kernels() -> None:
    assert isinstance(dispatch._backend(torch.zeros(1, device=DEVICE)), CudaBackend)


RAGGED = (
    {
        "decode": ((1,) * 5, (1, 16, 17, 60, 100)),
        "chunks": ((20, 1, 9), (20, 63, 50)),
        "one token": ((1,), (1,)),
    }
    if IS_DRY
    else {
        "decode": ((1,) * 5, (1, 16, 17, 300, 1023)),
        "chunks": ((70, 1, 129), (70, 463, 500)),
        "one token": ((1,), (1,)),
        "long": ((1,), (4000,)),
        "chunk of a long one": ((64,), (3000,)),
    }
)


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim"),
    [(8, 2, 64)] if IS_DRY else [(32, 8, 128), (9, 3, 64)],
)
def test_attention(
    name: str,
    dtype: torch.dtype,
    kv_dtype: KvDtype,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    query_lens, context_lens = RAGGED[name]
    batch, slots = ragged_batch(query_lens, context_lens)
    cache = nan_pool(num_kv_heads, head_dim, dtype, kv_dtype).layer(0)
    key, value = randn(2, len(slots), num_kv_heads, head_dim, dtype=dtype).unbind()
    reference.write_kv(key, value, cache, slots)
    query = randn(sum(query_lens), num_q_heads, head_dim, dtype=dtype, seed=1)
    scale = head_dim**-0.5
    actual = dispatch.paged_attention(query, cache, batch, scale=scale)
    close(actual, reference.paged_attention(query, cache, batch, scale=scale))


@pytest.mark.parametrize("block_size", [8, 32, 64])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (100, None), (None, 20.0)])
def test_attention_with_window_cap_and_other_blocks(
    block_size: int, window: int | None, soft_cap: float | None
) -> None:
    batch, slots = ragged_batch(
        (1, 40, 1), (150, 110, 33) if IS_DRY else (700, 300, 33), block_size
    )
    cache = nan_pool(4, 96, HALVES[0], KvDtype.AUTO, block_size=block_size).layer(0)
    key, value = randn(2, len(slots), 4, 96, dtype=HALVES[0]).unbind()
    reference.write_kv(key, value, cache, slots)
    query = randn(42, 8, 96, dtype=HALVES[0], seed=1)
    options = {"scale": 96**-0.5, "sliding_window": window, "soft_cap": soft_cap}
    actual = dispatch.paged_attention(query, cache, batch, **options)
    close(actual, reference.paged_attention(query, cache, batch, **options))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rotate_and_write(dtype: torch.dtype, kv_dtype: KvDtype, head_dim: int) -> None:
    pool = nan_pool(2, head_dim, dtype, kv_dtype)
    ours, twins = clone(pool.layer(0)), clone(pool.layer(0))
    heads = randn(37, 6 + 2 * 2, head_dim, dtype=dtype)
    angles = randn(37, 1, head_dim // 2, dtype=torch.float32, seed=1) * 3
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    slots = torch.randperm(6400, generator=torch.Generator().manual_seed(2))[:37].to(DEVICE)
    slots[5] = slots[30] = -1
    actual = dispatch.rotate_and_write(heads, cos, sin, ours, slots, num_q_heads=6)
    expected = reference.rotate_and_write(heads, cos, sin, twins, slots, num_q_heads=6)
    close(actual, expected)
    # The twin rounds products before it adds them; a rounding can carry an e4m3 number to its neighbour.
    atol, step = TOLERANCE[dtype], TOLERANCE[dtype]
    if kv_dtype is KvDtype.FP8_E4M3:
        step = 2.0**-3
    for written, wanted in zip(as_numbers(ours), as_numbers(twins), strict=True):
        torch.testing.assert_close(written, wanted, atol=atol, rtol=step, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_write_kv(kv_dtype: KvDtype) -> None:
    pool = nan_pool(3, 64, torch.bfloat16, kv_dtype)
    ours, twins = clone(pool.layer(0)), clone(pool.layer(0))
    key, value = randn(2, 21, 3, 64, dtype=torch.bfloat16).unbind()
    key[3] *= 1e4
    value[4] = 0
    slots = torch.arange(5, 26, device=DEVICE) * 7
    dispatch.write_kv(key, value, ours, slots)
    reference.write_kv(key, value, twins, slots)
    for written, wanted in zip(as_numbers(ours), as_numbers(twins), strict=True):
        torch.testing.assert_close(written, wanted, atol=1e-3, rtol=2.0**-3, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_copy_blocks(kv_dtype: KvDtype) -> None:
    pool = nan_pool(2, 64, torch.bfloat16, kv_dtype, num_layers=3)
    slots = torch.arange(80, device=DEVICE)
    for i, cache in enumerate(pool.layers):
        key, value = randn(2, 80, 2, 64, dtype=torch.bfloat16, seed=i).unbind()
        reference.write_kv(key, value, cache, slots)
    twins = [clone(cache) for cache in pool.layers]
    # Block 1 is overwritten and read in one call, as a swap: all sources are read first.
    sources = torch.tensor([0, 1, 4], device=DEVICE)
    targets = torch.tensor([1, 0, 300], device=DEVICE)
    dispatch.copy_blocks(pool.layers, sources, targets)
    reference.copy_blocks(twins, sources, targets)
    for cache, twin in zip(pool.layers, twins, strict=True):
        for ours, theirs in zip(cache.tensors(), twin.tensors(), strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [576, 4096])
def test_norms_and_silu(dtype: torch.dtype, size: int) -> None:
    hidden, delta = randn(2, 33, size, dtype=dtype).unbind()
    weight = randn(size, dtype=dtype, seed=1)
    close(dispatch.rms_norm(hidden, weight, 1e-5), reference.rms_norm(hidden, weight, 1e-5))
    ours, twins = hidden.clone(), hidden.clone()
    close(
        dispatch.add_rms_norm(ours, delta, weight, 1e-5),
        reference.add_rms_norm(twins, delta, weight, 1e-5),
    )
    close(ours, twins)
    both = randn(33, 2 * size, dtype=dtype, seed=2)
    close(dispatch.silu_mul(both), reference.silu_mul(both))


def test_sampled_tokens_are_the_twins() -> None:
    """Equal but where the running sum passes the random number within a rounding."""
    num_rows, vocab_size = (20, 1000) if IS_DRY else (200, 5000)
    logits = randn(num_rows, vocab_size, dtype=torch.float32) * 3
    draw = torch.Generator().manual_seed(3)

    def column(*choices: float) -> torch.Tensor:
        picks = torch.randint(len(choices), (num_rows,), generator=draw)
        return torch.tensor(choices)[picks].to(DEVICE)

    arguments = (
        column(0.0, 0.7, 1.3),
        column(0, 1, 40).int(),
        column(1.0, 0.9, 0.3),
        column(0.0, 0.05),
        torch.rand(num_rows, generator=draw).to(DEVICE),
    )
    actual = dispatch.sample_tokens(logits, *arguments)
    expected = reference.sample_tokens(logits, *arguments)
    assert (actual != expected).sum() <= 2
    greedy = arguments[0] == 0
    assert torch.equal(actual[greedy], logits.argmax(-1)[greedy])
