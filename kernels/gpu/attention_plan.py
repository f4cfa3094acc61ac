"""How an attention step is cut into kernel launches: a pure function of numbers the host knows.

Launches must not depend on what lies on the device, so that a captured graph holds for later contents.
"""

from dataclasses import dataclass
from functools import lru_cache

from kernels.gpu.launch import ceil_div, next_power_of_2

# The tensor cores' least number of rows.
_MIN_BLOCK_M = 16
# Programs for each multiprocessor: enough for short sequences to fill in behind long ones.
_PROGRAMS_PER_SM = 4
# Below this, a split's sums weigh more than a few percent of the keys and values it read.
_MIN_SPLIT_LEN = 512
# Batch-invariant sums are formed over runs of so many positions; a multiple of every block_n.
_SEGMENT_LEN = 512
_MAX_SCRATCH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class DeviceTraits:
    """What of a device decides about launches.

    Attributes:
        num_sms: its multiprocessors.
        can_read_fp8: it converts float8 e4m3 numbers itself; else their bytes are read.
    """

    num_sms: int
    can_read_fp8: bool


def can_read_fp8(capability: tuple[int, int]) -> bool:
    """Whether Triton can convert float8_e4m3fn for a device of this compute capability (8.9 and later)."""
    return capability >= (8, 9)


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of a step, as far as the host knows them.

    Attributes:
        max_query_len, max_context_len: bounds, not necessarily reached.
        element_bytes: of the query's numbers.
    """

    num_rows: int
    num_seqs: int
    max_query_len: int
    max_context_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    is_quantized: bool

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True)
class Tile:
    """What one program holds at a time, and how many threads hold it.

    Attributes:
        block_m: rows, a power of two; a position takes `group` of them.
        block_n: keys.
        num_stages: tiles of keys under way at a time.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """As Triton calls them."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Launch:
    """One launch of the attention kernel and, if it has splits, of the merge.

    Attributes:
        is_decode: for the sequences with one query row, a tile each; else for all others.
        block_q: positions in a tile.
        num_tiles: tiles of rows, empty ones included.
        num_splits: programs that share the keys of a tile.
        segment_len: positions whose sums are formed alone; 0: no bounds but the splits'.
    """

    is_decode: bool
    tile: Tile
    block_q: int
    num_tiles: int
    num_splits: int
    segment_len: int

    @property
    def is_split(self) -> bool:
        return self.num_splits > 1

    def num_scratch_rows(self, shape: AttentionShape) -> int:
        """Rows of partial sums, `head_dim` numbers each."""
        if not self.is_split:
            return 0
        rows = self.num_tiles * shape.num_kv_heads * shape.group * self.block_q
        return rows * self.num_splits


@lru_cache(maxsize=1024)
def plan_attention(
    shape: AttentionShape, device: DeviceTraits, is_batch_invariant: bool
) -> tuple[Launch, ...]:
    """The launches that together answer for every row of the step.

    Batch-invariant plans have one tile for every step, and sums over fixed segments of positions; whether
    the segments are shared out among programs may depend on the batch, since it changes no bit.
    """
    launches = []
    has_decodes = shape.max_query_len == 1 or shape.num_seqs > 1
    if shape.max_query_len > 1:
        launches.append(_launch(shape, device, is_batch_invariant, is_decode=False))
    if has_decodes:
        launches.append(_launch(shape, device, is_batch_invariant, is_decode=True))
    return tuple(launches)


def _launch(
    shape: AttentionShape, device: DeviceTraits, is_batch_invariant: bool, *, is_decode: bool
) -> Launch:
    tile = decode_tile(shape) if is_decode or is_batch_invariant else chunk_tile(shape)
    block_q = 1 if is_decode else tile.block_m // shape.group
    num_tiles = shape.num_seqs if is_decode else shape.num_rows // block_q + shape.num_seqs
    unsplit = Launch(
        is_decode, tile, block_q, num_tiles, 1, _SEGMENT_LEN if is_batch_invariant else 0
    )
    num_programs = num_tiles * shape.num_kv_heads
    num_wanted = ceil_div(device.num_sms * _PROGRAMS_PER_SM, num_programs)
    if is_batch_invariant:
        num_splits = ceil_div(shape.max_context_len, _SEGMENT_LEN) if num_wanted > 1 else 1
    else:
        num_splits = max(min(num_wanted, shape.max_context_len // _MIN_SPLIT_LEN), 1)
    split = Launch(is_decode, tile, block_q, num_tiles, num_splits, unsplit.segment_len)
    is_affordable = split.num_scratch_rows(shape) * shape.head_dim * 4 <= _MAX_SCRATCH_BYTES
    return split if is_affordable else unsplit


def decode_tile(shape: AttentionShape) -> Tile:
    """For one position: memory is the limit, so many keys under way and no more rows than needed."""
    padded_dim = next_power_of_2(shape.head_dim)
    block_m = max(_MIN_BLOCK_M, next_power_of_2(shape.group))
    if shape.element_bytes > 2:
        if padded_dim > 128:
            return Tile(block_m, 16, num_warps=8, num_stages=1)
        return Tile(block_m, 32, num_warps=8, num_stages=2)
    if padded_dim > 128:
        return Tile(block_m, 32, num_warps=4, num_stages=3)
    return Tile(block_m, 64, num_warps=4, num_stages=3)


def chunk_tile(shape: AttentionShape) -> Tile:
    """For many positions: the tensor cores are the limit, so as many rows for each key as registers hold."""
    padded_dim = next_power_of_2(shape.head_dim)
    group_rows = next_power_of_2(shape.group)
    if shape.element_bytes > 2:
        return decode_tile(shape)
    if padded_dim > 128 and shape.is_quantized:
        return Tile(max(32, group_rows), 32, num_warps=4, num_stages=2)
    if padded_dim > 128:
        return Tile(max(128, group_rows), 32, num_warps=8, num_stages=2)
    if shape.is_quantized:
        return Tile(max(128, group_rows), 32, num_warps=8, num_stages=3)
    return Tile(max(128, group_rows), 64, num_warps=8, num_stages=3)
