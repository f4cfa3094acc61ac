"""The bytes that kernels name, counted load by load in the interpreter, against the formulas."""

from collections.abc import Callable

import pytest
import torch
from triton.runtime import interpreter

from kernels.gpu import activation, block_copy, matmul, norm, rotary, sampling, traffic
from kernels.gpu.traffic import Traffic
from kernels.paged_cache import PagedCache

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="bytes are counted in the interpreter, which runs without a GPU",
)


@pytest.fixture
def named_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """Runs a call and says how many bytes the loads and stores of its kernels named."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    counted = []

    def counting_load(self, ptrs, mask, *rest):
        counted.append(int(mask.data.sum()) * (ptrs.get_element_ty().primitive_bitwidth // 8))
        return load(self, ptrs, mask, *rest)

    def counting_store(self, ptrs, value, mask, *rest):
        counted.append(int(mask.data.sum()) * (ptrs.get_element_ty().primitive_bitwidth // 8))
        return store(self, ptrs, value, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", counting_load)
    monkeypatch.setattr(builder, "create_masked_store", counting_store)

    def run(call: Callable[[], object]) -> int:
        counted.clear()
        call()
        return sum(counted)

    return run


Counter = Callable[[Callable[[], object]], int]


def check(found: int, expected: Traffic) -> None:
    assert found == expected.named_bytes
    assert expected.least_bytes <= expected.named_bytes


@pytest.mark.parametrize("size", [576, 5120])
def test_norms(named_bytes: Counter, size: int) -> None:
    hidden, weight = torch.ones(3, size).half(), torch.ones(size).half()
    found = named_bytes(lambda: norm.rms_norm(hidden, weight, 1e-5))
    check(found, traffic.norm_traffic(3, size, 2, has_delta=False))
    found = named_bytes(lambda: norm.add_rms_norm(hidden, hidden, weight, 1e-5))
    check(found, traffic.norm_traffic(3, size, 2, has_delta=True))


def test_silu_mul(named_bytes: Counter) -> None:
    found = named_bytes(lambda: activation.silu_mul(torch.ones(3, 2 * 1536)))
    check(found, traffic.silu_traffic(3, 1536, 4))


@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (12, 12, 80)])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_rotate_and_write(
    named_bytes: Counter, heads: tuple[int, int, int], is_quantized: bool
) -> None:
    num_q_heads, num_kv_heads, head_dim = heads
    shape = (2, 8, num_kv_heads, head_dim)
    if is_quantized:
        vectors = [torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in "kv"]
        cache = PagedCache(*vectors, torch.zeros(shape[:-1]), torch.zeros(shape[:-1]))
    else:
        cache = PagedCache(torch.zeros(shape).half(), torch.zeros(shape).half())
    projected = torch.ones(5, num_q_heads + 2 * num_kv_heads, head_dim).half()
    angles = torch.ones(5, 1, head_dim).half()
    found = named_bytes(
        lambda: rotary.rotate_and_write(
            projected, angles, angles, cache, torch.arange(5), num_q_heads=num_q_heads
        )
    )
    check(found, traffic.rotary_traffic(5, *heads, 2, is_quantized=is_quantized))


def test_copy_blocks(named_bytes: Counter) -> None:
    caches = [PagedCache(torch.zeros(9, 8, 2, 64), torch.zeros(9, 8, 2, 64)) for _ in range(3)]
    pairs = torch.tensor([[0, 1], [2, 3], [4, 5]])
    found = named_bytes(lambda: block_copy.copy_blocks(caches, *pairs.unbind(1)))
    block_bytes = 3 * 2 * 8 * 2 * 64 * 4
    expected = traffic.copy_traffic(3, block_bytes)
    ids_and_addresses = found - expected.named_bytes
    assert 0 < ids_and_addresses < 0.01 * expected.named_bytes
    assert expected.ratio == 1


@pytest.mark.parametrize(("num_rows", "out_features"), [(1, 200), (70, 200), (3, 16384)])
def test_invariant_linear(named_bytes: Counter, num_rows: int, out_features: int) -> None:
    x, weight = torch.ones(num_rows, 40).half(), torch.ones(out_features, 40).half()
    for bias in (None, torch.ones(out_features).half()):
        found = named_bytes(lambda bias=bias: matmul.invariant_linear(x, weight, bias))
        shape = (num_rows, 40, out_features, 2)
        check(found, traffic.linear_traffic(*shape, has_bias=bias is not None))


@pytest.mark.parametrize(("temperature", "num_passes"), [(0.0, 1), (1.0, 3)])
def test_sample_tokens(named_bytes: Counter, temperature: float, num_passes: int) -> None:
    logits = torch.randn(2, 50_000)
    none = torch.zeros(2)
    found = named_bytes(
        lambda: sampling.sample_tokens(
            logits, none + temperature, none.int(), none + 1, none, none + 0.5
        )
    )
    expected = traffic.sampling_traffic(2, 50_000, num_passes)
    tile_bytes = 0 if temperature == 0 else 2 * 4 * 8192
    settings_and_tokens = found - expected.named_bytes - tile_bytes
    assert 0 < settings_and_tokens <= 2 * (5 * 4 + 8)
