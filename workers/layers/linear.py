"""A dense projection."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


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
