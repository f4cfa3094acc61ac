"""A model whose KV is one token id a slot and whose next token depends on every slot it reads, in tensors.

It reads the batch as kernels do, from the device's tensors alone, so that a captured step sees what is there when
it is replayed.
"""

from collections.abc import Callable

import torch
from slot_model import make_info
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.device_batch import DeviceBatch
from kvstore.kv_layout import KvDtype, KvLayout
from kvstore.kv_pool import KvPool
from workers.decode_graphs import Capture
from workers.engine import Engine
from workers.model_runner import ModelRunner
from workers.options import SchedulerOptions

VOCAB = 50
BLOCK = 4
CPU = torch.device("cpu")


class TensorSlotModel:
    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, pool: KvPool
    ) -> Tensor:
        on_device = DeviceBatch.of(batch)
        slots = pool.layers[0].key.view(-1, 2)[:, 0]  # one number a slot is all it keeps
        is_real = on_device.slots >= 0
        assert token_ids[is_real].ge(0).all(), "a token nobody knows reached the model"
        slots[on_device.slots[is_real]] = token_ids[is_real].float()
        hidden = torch.zeros(len(token_ids), VOCAB)
        starts = on_device.query_starts.tolist()
        for i, context_len in enumerate(on_device.context_lens.tolist()):
            if context_len == 0:
                continue
            table = on_device.block_tables[i].long()
            for row in range(starts[i], starts[i + 1]):
                end = int(positions[row]) + 1
                places = torch.arange(end)
                read = slots[table[places // BLOCK] * BLOCK + places % BLOCK].long()
                digest = int((read * (places * 31 + 7)).sum() + read[-1] * 13 + end)
                hidden[row] = torch.randn(VOCAB, generator=torch.Generator().manual_seed(digest))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden * 3


class Rerun:
    """What a captured graph is to a device, without one: the same computation over the same memory again."""

    num_replays = 0

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._output = compute()

    def replay(self) -> Tensor:
        Rerun.num_replays += 1
        return self._output.copy_(self._compute())


def make_engine(
    num_blocks: int, limits: SchedulerOptions, *, capture: Capture | None, plans_ahead: bool
) -> Engine:
    layout = KvLayout(
        num_layers=1, num_kv_heads=1, head_dim=2, block_size=BLOCK,
        kv_dtype=KvDtype.AUTO, compute_dtype=torch.float32,
    )  # fmt: skip
    pool = KvPool(layout, num_blocks, CPU)
    runner = ModelRunner(TensorSlotModel(), pool, CPU, limits, capture=capture)
    info = make_info(num_blocks, BLOCK, limits.max_model_len)
    return Engine(runner, info, limits, frozenset({VOCAB - 1}), plans_ahead=plans_ahead)
