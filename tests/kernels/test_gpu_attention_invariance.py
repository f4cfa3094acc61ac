"""Batch-invariant attention: a row's bits depend on its own sequence alone."""

import pytest
import torch
from attention_cases import FP8, Step, make_step, part_of
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.device_batch import DeviceBatch
from kernels.gpu import attention
from kernels.gpu.attention_plan import DeviceTraits, plan_attention

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tensors here are the interpreter's"
)

FEW_SMS = DeviceTraits(num_sms=1, can_read_fp8=False)  # one program sums all segments
MANY_SMS = DeviceTraits(num_sms=132, can_read_fp8=False)  # every segment has a program
PROMPT = 560  # past the first segment
# dtype, the cache's, sliding window, query heads
KINDS = [
    (torch.float32, None, None, 1),
    (torch.float16, FP8, None, 3),
    (torch.float32, FP8, 100, 2),
]


def attend(
    step: Step, query: Tensor, batch: AttentionBatch, device: DeviceTraits, window: int | None
) -> Tensor:
    known = DeviceBatch.of(batch)
    launches = plan_attention(attention.attention_shape(query, step.cache, known), device, True)
    return attention.run_launches(
        query, step.cache, known, launches, scale=0.2, sliding_window=window
    )


@pytest.mark.parametrize(("dtype", "kv_dtype", "window", "num_q_heads"), KINDS)
@pytest.mark.parametrize("device", [FEW_SMS, MANY_SMS], ids=["one program", "programs"])
def test_the_same_bits_alone_in_a_batch_and_in_chunks(
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    window: int | None,
    num_q_heads: int,
    device: DeviceTraits,
) -> None:
    step = make_step(
        [(3, 20), (PROMPT, PROMPT), (1, 90)],
        num_q_heads=num_q_heads,
        num_kv_heads=1,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    whole = attend(step, step.query, step.batch, FEW_SMS, window)
    for query_len, context in [
        *((1, n) for n in (1, 64, 65, 511, 513, PROMPT)),
        *((15, n) for n in (15, 520)),
        *((16, n) for n in (64, 520)),
        *((17, n) for n in (513, PROMPT)),
    ]:
        query, batch = part_of(step, 1, query_len, context)
        rows = slice(3 + context - query_len, 3 + context)
        output = attend(step, query, batch, device, window)
        assert torch.equal(output, whole[rows]), (query_len, context)


def test_both_ways_to_sum_segments_are_taken() -> None:
    step = make_step([(1, 1100)] * 4, num_q_heads=1, num_kv_heads=1)
    shape = attention.attention_shape(step.query, step.cache, DeviceBatch.of(step.batch))
    num_splits = [
        plan_attention(shape, device, True)[0].num_splits for device in (MANY_SMS, FEW_SMS)
    ]
    assert num_splits == [3, 1]


def test_without_the_mode_bits_do_change() -> None:
    """Or the first test would say nothing."""
    step = make_step([(1, 1100)] * 4, num_q_heads=1, num_kv_heads=1)
    batch = DeviceBatch.of(step.batch)
    shape = attention.attention_shape(step.query, step.cache, batch)
    one, other = (
        attention.run_launches(
            step.query, step.cache, batch, plan_attention(shape, device, False), scale=0.2
        )
        for device in (FEW_SMS, MANY_SMS)
    )
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
