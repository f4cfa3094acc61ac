"""What the attention kernels are made of: where rows and keys lie, and the online softmax over a run of keys."""

import triton
import triton.language as tl

# Smaller scales count as this one: their values are far below what any sum can show, and the weights of their
# keys must not vanish.
_MIN_VALUE_SCALE = tl.constexpr(2.0**-80)
# Of float32 numbers: three tensor-core products each, which come to float32's own precision.
_PRECISION = tl.constexpr("tf32x3")
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def key_offsets(block_ids, positions, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """int64: where the vectors of `positions` begin. A pool may hold more than 2**31 numbers."""
    return block_ids.to(tl.int64) * stride_block + (positions % BLOCK_SIZE) * stride_slot


@triton.jit
def load_block_ids(table_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """int32 [BLOCK_N], or [1] where one block holds the tile: the blocks of positions start … end - 1, then 0."""
    positions = start + tl.arange(0, 1 if BLOCK_N <= BLOCK_SIZE else BLOCK_N)
    return tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def widen(tile, DTYPE: tl.constexpr):
    """e4m3 numbers in DTYPE, float16 or float32. Float16 holds them all, and two take one instruction.

    An int8 tile holds the bytes of e4m3 numbers, for devices that cannot convert those. Their bits s eeee mmm
    put at s 0eeee mmm0000000 are a float16 that is 2**8 too small, subnormals included. Sign extension fills
    bit 14 as well, which the mask clears. The two NaN patterns read as ±480.
    """
    if tile.dtype == tl.int8:
        bits = (tile.to(tl.int16) << 7) & -0x4080
        tile = bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return tile.to(DTYPE)


@triton.jit
def fit_float16(query):
    """float16 numbers and float32 [BLOCK_M] powers of two whose product is `query`, bfloat16 [BLOCK_M, dims].

    What is 2**-24 times the row's largest number, or less, is lost.
    """
    numbers = query.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(numbers), 1), 1e-30)
    factor = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return (numbers / factor[:, None]).to(tl.float16), factor


@triton.jit
def locate_rows(query_starts_ptr, num_seqs, tile, BLOCK_Q: tl.constexpr, IS_DECODE: tl.constexpr):
    """Which sequence a tile of rows belongs to: its number, first row, rows, the tile's first and its count.

    Tiles of sequence i begin at number query_starts[i] // BLOCK_Q + i, which leaves every sequence enough and
    some sequences one too many: that one, like a sequence of the other launch, counts 0 rows. Decode
    launches take the sequences with one row and have a tile for each sequence; the others take the rest.
    """
    seq = tile
    if not IS_DECODE:
        low = 0
        high = num_seqs
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(query_starts_ptr + middle) // BLOCK_Q + middle <= tile:
                low = middle
            else:
                high = middle
        seq = low
    start = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + 1) - start
    if IS_DECODE:
        first = 0
        count = tl.where(query_len == 1, 1, 0)
    else:
        first = (tile - (start // BLOCK_Q + seq)) * BLOCK_Q
        count = tl.where(query_len == 1, 0, tl.minimum(query_len - first, BLOCK_Q))
    return seq, start, query_len, first, count


@triton.jit
def merge_weights(high, other_high):
    """The larger maximum, and what the sums of either run are multiplied by. -inf: nothing was seen."""
    new_high = tl.maximum(high, other_high)
    shift = tl.where(new_high == float("-inf"), 0.0, new_high)
    return new_high, tl.exp2(high - shift), tl.exp2(other_high - shift)


@triton.jit
def attend_keys(
    query,  # [BLOCK_M, PADDED_DIM]
    query_factor,  # float32 [BLOCK_M]: what `query` is to be multiplied by, if IS_QUANTIZED
    row_positions,  # [BLOCK_M]
    high,  # float32 [BLOCK_M], the largest score so far, in units of log 2
    total,  # float32 [BLOCK_M], the sum of 2 ** (score - high)
    sums,  # float32 [BLOCK_M, PADDED_DIM], the values so weighted
    begin,
    end,
    cache,  # pointers: keys, values, key scales, value scales of one KV head
    strides,  # of a block and a slot, in the cache and in its scales
    table_ptr,  # int32 [max_blocks], the sequence's own
    scale_log2,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Adds the keys of begin … end - 1; `begin` is a multiple of BLOCK_N, and so is `end` without a mask.

    Of a float8 cache, numbers are used as stored. A key's scale is multiplied onto its score. A value's scale
    2**e * f, 1 <= f < 2, goes into the key's weight: e onto the score, and out of the total again, f onto the
    weight. The largest weight is then between 1 and 2, and float16 holds it, however small the scales are.
    """
    key_ptr, value_ptr, key_scale_ptr, value_scale_ptr = cache
    stride_block, stride_slot, stride_scale_block, stride_scale_slot = strides
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, PADDED_DIM)
    # A tile's block ids are read one tile ahead, else its keys would wait for them.
    block_ids = load_block_ids(table_ptr, begin, end, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        positions = start + columns
        is_inside = positions < end
        offsets = key_offsets(block_ids, positions, stride_block, stride_slot, BLOCK_SIZE)
        offsets = offsets[:, None] + dims[None, :]
        # Whatever an unwritten slot or a padded dim holds, NaN included, is replaced before it is used.
        if IS_MASKED:
            mask = is_inside[:, None] & (dims < HEAD_DIM)[None, :]
            key = tl.load(key_ptr + offsets, mask=mask, other=0.0)
            value = tl.load(value_ptr + offsets, mask=mask, other=0.0)
        elif PADDED_DIM == HEAD_DIM:
            key = tl.load(key_ptr + offsets)
            value = tl.load(value_ptr + offsets)
        else:
            mask = (dims < HEAD_DIM)[None, :]
            key = tl.load(key_ptr + offsets, mask=mask, other=0.0)
            value = tl.load(value_ptr + offsets, mask=mask, other=0.0)
        key = widen(key, query.dtype) if IS_QUANTIZED else key
        scores = tl.dot(query, tl.trans(key), input_precision=_PRECISION)  # [BLOCK_M, BLOCK_N]
        if IS_QUANTIZED:
            scale_offsets = key_offsets(
                block_ids, positions, stride_scale_block, stride_scale_slot, BLOCK_SIZE
            )
            key_scale = tl.load(key_scale_ptr + scale_offsets, mask=is_inside, other=0.0)
            value_scale = tl.load(value_scale_ptr + scale_offsets, mask=is_inside, other=1.0)
            value_bits = tl.maximum(value_scale, _MIN_VALUE_SCALE).to(tl.int32, bitcast=True)
            scores = scores * query_factor[:, None] * key_scale[None, :]
        if SOFT_CAP != 0.0:
            # tanh as 1 - 2 / (e ** 2x + 1): e ** 2x may be inf or 0, and the result is right.
            doubled = tl.exp2(scores * (scale_log2 * (2.0 / SOFT_CAP)))
            scores = (SOFT_CAP * _LOG2_E) * (1.0 - 2.0 / (doubled + 1.0))
            unit = 1.0
        else:
            unit = scale_log2
        if IS_QUANTIZED:
            exponents = ((value_bits >> 23) - 127).to(tl.float32)
            scores = tl.fma(scores, unit, exponents[None, :])
            unit = 1.0
        if IS_MASKED:
            distance = row_positions[:, None] - positions[None, :]
            is_visible = distance >= 0
            if WINDOW:
                is_visible = is_visible & (distance < WINDOW)
            scores = tl.where(is_visible, scores, float("-inf"))
        new_high = tl.maximum(high, tl.max(scores, 1) * unit)
        shift = new_high
        if IS_MASKED:
            shift = tl.where(new_high == float("-inf"), 0.0, new_high)
        weights = tl.exp2(tl.fma(scores, unit, -shift[:, None]))
        keep = tl.exp2(high - shift)
        if IS_QUANTIZED:
            value = widen(value, query.dtype)
            inverse_powers = ((254 << 23) - (value_bits & 0x7F800000)).to(tl.float32, bitcast=True)
            total = tl.fma(total, keep, tl.sum(weights * inverse_powers[None, :], 1))
            mantissas = ((value_bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
            weights = weights * mantissas[None, :]
        else:
            total = tl.fma(total, keep, tl.sum(weights, 1))
        sums = tl.dot(
            weights.to(query.dtype), value, sums * keep[:, None], input_precision=_PRECISION
        )
        high = new_high
        block_ids = load_block_ids(table_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
    return high, total, sums
