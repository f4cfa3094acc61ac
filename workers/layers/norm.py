"""Root-mean-square normalization (arXiv 1910.07467)."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """Normalizes the last axis; the mean of squares is taken in float32 whatever the dtype.

    Attributes:
        weight: [size], or [num_heads, size] for one weight a head on [num_tokens, num_heads, size].
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        size = (x.shape[-1],)
        if self.weight.ndim == 1:
            return functional.rms_norm(x, size, self.weight, self.eps)
        return functional.rms_norm(x, size, None, self.eps).mul_(self.weight)
