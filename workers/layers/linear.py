"""Affine projections."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional


class Projection(Protocol):
    """x [num_rows, in_features] → [num_rows, out_features], in x's dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...


# weight [out_features, in_features] and bias [out_features], or None
MakeProjection = Callable[[Tensor, Tensor | None], Projection]


@dataclass(frozen=True, eq=False)
class Linear:
    """x [..., in_features] → [..., out_features].

    Attributes:
        weight: [out_features, in_features].
        bias: [out_features], or None.
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)
