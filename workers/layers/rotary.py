"""Rotary position embedding (RoFormer, arXiv 2104.09864) and the static ways to stretch it."""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class RopeType(StrEnum):
    """Scalings whose frequencies depend on the model alone, never on a sequence's length.

    Only such keys may be shared: a dynamic scaling rotates the same prefix by other angles once the
    sequence is longer.
    """

    DEFAULT = "default"
    LINEAR = "linear"  # positions divided by `factor` (arXiv 2306.15595)
    LLAMA3 = "llama3"  # only low frequencies divided (Llama 3.1 model code)
    YARN = "yarn"  # a ramp between divided and undivided, and warmer attention (arXiv 2309.00071)


@dataclass(frozen=True)
class RopeSpec:
    """Attributes:
    theta: base of the geometric row of wavelengths.
    factor: by how much the context is stretched; unused by "default".
    original_max_len: tokens of context the model was first trained for; "llama3" and "yarn".
    low_freq_factor, high_freq_factor: "llama3": wavelengths over original_max_len / low are divided,
        under original_max_len / high untouched, between them blended.
    beta_fast, beta_slow, truncate: "yarn": the ramp's ends, in rotations over original_max_len, and
        whether they are rounded outward to whole dimensions.
    attention_factor: "yarn": what cos and sin are multiplied by.
    """

    rope_type: RopeType = RopeType.DEFAULT
    theta: float = 10000.0
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: radians a position, by dimension pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / spec.theta**exponents
    match spec.rope_type:
        case RopeType.DEFAULT:
            return frequencies
        case RopeType.LINEAR:
            return frequencies / spec.factor
        case RopeType.LLAMA3:
            return _llama3(frequencies, spec)
        case RopeType.YARN:
            return _yarn(frequencies, spec, head_dim)


def _llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    # Share of the undivided frequency: 1 for short wavelengths, 0 for long ones, linear between.
    rotations = frequencies * spec.original_max_len / (2 * math.pi)
    span = spec.high_freq_factor - spec.low_freq_factor
    keep = ((rotations - spec.low_freq_factor) / span).clamp(0, 1)
    return (1 - keep) * frequencies / spec.factor + keep * frequencies


def _yarn(frequencies: Tensor, spec: RopeSpec, head_dim: int) -> Tensor:
    def dimension_of(rotations: float) -> float:
        """The pair, as a real number, that turns `rotations` times over the original context."""
        ratio = spec.original_max_len / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 0.001)
    divide = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / spec.factor * divide + frequencies * (1 - divide)


@dataclass(frozen=True, eq=False)
class Rotation:
    """The angles of one step's positions, looked up once and used by every layer.

    Attributes:
        cos: [num_tokens, 1, head_dim], both halves alike.
        sin: [num_tokens, 1, head_dim], the first half negated.
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Turns positions into rotations.

    Args:
        spec: which frequencies.
        head_dim: even.
        dtype: of the heads that will be rotated; angles are float32 before they become cos and sin.
    """

    def __init__(
        self, spec: RopeSpec, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._frequencies = inverse_frequencies(spec, head_dim).to(device)
        self._attention_factor = spec.attention_factor
        self._dtype = dtype

    def __call__(self, positions: Tensor) -> Rotation:
        """positions int64 [num_tokens]"""
        angles = positions[:, None, None].float() * self._frequencies
        cos = angles.cos().mul_(self._attention_factor).to(self._dtype)
        sin = angles.sin().mul_(self._attention_factor).to(self._dtype)
        return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
