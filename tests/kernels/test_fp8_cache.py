"""What is written into a float8 pool, and what comes back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import cpu, dispatch, fp8, reference
from kernels.paged_cache import PagedCache

# Half a unit in the last of e4m3's 3 mantissa bits, relative to the vector's largest magnitude at worst.
RELATIVE_ERROR = 2.0**-4


def fp8_cache(num_blocks: int = 4, block_size: int = 8) -> PagedCache:
    shape = (num_blocks, block_size, 2, 16)

    def values() -> Tensor:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)

    def scales() -> Tensor:
        return torch.full(shape[:-1], float("nan"))

    return PagedCache(values(), values(), scales(), scales())


def test_every_finite_byte_is_decoded_as_torch_decodes_it() -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    expected = numbers.view(torch.float8_e4m3fn).float()
    finite = expected.isfinite()
    assert finite.sum() == 254
    decoded = cpu._dequantize(numbers.view(256, 1, 1), torch.ones(256, 1), torch.float32).view(256)
    assert torch.equal(decoded[finite], expected[finite])


@settings(max_examples=50, deadline=None)
@given(exponent=st.integers(-30, 30), seed=st.integers(0, 1000))
def test_round_trip_error_is_bounded_at_every_magnitude(exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(5, 2, 16, generator=generator) * 2.0**exponent
    quantized = fp8.quantize(vectors)
    restored = fp8.dequantize(quantized.values, quantized.scale)
    largest = vectors.abs().amax(-1, keepdim=True)
    assert ((restored - vectors).abs() <= RELATIVE_ERROR * largest).all()


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outlier", [0.0, 1e4, 1e-20])
def test_zero_constant_and_huge_vectors(
    backend: dispatch.Backend, dtype: torch.dtype, outlier: float
) -> None:
    cache = fp8_cache()
    key = torch.full((3, 2, 16), outlier, dtype=dtype)
    key[1, 0, 3] *= -1
    value = torch.zeros_like(key)
    slots = torch.tensor([9, 30, 0])
    backend.write_kv(key, value, cache, slots)
    assert cache.key_scale is not None and cache.value_scale is not None
    stored = cache.key.flatten(0, 1)[slots], cache.key_scale.flatten(0, 1)[slots]
    restored = fp8.dequantize(*stored)
    assert restored.isfinite().all()
    assert ((restored - key.float()).abs() <= RELATIVE_ERROR * outlier).all()
    zeros = cache.value.flatten(0, 1)[slots], cache.value_scale.flatten(0, 1)[slots]
    assert (fp8.dequantize(*zeros) == 0).all()


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_both_backends_write_the_same_bits_and_nothing_else(kv_dtype: torch.dtype) -> None:
    key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    slots = torch.tensor([31, 2, 8])
    caches = []
    for backend in (cpu, reference):
        if kv_dtype == torch.float8_e4m3fn:
            cache = fp8_cache()
        else:
            cache = PagedCache(
                torch.zeros(4, 8, 2, 16, dtype=kv_dtype), torch.zeros(4, 8, 2, 16, dtype=kv_dtype)
            )
        before = [reference.as_bytes(t).clone() for t in cache.tensors()]
        backend.write_kv(
            key.to(cache.key.dtype if not cache.is_quantized else key.dtype),
            value.to(cache.key.dtype if not cache.is_quantized else key.dtype),
            cache,
            slots,
        )
        for old, new in zip(before, cache.tensors(), strict=True):
            changed = (old.view(torch.uint8) != reference.as_bytes(new).view(torch.uint8)).flatten(
                0, 1
            )
            touched = {int(i) for i in changed.flatten(1).any(1).nonzero().flatten()}
            assert touched == set(slots.tolist())
        caches.append(cache)
    for one, other in zip(caches[0].tensors(), caches[1].tensors(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
