"""The device side of paged attention: one program attends a tile of rows to a run of keys.

A tile's rows are the query heads of one KV head, for one position after another:

    GROUP 3, BLOCK_M 16    row   0  1  2 | 3  4  5 | 6 … 14 | 15
                           head  0  1  2 | 0  1  2 | 0 …  2 |  -      BLOCK_Q = 5 positions, one row idle
                           pos   p  p  p | p+1     | …

so that keys and values are read once for the whole group. Keys are visited in tiles of BLOCK_N positions,
which start at multiples of BLOCK_N; the softmax is the online one (arXiv 1805.02867) in base 2 and float32.

    whole tiles, seen by every row, no mask        last tiles, masked
    0 ─────────────────────────────────────────────┼──────────────── key_end
    with a window, all tiles from the first that any row sees are masked

A split is one program's share of the keys. Its sums go to scratch, and `merge_kernel` adds them up.

Batch-invariant (SEGMENT_LEN > 0): keys fall into segments of SEGMENT_LEN positions, each summed alone and
then added to the sums of those before, in order, whether one program holds all segments or each has its own.
A tile or segment that a row does not see leaves its sums as they are, bit for bit.
"""

import triton
import triton.language as tl

from kernels.gpu.attention_tile import attend_keys, fit_float16, locate_rows, merge_weights


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "stride_table"])
def attention_kernel(
    query_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    key_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    value_ptr,  # as key_ptr, with the same strides
    key_scale_ptr,  # float32 [num_blocks, BLOCK_SIZE, NUM_KV_HEADS]
    value_scale_ptr,  # as key_scale_ptr, with the same strides
    output_ptr,  # [num_tokens, num_q_heads, HEAD_DIM], contiguous
    sums_ptr,  # float32 [num_tiles, NUM_KV_HEADS, GROUP * BLOCK_Q, num_splits, HEAD_DIM], if IS_SPLIT
    stats_ptr,  # float32 [the same, without HEAD_DIM, 2]: high and total
    table_ptr,  # int32 [num_seqs, max_blocks]
    query_starts_ptr,  # int32 [num_seqs + 1]
    context_lens_ptr,  # int32 [num_seqs]
    scale_log2,
    num_seqs,
    num_splits,
    stride_query_row,
    stride_query_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_scale_block,
    stride_scale_slot,
    stride_scale_head,
    stride_table,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT_LEN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_DECODE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Grid: (num_tiles * NUM_KV_HEADS, num_splits). Heads of a tile run side by side: their slots adjoin."""
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    seq, start, query_len, first, count = locate_rows(
        query_starts_ptr, num_seqs, tile, BLOCK_Q, IS_DECODE
    )
    if count <= 0:
        return
    num_before = (
        tl.load(context_lens_ptr + seq) - query_len + first
    )  # keys before the tile's first row
    rows = tl.arange(0, BLOCK_M)
    row_positions = num_before + rows // GROUP
    key_end = num_before + count
    key_begin = 0
    if WINDOW:
        key_begin = tl.maximum(num_before - WINDOW + 1, 0) // BLOCK_N * BLOCK_N

    dims = tl.arange(0, PADDED_DIM)
    is_row = rows < count * GROUP
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    token_rows = (start + first + rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    query_offsets = token_rows * stride_query_row + heads * stride_query_head
    query = tl.load(query_ptr + query_offsets[:, None] + dims[None, :], mask=mask, other=0.0)

    query_factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if IS_QUANTIZED and query.dtype == tl.bfloat16:
        query, query_factor = fit_float16(query)

    key_ptr += kv_head * stride_head
    value_ptr += kv_head * stride_head
    if IS_QUANTIZED:
        key_scale_ptr += kv_head * stride_scale_head
        value_scale_ptr += kv_head * stride_scale_head
    table_ptr += seq.to(tl.int64) * stride_table
    cache = (key_ptr, value_ptr, key_scale_ptr, value_scale_ptr)
    strides = (stride_block, stride_slot, stride_scale_block, stride_scale_slot)

    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)

    begin = key_begin
    end = key_end
    if IS_SPLIT:
        split = tl.program_id(1)
        if SEGMENT_LEN:
            split_len = SEGMENT_LEN
            begin = tl.maximum(split * split_len, key_begin)
            end = tl.minimum((split + 1) * split_len, key_end)
        else:
            split_len = tl.cdiv(tl.cdiv(key_end - key_begin, num_splits), BLOCK_N) * BLOCK_N
            begin = key_begin + split * split_len
            end = tl.minimum(begin + split_len, key_end)
    if SEGMENT_LEN and not IS_SPLIT:
        for segment in tl.range(key_begin // SEGMENT_LEN, tl.cdiv(key_end, SEGMENT_LEN)):
            segment_high, segment_total, segment_sums = attend_keys(
                query,
                query_factor,
                row_positions,
                tl.full([BLOCK_M], float("-inf"), tl.float32),
                tl.zeros([BLOCK_M], tl.float32),
                tl.zeros([BLOCK_M, PADDED_DIM], tl.float32),
                tl.maximum(segment * SEGMENT_LEN, key_begin),
                tl.minimum((segment + 1) * SEGMENT_LEN, key_end),
                cache,
                strides,
                table_ptr,
                scale_log2,
                HEAD_DIM,
                PADDED_DIM,
                BLOCK_SIZE,
                BLOCK_N,
                WINDOW,
                SOFT_CAP,
                IS_QUANTIZED,
                True,
            )
            high, keep, gain = merge_weights(high, segment_high)
            total = tl.fma(total, keep, segment_total * gain)
            sums = tl.fma(sums, keep[:, None], segment_sums * gain[:, None])
    else:
        # Batch-invariant: one form of the loop for all tiles, since two compiled forms need not round alike.
        if not (WINDOW or SEGMENT_LEN):
            middle = tl.minimum(end, tl.maximum(num_before + 1, 0) // BLOCK_N * BLOCK_N)
            high, total, sums = attend_keys(
                query,
                query_factor,
                row_positions,
                high,
                total,
                sums,
                begin,
                middle,
                cache,
                strides,
                table_ptr,
                scale_log2,
                HEAD_DIM,
                PADDED_DIM,
                BLOCK_SIZE,
                BLOCK_N,
                WINDOW,
                SOFT_CAP,
                IS_QUANTIZED,
                False,
            )
            begin = tl.maximum(begin, middle)
        high, total, sums = attend_keys(
            query,
            query_factor,
            row_positions,
            high,
            total,
            sums,
            begin,
            end,
            cache,
            strides,
            table_ptr,
            scale_log2,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_SIZE,
            BLOCK_N,
            WINDOW,
            SOFT_CAP,
            IS_QUANTIZED,
            True,
        )

    if IS_SPLIT:
        scratch_rows = (
            tl.program_id(0).to(tl.int64) * (GROUP * BLOCK_Q) + rows
        ) * num_splits + split
        tl.store(stats_ptr + scratch_rows * 2, high, mask=is_row)
        tl.store(stats_ptr + scratch_rows * 2 + 1, total, mask=is_row)
        mask = mask & (high > float("-inf"))[:, None]
        tl.store(sums_ptr + scratch_rows[:, None] * HEAD_DIM + dims[None, :], sums, mask=mask)
    else:
        output = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        output_rows = (token_rows * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
        tl.store(
            output_ptr + output_rows[:, None] + dims[None, :],
            output.to(output_ptr.dtype.element_ty),
            mask=mask,
        )


@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def merge_kernel(
    output_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM], contiguous
    sums_ptr,  # as `attention_kernel` left them
    stats_ptr,
    query_starts_ptr,  # int32 [num_seqs + 1]
    num_seqs,
    num_splits,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    IS_DECODE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One output vector a program. Grid: (num_tiles * NUM_KV_HEADS, GROUP * BLOCK_Q)."""
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row = tl.program_id(1)
    _, start, _, first, count = locate_rows(query_starts_ptr, num_seqs, tile, BLOCK_Q, IS_DECODE)
    if row >= count * GROUP:
        return
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    scratch_row = (tl.program_id(0).to(tl.int64) * (GROUP * BLOCK_Q) + row) * num_splits
    high = float("-inf")
    total = 0.0
    sums = tl.zeros([PADDED_DIM], tl.float32)
    for split in tl.range(0, num_splits, num_stages=STAGES):
        stats_row = stats_ptr + (scratch_row + split) * 2
        split_high = tl.load(stats_row)
        split_total = tl.load(stats_row + 1)
        split_sums = tl.load(
            sums_ptr + (scratch_row + split) * HEAD_DIM + dims, mask=is_dim, other=0.0
        )
        # Nothing was stored for a split without keys: its gain is 0, but 0 times garbage may be NaN.
        split_sums = tl.where(split_high > float("-inf"), split_sums, 0.0)
        high, keep, gain = merge_weights(high, split_high)
        total = tl.fma(total, keep, split_total * gain)
        sums = tl.fma(sums, keep, split_sums * gain)
    output = sums / tl.where(total > 0.0, total, 1.0)
    token_row = (start + first + row // GROUP).to(tl.int64)
    output_row = (token_row * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP) * HEAD_DIM
    tl.store(output_ptr + output_row + dims, output.to(output_ptr.dtype.element_ty), mask=is_dim)
