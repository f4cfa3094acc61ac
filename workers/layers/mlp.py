"""The gated feed-forward part (SwiGLU, arXiv 2002.05202)."""

from dataclasses import dataclass

from torch import Tensor

from kernels import dispatch
from workers.layers.linear import Projection


@dataclass(frozen=True, eq=False)
class GatedMlp:
    """down(silu(gate(x)) * up(x)), with gate's and up's rows stacked in one projection."""

    gate_up: Projection
    down: Projection

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(dispatch.silu_mul(self.gate_up(x)))
