"""The least time a step can take: bytes over the machine's reads, or operations over its products."""

from dataclasses import dataclass
from pathlib import Path

from bench.engine.ceilings import Ceilings
from workers.models.spec import ModelSpec
from workers.weights import expected_shapes

PRECISION_TO_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class ModelCost:
    """Attributes:
    num_layer_weights: entries of all projections but the last one, each used once a token.
    num_head_weights: entries of the projection to the vocabulary, used once a drawn token.
    num_score_flops: of attention, for each pair of a token and one it sees, over all layers.
    """

    num_layer_weights: int
    num_head_weights: int
    num_score_flops: int

    @classmethod
    def from_dir(cls, model_dir: Path) -> "ModelCost":
        spec = ModelSpec.from_dir(model_dir)
        num_layer_weights = sum(
            shape[0] * shape[1]
            for name, shape in expected_shapes(spec).items()
            if len(shape) == 2 and name.startswith("model.layers.")
        )
        # Scores and weighted sum, a multiply and an add for each head's entry.
        num_score_flops = 4 * spec.num_layers * spec.num_q_heads * spec.head_dim
        return cls(num_layer_weights, spec.vocab_size * spec.hidden_size, num_score_flops)


def decode_floor(cost: ModelCost, ceilings: Ceilings, precision: str, batch: int) -> float:
    """The most tokens/s of `batch` sequences with a short context, whose KV is neglected."""
    num_weights = cost.num_layer_weights + cost.num_head_weights
    read_s = num_weights * PRECISION_TO_BYTES[precision] / ceilings.read_bytes_per_s
    compute_s = 2 * batch * num_weights / _flops(ceilings, precision)
    return batch / max(read_s, compute_s)


def prefill_floor(cost: ModelCost, ceilings: Ceilings, precision: str, num_tokens: int) -> float:
    """The most tokens/s of one prompt, its first token drawn."""
    flops = 2 * (num_tokens * cost.num_layer_weights + cost.num_head_weights)
    flops += cost.num_score_flops * num_tokens * (num_tokens + 1) // 2
    return num_tokens * _flops(ceilings, precision) / flops


def _flops(ceilings: Ceilings, precision: str) -> float:
    """bf16 numbers may be multiplied as fp32 where that is faster."""
    if precision == "bf16":
        return max(ceilings.bf16_flops, ceilings.fp32_flops)
    return ceilings.fp32_flops
