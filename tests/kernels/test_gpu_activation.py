"""The gated activation's kernel against its twin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.gpu import activation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The twin rounds silu(gate) before it multiplies, the kernel only the product.
DTYPE_TO_TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def rows(num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, width, generator=generator) * 4).to(dtype).to(DEVICE)


@settings(max_examples=40)
@given(
    st.integers(0, 6),
    st.integers(1, 2500),
    st.sampled_from(list(DTYPE_TO_TOLERANCE)),
    st.integers(0, 99),
)
def test_silu_mul_agrees_with_its_twin(
    num_rows: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    gate_up = rows(num_rows, 2 * size, dtype, seed)
    torch.testing.assert_close(
        activation.silu_mul(gate_up),
        reference.silu_mul(gate_up),
        rtol=DTYPE_TO_TOLERANCE[dtype],
        atol=1e-6,
    )


@pytest.mark.parametrize("size", [1536, 14336])
def test_a_row_has_the_same_bits_alone_and_among_others(size: int) -> None:
    gate_up = rows(3, 2 * size, torch.bfloat16)
    together = activation.silu_mul(gate_up)
    for i in range(len(gate_up)):
        assert torch.equal(activation.silu_mul(gate_up[i : i + 1])[0], together[i])


def test_large_gates_do_not_overflow_and_strided_rows_are_read_right() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -1e30, 2.0, 3.0, 5.0, 0.0]], device=DEVICE)[:, :6]
    expected = torch.tensor([[-0.0, 3e4, -0.0]], device=DEVICE)
    assert torch.equal(activation.silu_mul(gate_up), expected)
