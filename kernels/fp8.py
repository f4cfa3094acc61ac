"""float8 e4m3 with one float32 scale for each token and head."""

from typing import NamedTuple

import torch
from torch import Tensor

FP8_MAX = 448.0  # the largest finite e4m3 number
# Keeps the division defined for an all-zero vector. amax / FP8_MAX below this is rounded up to it, which
# only makes the stored numbers smaller.
MIN_SCALE = 2.0**-120


class QuantizedVectors(NamedTuple):
    values: Tensor  # float8_e4m3fn [..., head_dim]
    scale: Tensor  # float32 [...]


def quantize(vectors: Tensor) -> QuantizedVectors:
    """`vectors` [..., head_dim] as e4m3 numbers times a scale: the largest magnitude maps to 448.

    The clamp before the cast matters: past 448 some stacks saturate and others store NaN, and one NaN
    in a shared block poisons all its readers.
    """
    scale = vectors.abs().amax(-1).float().div_(FP8_MAX).clamp_(min=MIN_SCALE)
    scaled = (vectors / scale.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX)
    return QuantizedVectors(scaled.to(torch.float8_e4m3fn), scale)


def dequantize(values: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., head_dim], the inverse of `quantize` up to e4m3's rounding (2⁻⁴ relative)."""
    return values.float() * scale.unsqueeze(-1)
