"""The product whose row bits depend on the row alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from kernels.gpu import matmul
from kernels.gpu.matmul import LinearPlan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE_TO_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
if DEVICE == "cuda":  # the interpreter cannot multiply bfloat16
    DTYPE_TO_TOLERANCE[torch.bfloat16] = 3.2e-2


def matrix(num_rows: int, num_columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_columns, generator=generator).to(dtype).to(DEVICE)


@settings(max_examples=25)
@given(
    st.integers(0, 140),
    st.integers(1, 300),
    st.integers(1, 300),
    st.booleans(),
    st.sampled_from(list(DTYPE_TO_TOLERANCE)),
    st.integers(0, 99),
)
def test_it_agrees_with_torch(
    num_rows: int,
    in_features: int,
    out_features: int,
    has_bias: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    x = matrix(num_rows, in_features, dtype, seed)
    weight = matrix(out_features, in_features, dtype, seed + 1)
    bias = matrix(1, out_features, dtype, seed + 2)[0] if has_bias else None
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    product = matmul.invariant_linear(x, weight, bias)
    assert product.dtype == dtype
    tolerance = DTYPE_TO_TOLERANCE[dtype]
    scale = in_features**0.5
    torch.testing.assert_close(product.double(), exact, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_row_has_the_same_bits_alone_and_in_2_to_70_rows(dtype: torch.dtype) -> None:
    x, weight = matrix(70, 576, dtype, 1), matrix(200, 576, dtype, 2)
    together = matmul.invariant_linear(x, weight)
    for num_rows in (1, 2, 3, 15, 16, 17, 63, 64, 65, 70):
        assert torch.equal(matmul.invariant_linear(x[:num_rows], weight), together[:num_rows])
    # In another place of the tile, and in another tile.
    moved = matmul.invariant_linear(x.flip(0), weight)
    assert torch.equal(moved.flip(0), together)
    for i in (0, 33, 69):
        assert torch.equal(matmul.invariant_linear(x[i : i + 1], weight)[0], together[i])


def test_more_rows_than_one_group_of_tiles_and_leading_axes() -> None:
    x, weight = matrix(64 * 9 + 5, 16, torch.float32, 1), matrix(130, 16, torch.float32, 2)
    expected = functional.linear(x, weight)
    torch.testing.assert_close(matmul.invariant_linear(x, weight), expected)
    deep = matmul.invariant_linear(x[:580].view(4, 145, 16), weight)
    torch.testing.assert_close(deep, expected[:580].view(4, 145, 130))


def test_a_weight_of_whole_numbers_is_multiplied_exactly() -> None:
    x = torch.randint(-8, 8, (5, 100), device=DEVICE).half()
    weight = torch.randint(-8, 8, (70, 100), device=DEVICE).half()
    assert torch.equal(matmul.invariant_linear(x, weight).cpu(), (x.cpu() @ weight.cpu().T))


def test_the_plan_knows_nothing_of_the_rows() -> None:
    assert LinearPlan.of(4096, 2) == LinearPlan(64, 128, num_warps=4, num_stages=3)
    assert LinearPlan.of(128256, 2).block_n == 128
