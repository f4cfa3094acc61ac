"""Bytes as the layout promises, and block copies that equal the plain loop's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kv_layout import KvDtype, KvLayout
from kvstore.kv_pool import KvPool

CPU = torch.device("cpu")


def layout(
    kv_dtype: KvDtype, head_dim: int = 64, compute: torch.dtype = torch.bfloat16
) -> KvLayout:
    return KvLayout(3, 2, head_dim, 16, kv_dtype, compute)


def test_bytes_of_known_models() -> None:
    llama_8b = KvLayout(32, 8, 128, 16, KvDtype.AUTO, torch.bfloat16)
    assert llama_8b.bytes_per_token == 131_072
    assert llama_8b.block_bytes == 16 * 131_072
    llama_8b_fp8 = KvLayout(32, 8, 128, 16, KvDtype.FP8_E4M3, torch.bfloat16)
    assert llama_8b_fp8.bytes_per_token == 65_536 + 32 * 2 * 8 * 4


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_fp8_takes_at_most_055_of_bf16(head_dim: int) -> None:
    ratio = (
        layout(KvDtype.FP8_E4M3, head_dim).bytes_per_token
        / layout(KvDtype.AUTO, head_dim).bytes_per_token
    )
    assert ratio <= 0.55


@pytest.mark.parametrize("kv_dtype", list(KvDtype))
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_tensors_take_the_bytes_that_the_layout_says(
    kv_dtype: KvDtype, compute: torch.dtype
) -> None:
    pool = KvPool(layout(kv_dtype, compute=compute), 5, CPU)
    taken = sum(tensor.nbytes for cache in pool.layers for tensor in cache.tensors())
    assert taken == pool.total_bytes == 5 * pool.layout.block_bytes
    assert pool.layer(2).key.shape == (5, 16, 2, 64)
    assert (pool.layer(0).key_scale is not None) == (kv_dtype is KvDtype.FP8_E4M3)


@settings(max_examples=30, deadline=None)
@given(
    kv_dtype=st.sampled_from(list(KvDtype)),
    pairs=st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 7)), unique_by=lambda pair: pair[1], max_size=8
    ),
)
def test_copies_read_all_sources_first(kv_dtype: KvDtype, pairs: list[tuple[int, int]]) -> None:
    pool = KvPool(layout(kv_dtype, head_dim=4), 8, CPU)
    tensors = [tensor.view(torch.uint8) for cache in pool.layers for tensor in cache.tensors()]
    for tensor in tensors:
        tensor.random_(0, 256)
    expected = [tensor.clone() for tensor in tensors]
    for want, tensor in zip(expected, tensors, strict=True):
        for source, target in pairs:
            want[target] = tensor[source]
    pool.copy_blocks(pairs)
    assert all(torch.equal(want, got) for want, got in zip(expected, tensors, strict=True))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 8)], r"copy \(0, 8\) leaves the pool's blocks 0…7"),
        ([(-1, 2)], r"copy \(-1, 2\)"),
        ([(0, 2), (1, 2)], "target of two copies"),
    ],
)
def test_bad_copies_are_refused(pairs: list[tuple[int, int]], message: str) -> None:
    pool = KvPool(layout(KvDtype.AUTO), 8, CPU)
    with pytest.raises(ValueError, match=message):
        pool.copy_blocks(pairs)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1; got 0"):
        KvPool(layout(KvDtype.AUTO), 0, CPU)
    with pytest.raises(ValueError, match="head_dim must be at least 1; got 0"):
        layout(KvDtype.AUTO, head_dim=0)
