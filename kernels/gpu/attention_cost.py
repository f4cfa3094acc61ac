"""Bytes that attention moves: the fewest any kernel could, and those that these kernels' loads and stores name."""

from collections.abc import Sequence

from kernels.gpu.attention_plan import AttentionShape, DeviceTraits, Launch, plan_attention
from kernels.gpu.traffic import Traffic

_FLOAT_BYTES = 4
_BLOCK_ID_BYTES = 4


def attention_traffic(
    shape: AttentionShape,
    lengths: Sequence[tuple[int, int]],
    device: DeviceTraits,
    *,
    sliding_window: int | None = None,
    is_batch_invariant: bool = False,
) -> Traffic:
    """Of one `paged_attention`, lengths and starts of sequences apart.

    Named bytes count what each program asks for: keys and values again for every tile of rows that sees them,
    block ids for every KV head, the sums of splits out and in. Masked-off loads move nothing and do not count.

    Args:
        lengths: (query_len, context_len) of each sequence.
    """
    query_and_output = 2 * shape.num_rows * shape.num_q_heads * shape.head_dim * shape.element_bytes
    seen = sum(context - first_key(context - query, sliding_window) for query, context in lengths)
    named = query_and_output
    for launch in plan_attention(shape, device, is_batch_invariant):
        named += _launch_bytes(shape, launch, lengths, sliding_window)
    return Traffic(named, query_and_output + seen * shape.num_kv_heads * _key_bytes(shape))


def first_key(position: int, sliding_window: int | None) -> int:
    """The first position that a row at `position` sees."""
    return 0 if sliding_window is None else max(0, position - sliding_window + 1)


def _key_bytes(shape: AttentionShape) -> int:
    """A key and its value, of one head, with their scales."""
    if shape.is_quantized:
        return 2 * (shape.head_dim + _FLOAT_BYTES)
    return 2 * shape.head_dim * shape.element_bytes


def _launch_bytes(
    shape: AttentionShape,
    launch: Launch,
    lengths: Sequence[tuple[int, int]],
    sliding_window: int | None,
) -> int:
    num_keys = 0
    num_rows = 0
    for query, context in lengths:
        if (query == 1) != launch.is_decode:
            continue
        num_rows += query
        for first in range(0, query, launch.block_q):
            position = context - query + first
            end = min(position + launch.block_q, context)
            begin = first_key(position, sliding_window)
            num_keys += end - begin // launch.tile.block_n * launch.tile.block_n
    sums_bytes = (
        num_rows * shape.num_q_heads * launch.num_splits * (shape.head_dim + 2) * _FLOAT_BYTES
    )
    read = num_keys * shape.num_kv_heads * (_key_bytes(shape) + _BLOCK_ID_BYTES)
    return read + (2 * sums_bytes if launch.is_split else 0)
