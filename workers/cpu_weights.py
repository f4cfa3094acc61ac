"""In which numbers a CPU keeps a model's weights, and in which it computes."""

from dataclasses import dataclass
from enum import StrEnum

import torch

from workers.layers.cpu_linear import Int8Linear, PackedLinear, can_pack, is_int8_exact
from workers.layers.linear import InvariantLinear, Linear, MakeProjection


class CpuWeights(StrEnum):
    AUTO = "auto"  # the fastest of fp32 and bf16 for this processor
    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"


@dataclass(frozen=True)
class WeightForm:
    """How a model is to be loaded.

    Attributes:
        name: part of what KV is good for: other weights make other KV.
        compute_dtype: of activations, norms, embeddings and the KV cache's "auto".
        make_projection: from a weight in that dtype.
    """

    name: str
    compute_dtype: torch.dtype
    make_projection: MakeProjection


def weight_form(
    cpu_weights: str, dtype: str, device: torch.device, *, is_batch_invariant: bool = False
) -> WeightForm:
    """What `EngineOptions.cpu_weights` and `ModelOptions.dtype` come to on this device.

    Raises:
        ValueError: the two contradict each other, a CPU is asked for batch-invariant bits, or int8 is asked of
            a processor that would compute it wrongly.
    """
    if device.type != "cpu":
        compute_dtype = torch.bfloat16 if dtype == "auto" else _dtype(dtype)
        linear = InvariantLinear if is_batch_invariant else Linear
        return WeightForm(_name(compute_dtype), compute_dtype, linear)
    if is_batch_invariant:
        raise ValueError(
            "batch_invariant needs a CUDA device; a CPU's libraries add in another order for another number of rows"
        )
    form = CpuWeights(cpu_weights)
    if form is CpuWeights.AUTO:
        compute_dtype = _fastest_dtype() if dtype == "auto" else _dtype(dtype)
        return _packed(compute_dtype)
    if form is CpuWeights.INT8:
        if not is_int8_exact():
            raise ValueError(
                "cpu_weights 'int8' needs a processor that adds 8-bit products exactly (VNNI); take auto"
            )
        return WeightForm("int8", torch.float32 if dtype == "auto" else _dtype(dtype), Int8Linear)
    compute_dtype = torch.float32 if form is CpuWeights.FP32 else torch.bfloat16
    if dtype not in ("auto", _name(compute_dtype)):
        raise ValueError(
            f"cpu_weights {cpu_weights!r} needs dtype auto or {_name(compute_dtype)}, not {dtype!r}"
        )
    return _packed(compute_dtype)


def _packed(compute_dtype: torch.dtype) -> WeightForm:
    """float16 stays as it comes: oneDNN packs it only for processors that multiply it."""
    is_packed = compute_dtype != torch.float16 and can_pack(compute_dtype)
    return WeightForm(_name(compute_dtype), compute_dtype, PackedLinear if is_packed else Linear)


def _fastest_dtype() -> torch.dtype:
    """bfloat16 halves the bytes of a step, but without instructions for it costs more than it saves."""
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_instructions else torch.float32


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
