"""The CPU path against the reference, and both against attention written out for one token at a time."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import cpu, dispatch, reference
from kernels.batch import AttentionBatch
from kernels.paged_cache import PagedCache

DTYPE_TO_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def empty_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> PagedCache:
    """Full of NaN."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    if dtype != torch.float8_e4m3fn:
        return PagedCache(
            torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
        )

    def bytes_of_nan() -> Tensor:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)

    def scales() -> Tensor:
        return torch.full(shape[:-1], math.nan)

    return PagedCache(bytes_of_nan(), bytes_of_nan(), scales(), scales())


class Case:
    """Random sequences whose whole context is written, the last `query_len` rows of each being asked for."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],  # (query_len, context_len)
        *,
        num_q_heads: int = 6,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_blocks = sum(-(-context // block_size) for _, context in lengths) + 3
        free = list(range(num_blocks))
        random.Random(seed).shuffle(free)
        self.cache = empty_cache(num_blocks, block_size, num_kv_heads, head_dim, kv_dtype or dtype)
        tables = [[free.pop() for _ in range(-(-context // block_size))] for _, context in lengths]
        width = max(map(len, tables))
        slots, starts = [], [0]
        self.contexts: list[tuple[Tensor, Tensor]] = []
        for (query_len, context), table in zip(lengths, tables, strict=True):
            key = torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype)
            value = torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype)
            where = [table[p // block_size] * block_size + p % block_size for p in range(context)]
            dispatch.write_kv(key, value, self.cache, torch.tensor(where))
            self.contexts.append((key, value))
            slots += where[context - query_len :]
            starts.append(len(slots))
        self.query = torch.randn(len(slots), num_q_heads, head_dim, generator=generator).to(dtype)
        self.batch = AttentionBatch(
            torch.tensor(slots),
            torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            tuple(starts),
            tuple(context for _, context in lengths),
            block_size,
        )

    def run(self, sliding_window: int | None = None) -> tuple[Tensor, Tensor]:
        scale = self.query.shape[-1] ** -0.5
        fast = cpu.paged_attention(
            self.query, self.cache, self.batch, scale=scale, sliding_window=sliding_window
        )
        slow = reference.paged_attention(
            self.query, self.cache, self.batch, scale=scale, sliding_window=sliding_window
        )
        return fast, slow


def written_out(case: Case, sliding_window: int | None) -> Tensor:
    """Token by token and head by head in Python's own floats."""
    rows = []
    group = case.query.shape[1] // case.contexts[0][0].shape[1]
    for i, (key, value) in enumerate(case.contexts):
        num_rows = case.batch.query_len(i)
        for r in range(num_rows):
            position = len(key) - num_rows + r
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            query = case.query[case.batch.query_starts[i] + r].double()
            heads = []
            for h in range(query.shape[0]):
                seen = slice(first, position + 1)
                k, v = key[seen, h // group].double(), value[seen, h // group].double()
                weights = [math.exp(float(s)) for s in (k @ query[h]) / math.sqrt(query.shape[-1])]
                total = sum(weights)
                heads.append(sum(w / total * row for w, row in zip(weights, v, strict=True)))
            rows.append(torch.stack(heads))
    return torch.stack(rows).float()


@pytest.mark.parametrize("sliding_window", [None, 1, 5])
def test_both_equal_attention_written_out(sliding_window: int | None) -> None:
    case = Case([(1, 1), (1, 9), (4, 7), (1, 40), (6, 6)], block_size=8)
    fast, slow = case.run(sliding_window)
    expected = written_out(case, sliding_window)
    torch.testing.assert_close(slow, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(fast, expected, rtol=0, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 120)).map(lambda p: (p[0], p[0] + p[1]))
        | st.integers(1, 300).map(lambda context: (1, context)),
        min_size=1,
        max_size=9,
    ),
    heads=st.sampled_from([(4, 4), (6, 2), (5, 1)]),
    block_size=st.sampled_from([8, 16, 32]),
    sliding_window=st.none() | st.integers(1, 60),
    dtype=st.sampled_from(list(DTYPE_TO_TOLERANCE)),
    is_fp8=st.booleans(),
)
def test_cpu_equals_reference(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    sliding_window: int | None,
    dtype: torch.dtype,
    is_fp8: bool,
) -> None:
    case = Case(
        lengths,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        block_size=block_size,
        dtype=dtype,
        kv_dtype=torch.float8_e4m3fn if is_fp8 else None,
    )
    fast, slow = case.run(sliding_window)
    assert fast.dtype == dtype
    torch.testing.assert_close(fast, slow, rtol=0, atol=DTYPE_TO_TOLERANCE[dtype])


def test_decodes_of_unequal_length_are_grouped_and_put_back_in_order() -> None:
    case = Case([(1, n) for n in (300, 5, 120, 300, 6, 1, 250, 64)])
    fast, slow = case.run()
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_slot_number_over_two_to_the_31_is_computed_in_64_bits(kv_dtype: torch.dtype) -> None:
    """The table's ids are int32; times block_size they may not fit."""
    batch = AttentionBatch(
        torch.tensor([0]), torch.tensor([[2**27 + 1]], dtype=torch.int32), (0, 1), (3,), 16
    )
    slots = cpu._plan(batch, None, torch.float32).decodes[0].slots
    assert slots.tolist() == [2**31 + 16, 2**31 + 17, 2**31 + 18]


@pytest.mark.parametrize("backend", [cpu, reference])
def test_foreign_and_unwritten_slots_do_not_change_a_bit(backend: dispatch.Backend) -> None:
    case = Case([(1, 21), (5, 33), (1, 16)])
    before = backend.paged_attention(case.query, case.cache, case.batch, scale=0.25)
    for tensor in case.cache.tensors():
        unwritten = tensor.isnan()
        assert unwritten.any()
        tensor[unwritten] = 1e30
    after = backend.paged_attention(case.query, case.cache, case.batch, scale=0.25)
    assert torch.equal(before, after)
    assert before.isfinite().all()
