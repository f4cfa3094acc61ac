"""Projections for CPUs, their weights laid out once for oneDNN as torch ships it."""

import torch
from torch import Tensor

_ONEDNN = torch.ops.onednn
_MKLDNN = torch.ops.mkldnn
# Activations are rounded to 8 bits around this number, because fast instructions multiply unsigned by signed.
_ZERO_POINT = 128
_INT8_MAX = 127.0
# Keeps the division defined for a row of zeros.
_MIN_SCALE = 1e-30


class PackedLinear:
    """A float32 or bfloat16 projection whose weight lies in the order in which oneDNN reads it.

    At few rows a step waits for its weights: 121 matrices of SmolLM2-135M took 25.7 ms packed and 46 ms as they come,
    at one float32 row on two AVX-512 cores.

    Args:
        weight: [out_features, in_features]; not kept.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = _MKLDNN._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = _MKLDNN._linear_pointwise(x, self._packed, self._bias, "none", [], None)
        return y


def can_pack(dtype: torch.dtype) -> bool:
    """Whether `PackedLinear` takes weights of `dtype` here: oneDNN packs bfloat16 only for AVX-512 and newer."""
    try:
        _MKLDNN._reorder_linear_weight(torch.zeros(1, 1, dtype=dtype), None)
    except (AttributeError, RuntimeError):
        return False
    return True


class Int8Linear:
    """Weights in 8 bits with a scale for each output, activations in 8 bits with a scale for each row.

    A row's scale is its own: what shares its batch does not change its numbers. Wrong without a word where
    `is_int8_exact` is False.

    Args:
        weight: [out_features, in_features], any float dtype; not kept.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        scale = weight.abs().amax(dim=1).float().div_(_INT8_MAX).clamp_(min=_MIN_SCALE)
        rounded = (weight.float() / scale[:, None]).round_().to(torch.int8)
        self._packed = _ONEDNN.qlinear_prepack(rounded, None)
        self._scale = scale
        self._zero_points = torch.zeros(len(scale), dtype=torch.int32)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        scale = (
            x.abs().amax(dim=-1, keepdim=True).float().mul_(1 / _INT8_MAX).clamp_(min=_MIN_SCALE)
        )
        # Half more than the zero point, because the cast cuts off what is behind the point.
        levels = (x / scale).add_(_ZERO_POINT + 0.5).to(torch.uint8)
        y: Tensor = _ONEDNN.qlinear_pointwise(
            levels, 1.0, _ZERO_POINT, self._packed, self._scale, self._zero_points,
            None, 1.0, 0, torch.float32, "none", [], "none",
        )  # fmt: skip
        y = y.mul_(scale)
        if self._bias is not None:
            y += self._bias
        return y.to(x.dtype)


def is_int8_exact() -> bool:
    """Whether this processor adds 8-bit products without loss.

    x86 processors without VNNI add them in pairs of 16 bits, and 255 · 127 · 2 does not fit: large activations times
    large weights come out far too small.
    """
    ones = torch.ones(64, 64)
    try:
        sums = Int8Linear(ones, None)(ones)
    except (AttributeError, RuntimeError):
        return False
    return bool((sums - 64).abs().max() < 0.01)
