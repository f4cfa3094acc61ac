"""Root-mean-square normalization (arXiv 1910.07467)."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from kernels import dispatch


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """Normalizes the last axis; the mean of squares is taken in float32 whatever the dtype.

    Attributes:
        weight: [size], or [num_heads, size] for one weight a head on [num_tokens, num_heads, size].
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 1:
            return dispatch.rms_norm(x, self.weight, self.eps)
        return functional.rms_norm(x, (x.shape[-1],), None, self.eps).mul_(self.weight)

    def add(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """Adds `delta` to `hidden` in place and normalizes the sum; one weight for all."""
        return dispatch.add_rms_norm(hidden, delta, self.weight, self.eps)
