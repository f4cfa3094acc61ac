"""The CUDA backend as `dispatch` sees it."""

import inspect
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from kernels import cpu, dispatch, reference
from kernels.batch import AttentionBatch
from kernels.gpu.backend import CudaBackend
from kernels.paged_cache import PagedCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPERATIONS = [name for name in vars(dispatch.Backend) if not name.startswith("_")]


@pytest.fixture
def triton_everywhere() -> Iterator[None]:
    """All tensors go to the Triton kernels, those on a CPU too, where the interpreter runs them."""
    before = dict(dispatch._device_type_to_backend)
    dispatch.install(DEVICE, CudaBackend())
    yield
    dispatch._device_type_to_backend.clear()
    dispatch._device_type_to_backend.update(before)


@pytest.mark.parametrize("backend", [cpu, reference, CudaBackend()])
def test_every_backend_takes_what_the_protocol_says(backend: dispatch.Backend) -> None:
    assert len(OPERATIONS) == 9
    for name in OPERATIONS:
        promised = inspect.signature(getattr(dispatch.Backend, name)).parameters
        offered = inspect.signature(getattr(backend, name)).parameters
        assert [p for p in promised if p != "self"] == list(offered)


def test_importing_dispatch_leaves_triton_alone() -> None:
    code = "import sys, kernels.dispatch; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_other_devices_get_the_twins() -> None:
    assert dispatch._first_use("meta") is reference
    hidden = torch.ones(2, 8, device="meta")
    assert dispatch.rms_norm(hidden, hidden[0], 1e-5).shape == (2, 8)


@pytest.mark.usefixtures("triton_everywhere")
@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_layers_operations_agree_with_the_twins(is_quantized: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).half().to(DEVICE)

    def new_cache() -> PagedCache:
        shape = (6, 8, 2, 16)
        if not is_quantized:
            return PagedCache(*(torch.zeros(shape).half().to(DEVICE) for _ in "kv"))
        codes = [torch.zeros(shape, dtype=torch.uint8, device=DEVICE) for _ in "kv"]
        scales = [torch.zeros(shape[:-1], device=DEVICE) for _ in "kv"]
        return PagedCache(*(code.view(torch.float8_e4m3fn) for code in codes), *scales)

    num_tokens = 5
    slots = torch.tensor([8, 9, 10, 11, 40], device=DEVICE)
    tables = torch.tensor([[1], [5]], dtype=torch.int32, device=DEVICE)
    batch = AttentionBatch(slots, tables, (0, 4, 5), (4, 1), 8)
    hidden, delta, weight, gate_up = random(5, 64), random(5, 64), random(64), random(5, 48)
    heads, angles = random(num_tokens, 8, 16), random(num_tokens, 1, 16)
    logits = random(3, 100).float()
    none = torch.zeros(3, device=DEVICE)

    def run(backend: dispatch.Backend) -> list[torch.Tensor]:
        cache, stream = new_cache(), hidden.clone()
        query = backend.rotate_and_write(heads, angles, angles, cache, slots, num_q_heads=4)
        attended = backend.paged_attention(query, cache, batch, scale=0.25)
        pairs = torch.tensor([[1, 5], [2, 0]], device=DEVICE)
        backend.copy_blocks([cache], pairs[0], pairs[1])
        return [
            query,
            attended,
            *(reference.as_bytes(t) for t in cache.tensors()),
            backend.rms_norm(hidden, weight, 1e-5),
            backend.add_rms_norm(stream, delta, weight, 1e-5),
            stream,
            backend.silu_mul(gate_up),
            backend.sample_tokens(logits, none + 1, none.int() + 3, none + 1, none, none + 0.5),
        ]

    for ours, theirs in zip(run(dispatch), run(reference), strict=True):
        if ours.dtype == torch.uint8:  # at most the neighbouring code
            assert (ours.int() - theirs.int()).abs().amax() <= 1
        else:
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("triton_everywhere")
def test_write_kv_is_the_twins() -> None:
    cache = PagedCache(*(torch.zeros(2, 4, 1, 8, device=DEVICE) for _ in "kv"))
    vectors = torch.ones(1, 1, 8, device=DEVICE)
    dispatch.write_kv(vectors, 2 * vectors, cache, torch.tensor([5], device=DEVICE))
    assert cache.key.flatten(0, 1)[5].eq(1).all() and cache.value.flatten(0, 1)[5].eq(2).all()
    assert cache.key.sum() == 8
