"""Affine projections."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from kernels import dispatch


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


@dataclass(frozen=True, eq=False)
class InvariantLinear:
    """As `Linear`; on a CUDA device a row's bits do not depend on the other rows."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return dispatch.invariant_linear(x, self.weight, self.bias)
