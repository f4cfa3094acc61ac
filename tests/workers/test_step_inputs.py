"""A step's inputs against the plainest way to make them."""

from array import array

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kernels.device_batch import DeviceBatch
from kvstore.block_pool import BlockPool
from kvstore.block_table import BlockTable
from workers.options import SchedulerOptions
from workers.protocol import SamplingParams
from workers.sequence import Sequence
from workers.staging import StagingBuffer
from workers.step_inputs import PENDING, InputBuilder
from workers.step_plan import PlannedRow

BLOCK = 4
NUM_PLACES = 3
CPU = torch.device("cpu")
LIMITS = SchedulerOptions(max_num_seqs=NUM_PLACES, max_num_batched_tokens=64, max_model_len=40)


def make_sequence(place: int, num_tokens: int) -> Sequence:
    return Sequence(
        request_id="r", index=0, root=b"", tokens=array("I", range(100, 100 + num_tokens)),
        num_prompt_tokens=num_tokens, sampling=SamplingParams(max_tokens=9), seed=0,
        stop_token_ids=frozenset(), table=BlockTable(BLOCK), place=place,
    )  # fmt: skip


class TableMachine(RuleBasedStateMachine):
    """Sequences come, grow, share blocks and go, each place seeing many of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(64)
        self.builder = InputBuilder(LIMITS, BLOCK, CPU)
        self.place_to_sequence: dict[int, Sequence] = {}

    @precondition(lambda self: len(self.place_to_sequence) < NUM_PLACES)
    @rule(num_blocks=st.integers(1, 6))
    def come(self, num_blocks: int) -> None:
        place = min(set(range(NUM_PLACES)) - set(self.place_to_sequence))
        sequence = make_sequence(place, num_blocks * BLOCK)
        sequence.table.append(self.pool.allocate(num_blocks))
        self.place_to_sequence[place] = sequence

    @precondition(lambda self: self.place_to_sequence)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        sequence = self._pick(data)
        if len(sequence.table.block_ids) < 10:
            sequence.table.append(self.pool.allocate(1))
            sequence.tokens.extend(range(BLOCK))

    @precondition(lambda self: self.place_to_sequence)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        table = self._pick(data).table
        other = self.pool.allocate(1)[0]
        table.replace(data.draw(st.integers(0, len(table.block_ids) - 1)), other, self.pool)
        self.pool.release((other,))

    @precondition(lambda self: self.place_to_sequence)
    @rule(data=st.data(), comes_back=st.booleans())
    def go(self, data: st.DataObject, comes_back: bool) -> None:
        sequence = self._pick(data)
        sequence.table.release(self.pool)
        if comes_back:  # preempted and admitted again, with the same table object
            taken = self.pool.allocate(1)  # by somebody else meanwhile
            sequence.table.append(self.pool.allocate(2))
            self.pool.release(taken)
            del sequence.tokens[2 * BLOCK :]
        else:
            del self.place_to_sequence[sequence.place]

    def _pick(self, data: st.DataObject) -> Sequence:
        return self.place_to_sequence[data.draw(st.sampled_from(sorted(self.place_to_sequence)))]

    @precondition(lambda self: self.place_to_sequence)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        places = data.draw(st.permutations(sorted(self.place_to_sequence)))
        rows = []
        for place in places[: data.draw(st.integers(1, len(places)))]:
            sequence = self.place_to_sequence[place]
            start = data.draw(st.integers(0, len(sequence.tokens) - 1))
            num_tokens = data.draw(st.integers(1, min(len(sequence.tokens) - start, 20)))
            is_end = start + num_tokens == len(sequence.tokens)
            rows.append(
                PlannedRow(
                    sequence,
                    start,
                    num_tokens,
                    data.draw(st.integers(0, 2)),
                    is_pending=is_end and data.draw(st.booleans()),
                )
            )
        check_inputs(self.builder, tuple(rows))


TestTableMachine = TableMachine.TestCase


def check_inputs(builder: InputBuilder, rows: tuple[PlannedRow, ...]) -> None:
    inputs = builder.build(rows)
    builder.send()
    batch = builder.batch(inputs)
    token_ids, positions, slots, owners, ends = [], [], [], [], []
    for row in rows:
        for position in range(row.start, row.start + row.num_tokens):
            token_ids.append(row.sequence.tokens[position])
            positions.append(position)
            slots.append(row.sequence.table.slot(position))
            owners.append(row.sequence.place)
        if row.is_pending:
            token_ids[-1] = PENDING
        if row.num_draws:
            ends.append(len(token_ids) - 1)
    assert inputs.token_ids.tolist() == token_ids
    assert inputs.positions.tolist() == positions
    assert inputs.slots.tolist() == slots == batch.slots.tolist()
    assert inputs.ends.tolist() == ends
    assert (inputs.owners is not None) == any(row.is_pending for row in rows)
    if inputs.owners is not None:
        assert inputs.owners.tolist() == owners
    assert batch.context_lens == tuple(row.start + row.num_tokens for row in rows)
    assert [batch.query_len(i) for i in range(len(rows))] == [row.num_tokens for row in rows]
    on_device = DeviceBatch.of(batch)
    assert on_device.query_starts.tolist() == list(batch.query_starts)
    assert on_device.context_lens.tolist() == list(batch.context_lens)
    for row, table in zip(rows, batch.block_tables.tolist(), strict=True):
        assert table[: len(row.sequence.table.block_ids)] == row.sequence.table.block_ids


def test_padding_stands_for_no_sequence() -> None:
    builder = InputBuilder(LIMITS, BLOCK, CPU)
    sequence = make_sequence(1, 7)
    sequence.table.append([5, 9])
    row = PlannedRow(sequence, 6, 1, 1)
    inputs = builder.build((row,), 4)
    builder.send()
    assert inputs.token_ids.tolist() == [106, 0, 0, 0]
    assert inputs.positions.tolist() == [6, 0, 0, 0]
    assert inputs.slots.tolist() == [9 * BLOCK + 2, -1, -1, -1]
    assert inputs.context_lens.tolist() == [7, 0, 0, 0]
    assert inputs.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert builder.tables[1, :2].tolist() == [5, 9]
    empty = builder.build((), 4)
    for name in ("token_ids", "positions", "slots", "places", "query_starts", "context_lens"):
        assert getattr(empty, name).data_ptr() == getattr(inputs, name).data_ptr()
    assert empty.slots.tolist() == [-1] * 4


@given(
    st.lists(
        st.tuples(st.sampled_from([np.int32, np.int64, np.float32]), st.integers(0, 9)), max_size=9
    )
)
def test_what_is_staged_arrives(parts: list[tuple[type, int]]) -> None:
    staging = StagingBuffer(4096, CPU)
    numbers = np.random.default_rng(len(parts))
    for _ in range(2):
        staging.begin()
        arrays = [numbers.integers(0, 99, size).astype(kind) for kind, size in parts]
        tensors = [staging.put(array) for array in arrays]
        staging.flush()
        for array_, tensor in zip(arrays, tensors, strict=True):
            assert tensor.numpy().dtype == array_.dtype
            assert tensor.tolist() == array_.tolist()
