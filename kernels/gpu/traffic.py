"""How many bytes the kernels' loads and stores name, beside the fewest that any kernel could.

Named bytes include what is read again and comes from a cache: a norm's weight for every row, a product's tiles.
"""

from dataclasses import dataclass

from kernels.gpu.launch import ceil_div
from kernels.gpu.matmul import BLOCK_M, LinearPlan
from kernels.gpu.rotary import RotaryPlan

_INT64_BYTES = 8
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """Attributes:
    named_bytes: in loads and stores.
    least_bytes: every input once, every output once.
    """

    named_bytes: int
    least_bytes: int

    @property
    def ratio(self) -> float:
        return self.named_bytes / self.least_bytes


def norm_traffic(num_rows: int, size: int, itemsize: int, *, has_delta: bool) -> Traffic:
    """Of `rms_norm`, or with a delta of `add_rms_norm`."""
    rows = (4 if has_delta else 2) * num_rows * size * itemsize
    weight = size * itemsize
    return Traffic(rows + num_rows * weight, rows + weight)


def silu_traffic(num_rows: int, size: int, itemsize: int) -> Traffic:
    """Of `silu_mul`."""
    num_bytes = 3 * num_rows * size * itemsize
    return Traffic(num_bytes, num_bytes)


def rotary_traffic(
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    *,
    is_quantized: bool,
) -> Traffic:
    """Of `rotate_and_write` with a slot for every token."""
    plan = RotaryPlan.of(num_q_heads, num_kv_heads, head_dim)
    read = (num_q_heads + 2 * num_kv_heads) * head_dim * itemsize
    kv_vector = head_dim + _FLOAT_BYTES if is_quantized else head_dim * itemsize
    written = num_q_heads * head_dim * itemsize + 2 * num_kv_heads * kv_vector
    angles = 2 * head_dim * itemsize
    num_rotating = plan.num_q_programs + plan.num_kv_programs
    named = read + written + num_rotating * angles + plan.num_programs * _INT64_BYTES
    return Traffic(num_tokens * named, num_tokens * (read + written + angles + _INT64_BYTES))


def copy_traffic(num_pairs: int, block_bytes: int) -> Traffic:
    """Of `copy_blocks`, block ids and addresses apart.

    Args:
        block_bytes: of one block in all layers.
    """
    num_bytes = 2 * num_pairs * block_bytes
    return Traffic(num_bytes, num_bytes)


def linear_traffic(
    num_rows: int, in_features: int, out_features: int, itemsize: int, *, has_bias: bool
) -> Traffic:
    """Of `invariant_linear`."""
    plan = LinearPlan.of(out_features, itemsize)
    x, weight = num_rows * in_features, out_features * in_features
    bias = out_features if has_bias else 0
    output = num_rows * out_features
    num_m, num_n = ceil_div(num_rows, BLOCK_M), ceil_div(out_features, plan.block_n)
    named = x * num_n + (weight + bias) * num_m + output
    return Traffic(named * itemsize, (x + weight + bias + output) * itemsize)


def sampling_traffic(num_rows: int, vocab_size: int, num_passes: int) -> Traffic:
    """Of `sample_tokens`, for rows that take so many passes: 1 when greedy, 3 and a tile without filters, more
    with them; a row's five settings and its token apart."""
    row_bytes = vocab_size * _FLOAT_BYTES
    return Traffic(num_rows * num_passes * row_bytes, num_rows * row_bytes)
