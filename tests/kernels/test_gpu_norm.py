"""The norm kernels against their twins."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.gpu import norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5
# The interpreter cuts bfloat16 off where devices round it.
BF16_ULP = 0.0 if DEVICE == "cuda" else 2.0**-7


def rows(num_rows: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, size, generator=generator) * 3).to(dtype).to(DEVICE)


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 700), st.sampled_from(DTYPES), st.integers(0, 99))
def test_rms_norm_agrees_with_its_twin(
    num_rows: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    hidden, weight = rows(num_rows, size, dtype, seed), rows(1, size, dtype, seed + 1)[0]
    torch.testing.assert_close(
        norm.rms_norm(hidden, weight, EPS), reference.rms_norm(hidden, weight, EPS)
    )


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 700), st.sampled_from(DTYPES), st.integers(0, 99))
def test_add_rms_norm_agrees_with_its_twin(
    num_rows: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    hidden, delta = rows(num_rows, size, dtype, seed), rows(num_rows, size, dtype, seed + 1)
    weight = rows(1, size, dtype, seed + 2)[0]
    ours, theirs = hidden.clone(), hidden.clone()
    normed = norm.add_rms_norm(ours, delta, weight, EPS)
    expected = reference.add_rms_norm(theirs, delta, weight, EPS)
    ulp = BF16_ULP if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(ours, theirs, rtol=ulp, atol=0)
    torch.testing.assert_close(normed, expected, rtol=1.6e-2 + 2 * ulp, atol=1e-5)


@pytest.mark.parametrize("size", [576, 4096, 5120, 8192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_of_real_models(size: int, dtype: torch.dtype) -> None:
    hidden, weight = rows(3, size, dtype), rows(1, size, dtype, 1)[0]
    torch.testing.assert_close(
        norm.rms_norm(hidden, weight, EPS), reference.rms_norm(hidden, weight, EPS)
    )


@pytest.mark.parametrize("size", [576, 5120])
def test_a_row_has_the_same_bits_alone_and_among_others(size: int) -> None:
    hidden, weight = rows(7, size, torch.bfloat16), rows(1, size, torch.bfloat16, 1)[0]
    together = norm.rms_norm(hidden, weight, EPS)
    for i in range(len(hidden)):
        assert torch.equal(norm.rms_norm(hidden[i : i + 1], weight, EPS)[0], together[i])


def test_what_is_not_contiguous_is_read_right_or_refused() -> None:
    wide, weight = rows(4, 96, torch.float32), rows(1, 48, torch.float32, 1)[0]
    torch.testing.assert_close(
        norm.rms_norm(wide[:, 48:], weight, EPS), reference.rms_norm(wide[:, 48:], weight, EPS)
    )
    with pytest.raises(ValueError, match="contiguous"):
        norm.add_rms_norm(wide[:, 48:], wide[:, :48], weight, EPS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_normalized_is_the_rounded_sum(dtype: torch.dtype) -> None:
    hidden, delta = rows(5, 576, dtype), rows(5, 576, dtype, 1)
    weight = rows(1, 576, dtype, 2)[0]
    normed = norm.add_rms_norm(hidden, delta, weight, EPS)
    assert torch.equal(normed, norm.rms_norm(hidden, weight, EPS))


def test_heads_are_normed_one_by_one_and_no_rows_are_fine() -> None:
    heads, weight = rows(10, 64, torch.float32).view(5, 2, 64), rows(1, 64, torch.float32, 1)[0]
    torch.testing.assert_close(
        norm.rms_norm(heads, weight, EPS), reference.rms_norm(heads, weight, EPS)
    )
    assert norm.rms_norm(heads[:0], weight, EPS).shape == (0, 2, 64)
