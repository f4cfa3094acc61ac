"""Projections for CPUs against torch's own, and which of them is chosen."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from workers.cpu_weights import CpuWeights, weight_form
from workers.layers.cpu_linear import Int8Linear, PackedLinear, is_int8_exact
from workers.layers.linear import Linear
from workers.options import EngineOptions

CPU = torch.device("cpu")
needs_int8 = pytest.mark.skipif(
    not is_int8_exact(), reason="this processor adds 8-bit products with loss"
)


def random_linear(
    num_rows: int, num_in: int, num_out: int, has_bias: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_in, generator=generator)
    weight = torch.randn(num_out, num_in, generator=generator)
    return x, weight, torch.randn(num_out, generator=generator) if has_bias else None


sizes = st.tuples(
    st.integers(1, 40), st.integers(1, 100), st.integers(1, 100), st.booleans(), st.integers(0, 99)
)


@given(sizes)
def test_packed_float32_is_torchs_linear(drawn: tuple[int, int, int, bool, int]) -> None:
    x, weight, bias = random_linear(*drawn)
    torch.testing.assert_close(
        PackedLinear(weight, bias)(x), functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4
    )


@given(sizes)
def test_bfloat16_errs_by_its_rounding_alone(
    drawn: tuple[int, int, int, bool, int],
) -> None:
    x, weight, bias = (None if t is None else t.bfloat16() for t in random_linear(*drawn))
    assert x is not None and weight is not None
    y = weight_form("bf16", "auto", CPU).make_projection(weight, bias)(x)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert y.dtype == torch.bfloat16
    # Half a unit in the last place of the result, and as much again for a sum in float32.
    torch.testing.assert_close(y.double(), exact, atol=2e-2, rtol=2**-7)


@needs_int8
@given(sizes, st.sampled_from([torch.float32, torch.bfloat16]))
def test_int8_errs_by_its_rounding_alone(
    drawn: tuple[int, int, int, bool, int], dtype: torch.dtype
) -> None:
    x, weight, bias = random_linear(*drawn)
    x = x.to(dtype)
    y = Int8Linear(weight, bias)(x)
    exact = functional.linear(x.float(), weight, bias)
    half_steps_x = x.float().abs().amax(1, keepdim=True) / 127 / 2
    half_steps_w = weight.abs().amax(1) / 127 / 2
    # |x'w' − xw| ≤ |x'−x| |w'| + |x| |w'−w|, a half step each at most.
    bound = half_steps_x * (weight.abs().sum(1) + half_steps_w * weight.shape[1])
    bound = bound + half_steps_w * x.float().abs().sum(1, keepdim=True)
    slack = 1e-4 + 2**-7 * exact.abs() if dtype == torch.bfloat16 else 1e-4
    assert y.dtype == dtype
    assert ((y.float() - exact).abs() <= bound * 1.01 + slack).all()


@needs_int8
def test_an_int8_row_does_not_depend_on_its_neighbours() -> None:
    x, weight, _ = random_linear(16, 64, 32, False, 3)
    linear = Int8Linear(weight, None)
    x[5] *= 1e4
    together = linear(x)
    for i in range(16):
        torch.testing.assert_close(linear(x[i : i + 1])[0], together[i], atol=0, rtol=0)


@needs_int8
def test_int8_of_zeros_is_zero() -> None:
    assert not Int8Linear(torch.zeros(8, 16), None)(torch.zeros(2, 16)).any()
    assert not Int8Linear(torch.ones(8, 16), None)(torch.zeros(2, 16)).any()


def test_the_choice() -> None:
    cuda = torch.device("cuda")
    assert weight_form("auto", "auto", cuda).compute_dtype == torch.bfloat16
    assert weight_form("int8", "float16", cuda).make_projection is Linear
    assert weight_form("fp32", "auto", CPU).compute_dtype == torch.float32
    assert weight_form("bf16", "auto", CPU).compute_dtype == torch.bfloat16
    assert weight_form("auto", "float32", CPU).compute_dtype == torch.float32
    assert weight_form("auto", "float16", CPU).make_projection is Linear
    automatic = weight_form("auto", "auto", CPU).compute_dtype
    assert automatic in (torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match=r"'bf16' needs dtype auto or bfloat16, not 'float32'"):
        weight_form("bf16", "float32", CPU)
    with pytest.raises(ValueError, match="cpu_weights must be one of auto, fp32, bf16, int8"):
        EngineOptions(cpu_weights="int4")
    assert {each.value for each in CpuWeights} == {"auto", "fp32", "bf16", "int8"}


@needs_int8
def test_int8_is_chosen_and_its_kv_is_not_taken_for_anothers() -> None:
    assert weight_form("int8", "auto", CPU).make_projection is Int8Linear
    names = {weight_form(each, "auto", CPU).name for each in ("fp32", "bf16", "int8")}
    assert len(names) == 3


ON_AN_OLDER_PROCESSOR = """
import torch
from workers.cpu_weights import weight_form

cpu = torch.device("cpu")
x, weight = torch.ones(3, 40).bfloat16(), torch.ones(5, 40).bfloat16()
assert weight_form("bf16", "auto", cpu).make_projection(weight, None)(x).eq(40).all()
try:
    weight_form("int8", "auto", cpu)
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the limit is on x86 instructions")
def test_without_avx512_bfloat16_stays_as_it_comes_and_int8_is_refused() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", ON_AN_OLDER_PROCESSOR],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("cpu_weights 'int8' needs a processor")
