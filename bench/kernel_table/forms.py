"""Every kernel form that ships: what is compiled, and the bytes it names."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from triton.compiler import ASTSource, CompiledKernel

from bench.kernel_table.builds import build_of_source, builds_of_call
from kernels.gpu import activation, block_copy, matmul, norm, rotary, sampling
from kernels.gpu.attention_builds import attention_signatures
from kernels.gpu.traffic import (
    Traffic,
    copy_traffic,
    linear_traffic,
    norm_traffic,
    rotary_traffic,
    sampling_traffic,
    silu_traffic,
)
from kernels.paged_cache import PagedCache

_ROWS = 32
_BLOCK_SIZE = 16
_EPS = 1e-5
_DTYPE_TO_NAME = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Form:
    """One line of the table.

    Attributes:
        build: for a compute capability times 10; the kernel as it would be launched there.
        needs_tensor_core: it multiplies matrices of a dtype that tensor cores take.
    """

    kernel: str
    name: str
    build: Callable[[int], CompiledKernel]
    traffic: Traffic | None = None
    needs_tensor_core: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.kernel} {self.name}"


@dataclass(frozen=True)
class _Model:
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int
    vocab_size: int


# SmolLM2-135M, Phi-3-mini, Llama-3-8B, Qwen3-32B, Llama-3-70B.
_MODELS = (
    _Model(576, 9, 3, 64, 1536, 49152),
    _Model(3072, 32, 32, 96, 8192, 32064),
    _Model(4096, 32, 8, 128, 14336, 128256),
    _Model(5120, 64, 8, 128, 25600, 151936),
    _Model(8192, 64, 8, 128, 28672, 128256),
)
_LLAMA_8B = _MODELS[2]


def forms() -> Iterator[Form]:
    """In the order of the table."""
    yield from _attention_forms()
    yield from _rotary_forms()
    yield from sorted(_norm_forms(), key=lambda form: form.kernel, reverse=True)  # one table each
    yield from _activation_forms()
    yield from _copy_forms()
    yield from _sampling_forms()
    yield from _linear_forms()


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _of_call(call: Callable[[], object], arch: int) -> CompiledKernel:
    (build,) = builds_of_call(call, arch)
    return build


def _form(
    kernel: str,
    name: str,
    call: Callable[[], object],
    traffic: Traffic,
    *,
    is_product: bool = False,
) -> Form:
    return Form(kernel, name, partial(_of_call, call), traffic, is_product)


def _attention_forms() -> Iterator[Form]:
    for build in attention_signatures():
        is_merge = build.name.startswith("merge")
        kernel = "merge of splits" if is_merge else "paged_attention"
        is_product = not is_merge and "fp32" not in build.name
        yield Form(kernel, build.name, partial(_attention, build.name), None, is_product)


def _attention(name: str, arch: int) -> CompiledKernel:
    # By name, since a device of another kind gets other types for the same form.
    (build,) = (b for b in attention_signatures(divmod(arch, 10)) if b.name == name)
    source = ASTSource(build.kernel, dict(build.signature), dict(build.constexprs), build.attrs)
    return build_of_source(source, arch, build.options)


def _cache(model: _Model, dtype: torch.dtype, num_blocks: int = 1000) -> PagedCache:
    slots = (num_blocks, _BLOCK_SIZE, model.num_kv_heads)
    vectors = [_empty(*slots, model.head_dim, dtype=dtype) for _ in range(2)]
    if dtype != torch.float8_e4m3fn:
        return PagedCache(*vectors)
    return PagedCache(*vectors, *(_empty(*slots, dtype=torch.float32) for _ in range(2)))


def _rotary_forms() -> Iterator[Form]:
    # Some models differ in everything but their heads.
    heads_to_model = {(m.num_q_heads, m.num_kv_heads, m.head_dim): m for m in _MODELS}
    cases = [(model, torch.bfloat16) for model in heads_to_model.values()]
    for model, dtype in [*cases, (_LLAMA_8B, torch.float16), (_LLAMA_8B, torch.float32)]:
        for is_quantized in (False, True):
            heads = model.num_q_heads, model.num_kv_heads, model.head_dim
            name = f"{heads[0]} / {heads[1]} heads of {heads[2]}, {_DTYPE_TO_NAME[dtype]}"
            call = partial(_rotate, model, dtype, torch.float8_e4m3fn if is_quantized else dtype)
            traffic = rotary_traffic(_ROWS, *heads, dtype.itemsize, is_quantized=is_quantized)
            yield _form("rotate_and_write", name + is_quantized * ", fp8 KV", call, traffic)


def _rotate(model: _Model, dtype: torch.dtype, kv_dtype: torch.dtype) -> Tensor:
    num_heads = model.num_q_heads + 2 * model.num_kv_heads
    angles = _empty(_ROWS, 1, model.head_dim, dtype=dtype)
    return rotary.rotate_and_write(
        _empty(_ROWS, num_heads, model.head_dim, dtype=dtype),
        angles,
        angles,
        _cache(model, kv_dtype),
        _empty(_ROWS, dtype=torch.int64),
        num_q_heads=model.num_q_heads,
    )


def _norm_forms() -> Iterator[Form]:
    cases = [(model.hidden, torch.bfloat16) for model in _MODELS]
    for size, dtype in [*cases, (4096, torch.float16), (4096, torch.float32)]:
        hidden, weight = _empty(_ROWS, size, dtype=dtype), _empty(size, dtype=dtype)
        name = f"{size}, {_DTYPE_TO_NAME[dtype]}"
        plain = norm_traffic(_ROWS, size, dtype.itemsize, has_delta=False)
        yield _form("rms_norm", name, partial(norm.rms_norm, hidden, weight, _EPS), plain)
        summed = norm_traffic(_ROWS, size, dtype.itemsize, has_delta=True)
        call = partial(norm.add_rms_norm, hidden, hidden, weight, _EPS)
        yield _form("add_rms_norm", name, call, summed)


def _activation_forms() -> Iterator[Form]:
    # One build serves every size that is a multiple of 16.
    for dtype in _DTYPE_TO_NAME:
        size = _LLAMA_8B.mlp
        call = partial(activation.silu_mul, _empty(_ROWS, 2 * size, dtype=dtype))
        traffic = silu_traffic(_ROWS, size, dtype.itemsize)
        yield _form("silu_mul", f"{size}, {_DTYPE_TO_NAME[dtype]}", call, traffic)


def _copy_forms() -> Iterator[Form]:
    for num_pairs in (1, 4, 32, 256):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            cache = _cache(_LLAMA_8B, dtype)
            pairs = _empty(num_pairs, 2, dtype=torch.int64).unbind(1)
            call = partial(block_copy.copy_blocks, [cache] * 32, *pairs)
            block_bytes = 32 * sum(t[0].numel() * t.element_size() for t in cache.tensors())
            kind = "bf16" if dtype == torch.bfloat16 else "fp8"
            name = f"{num_pairs} of 32 layers, {kind} KV"
            yield _form("copy_blocks", name, call, copy_traffic(num_pairs, block_bytes))


def _sampling_forms() -> Iterator[Form]:
    # One build serves every vocabulary.
    vocab_size = _LLAMA_8B.vocab_size
    column = _empty(_ROWS, dtype=torch.float32)
    call = partial(
        sampling.sample_tokens,
        _empty(_ROWS, vocab_size, dtype=torch.float32),
        column,
        _empty(_ROWS, dtype=torch.int32),
        column,
        column,
        column,
    )
    traffic = sampling_traffic(_ROWS, vocab_size, 1)
    yield _form("sample_tokens", f"{vocab_size}, greedy rows", call, traffic)


def _linear_forms() -> Iterator[Form]:
    cases = [
        (out_features, in_features, torch.bfloat16)
        for model in (_MODELS[0], _LLAMA_8B)
        for out_features, in_features in _products(model)
    ]
    extra = [(4096, 4096, torch.float16), (4096, 4096, torch.float32)]
    for out_features, in_features, dtype in [*cases, *extra]:
        call = partial(
            matmul.invariant_linear,
            _empty(_ROWS, in_features, dtype=dtype),
            _empty(out_features, in_features, dtype=dtype),
        )
        traffic = linear_traffic(_ROWS, in_features, out_features, dtype.itemsize, has_bias=False)
        name = f"{in_features} → {out_features}, {_DTYPE_TO_NAME[dtype]}"
        is_product = dtype != torch.float32
        yield _form("invariant_linear", name, call, traffic, is_product=is_product)


def _products(model: _Model) -> list[tuple[int, int]]:
    num_heads = model.num_q_heads + 2 * model.num_kv_heads
    return [
        (num_heads * model.head_dim, model.hidden),
        (model.hidden, model.num_q_heads * model.head_dim),
        (2 * model.mlp, model.hidden),
        (model.hidden, model.mlp),
        (model.vocab_size, model.hidden),
    ]
