"""The forms of the attention kernels that ship, for compiling them ahead of time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kernels.gpu.attention import MERGE_STAGES, kernel_constants, kernel_switches
from kernels.gpu.attention_kernel import attention_kernel, merge_kernel
from kernels.gpu.attention_plan import (
    AttentionShape,
    DeviceTraits,
    Launch,
    can_read_fp8,
    plan_attention,
)

_POINTERS = {
    "key_scale_ptr": "*fp32",
    "value_scale_ptr": "*fp32",
    "sums_ptr": "*fp32",
    "stats_ptr": "*fp32",
    "table_ptr": "*i32",
    "query_starts_ptr": "*i32",
    "context_lens_ptr": "*i32",
    "scale_log2": "fp32",
}
# Triton may not assume these divisible by 16; pools' and queries' strides are, for every head size here.
_ANY_INTEGER = {"num_seqs", "num_splits", "stride_table"}
_ANY_SCALE_STRIDE = {"stride_scale_block", "stride_scale_slot", "stride_scale_head"}


@dataclass(frozen=True)
class KernelBuild:
    """What `triton.compile` needs to build one form of a kernel.

    Attributes:
        name: says in words which form it is.
        signature: parameter → type, "constexpr" for those in `constexprs`.
        divisible: the parameters that are multiples of 16.
        options: for `triton.compile`.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    divisible: frozenset[str]
    options: Mapping[str, int]

    @property
    def attrs(self) -> dict[tuple[int], list[list[object]]]:
        """For `ASTSource`."""
        names = list(self.signature)
        return {(names.index(name),): [["tt.divisibility", 16]] for name in sorted(self.divisible)}


@dataclass(frozen=True)
class _Form:
    """A model's attention, and the step that is compiled for it."""

    head_dim: int = 128
    group: int = 4
    dtype: str = "bf16"
    is_quantized: bool = False
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    is_decode: bool = True
    is_split: bool = False
    is_batch_invariant: bool = False

    @property
    def name(self) -> str:
        parts = [
            "decode" if self.is_decode else "chunk",
            f"d{self.head_dim}",
            f"group {self.group}",
            self.dtype + (" fp8 KV" if self.is_quantized else ""),
            f"block {self.block_size}",
            "window" if self.window else "",
            "soft cap" if self.soft_cap else "",
            "split" if self.is_split else "",
            "invariant" if self.is_batch_invariant else "",
        ]
        return ", ".join(part for part in parts if part)


def attention_signatures(capability: tuple[int, int] = (9, 0)) -> Iterator[KernelBuild]:
    """Every form that ships, for a device of this compute capability.

    All head sizes with both kinds of cache and all kinds of launch; block sizes, groups, windows, soft caps
    and the other dtypes each beside one head size, since they add no code that depends on it.
    """
    device = DeviceTraits(num_sms=132, can_read_fp8=can_read_fp8(capability))
    for form in _forms():
        yield _attention_build(form, device)
    for head_dim in (64, 80, 96, 128, 256):
        yield _merge_build(_Form(head_dim=head_dim, is_split=True), device)


def _forms() -> Iterator[_Form]:
    for head_dim in (64, 80, 96, 128, 256):
        for is_quantized in (False, True):
            form = _Form(head_dim=head_dim, is_quantized=is_quantized)
            yield form
            yield replace(form, is_split=True)
            yield replace(form, is_decode=False)
            yield replace(form, is_decode=False, is_split=True)
            yield replace(form, is_batch_invariant=True, is_split=True)
            yield replace(form, is_batch_invariant=True, is_decode=False)
    for is_quantized in (False, True):
        form = _Form(is_quantized=is_quantized)
        for varied in (form, replace(form, is_decode=False)):
            yield from (replace(varied, group=group) for group in (1, 3, 8, 16))
            yield from (replace(varied, block_size=block_size) for block_size in (8, 32, 64))
            yield replace(varied, window=4096)
            yield replace(varied, soft_cap=50.0)
            yield from (replace(varied, dtype=dtype) for dtype in ("fp16", "fp32"))
    yield _Form(head_dim=256, group=2, window=4096, soft_cap=50.0, is_decode=False)
    yield _Form(head_dim=256, dtype="fp32")
    yield _Form(head_dim=256, dtype="fp32", is_decode=False)


def _launch(form: _Form, device: DeviceTraits) -> tuple[AttentionShape, Launch]:
    num_kv_heads = 8
    num_seqs = 1 if form.is_split else 1024  # few tiles are split, many are not
    query_len = 1 if form.is_decode else 16
    shape = AttentionShape(
        num_rows=num_seqs * query_len,
        num_seqs=num_seqs,
        max_query_len=query_len,
        max_context_len=32768,
        num_q_heads=form.group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=form.head_dim,
        element_bytes=4 if form.dtype == "fp32" else 2,
        is_quantized=form.is_quantized,
    )
    launches = plan_attention(shape, device, form.is_batch_invariant)
    (launch,) = (launch for launch in launches if launch.is_decode == form.is_decode)
    assert launch.is_split == form.is_split
    return shape, launch


def _attention_build(form: _Form, device: DeviceTraits) -> KernelBuild:
    shape, launch = _launch(form, device)
    constexprs = kernel_constants(launch, shape) | kernel_switches(
        launch, shape, form.block_size, form.window, form.soft_cap
    )
    kv_type = form.dtype
    if form.is_quantized:
        kv_type = "fp8e4nv" if device.can_read_fp8 else "i8"
    types = _POINTERS | {
        "query_ptr": f"*{form.dtype}",
        "output_ptr": f"*{form.dtype}",
        "key_ptr": f"*{kv_type}",
        "value_ptr": f"*{kv_type}",
    }
    return _build(form.name, attention_kernel, types, constexprs, launch.tile.options)


def _merge_build(form: _Form, device: DeviceTraits) -> KernelBuild:
    shape, launch = _launch(form, device)
    constexprs = kernel_constants(launch, shape) | {"STAGES": MERGE_STAGES}
    types = _POINTERS | {"output_ptr": f"*{form.dtype}"}
    name = f"merge, d{form.head_dim}, {form.dtype}"
    return _build(name, merge_kernel, types, constexprs, {"num_warps": 1})


def _build(
    name: str,
    kernel: Any,
    name_to_type: Mapping[str, str],
    constexprs: Mapping[str, object],
    options: Mapping[str, int],
) -> KernelBuild:
    signature = {
        parameter: "constexpr" if parameter in constexprs else name_to_type.get(parameter, "i32")
        for parameter in kernel.arg_names
    }
    not_divisible = _ANY_INTEGER | _ANY_SCALE_STRIDE | {"scale_log2"} | constexprs.keys()
    divisible = frozenset(signature.keys() - not_divisible)
    return KernelBuild(name, kernel, signature, constexprs, divisible, options)
