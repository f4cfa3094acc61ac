"""From planned rows to the tensors of one forward pass."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.device_batch import DeviceBatch
from workers.block_tables import BlockTables, Ints
from workers.options import SchedulerOptions
from workers.staging import StagingBuffer
from workers.step_plan import PlannedRow

Rows = tuple[PlannedRow, ...]

# What a step puts into the staging buffer at most: a token, a row with its sampling, and table entries beyond
# which they travel on their own.
_TOKEN_BYTES = 32
_ROW_BYTES = 160
_MAX_STAGED_ENTRIES = 8192
_ENTRY_BYTES = 12
_SPARE_BYTES = 4096
# What padding is made of: token ids, positions, slots, places.
_FILLS = (0, 0, -1, 0)
# A token id that the host does not know yet: the sequence's last draw, still on the device.
PENDING = -1


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What a forward pass reads, on the device once the staging buffer is flushed.

    Attributes:
        token_ids, positions, slots: int64 [num_tokens]; a token id may be `PENDING`.
        places: int64 [num_rows].
        owners: int64 [num_tokens], the place of each token's sequence; None when no token is pending.
        ends: int64; where in the batch the last token of each row that draws stands.
        query_starts: int32 [num_rows + 1].
        context_lens: int32 [num_rows].
        host_query_starts, host_context_lens: the same numbers on the host.
        max_blocks: the longest table in use.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    places: Tensor
    owners: Tensor | None
    ends: Tensor
    query_starts: Tensor
    context_lens: Tensor
    host_query_starts: Ints
    host_context_lens: Ints
    max_blocks: int


class InputBuilder:
    """Makes each step's inputs in a few array operations, however long the contexts are.

    Args:
        limits: of the scheduler whose plans these are.
        block_size: slots in a block.
        device: of the model.

    Attributes:
        staging: through which the small arrays of a step travel; others may put theirs in between
            `build` and `send`.
        tables: int32 [max_num_seqs, max_blocks] on the device; a running sequence's blocks, by its place.
        block_size: slots in a block.
    """

    def __init__(self, limits: SchedulerOptions, block_size: int, device: torch.device) -> None:
        max_blocks = -(-limits.max_model_len // block_size) + 1
        num_bytes = (
            limits.max_num_batched_tokens * _TOKEN_BYTES
            + limits.max_num_seqs * _ROW_BYTES
            + _MAX_STAGED_ENTRIES * _ENTRY_BYTES
            + _SPARE_BYTES
        )
        self.staging = StagingBuffer(num_bytes, device)
        self.block_size = block_size
        self._host_tables = BlockTables(limits.max_num_seqs, max_blocks)
        self._is_shared = device.type == "cpu"
        host_rows = torch.from_numpy(self._host_tables.rows)
        self.tables: Tensor = host_rows if self._is_shared else host_rows.to(device)
        self._changed: tuple[Tensor, Tensor] | None = None

    def build(self, rows: Rows, num_padded: int | None = None) -> StepInputs:
        """Put the rows' arrays into the staging buffer, each at the same address for equal `num_padded`.

        Args:
            num_padded: pad decoding rows to so many, with rows that stand for no sequence.
        """
        self.staging.begin()
        cells = [(row.sequence.place, row.start, row.num_tokens) for row in rows]
        places, starts, num_tokens = np.array(cells, np.int64).reshape(-1, 3).T
        changes = self._follow(rows)
        query_starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(num_tokens, out=query_starts[1:])
        positions = _positions(starts, num_tokens, query_starts)
        owners = places if len(places) == len(positions) else np.repeat(places, num_tokens)
        arrays = [
            _token_ids(rows, len(positions)),
            positions,
            self._host_tables.slots(owners, positions, self.block_size),
            places,
        ]
        context_lens = starts + num_tokens
        ends = query_starts[1:][np.array([row.num_draws > 0 for row in rows], bool)] - 1
        if num_padded is not None:
            arrays = [_padded(a, num_padded, fill) for a, fill in zip(arrays, _FILLS, strict=True)]
            query_starts = np.arange(num_padded + 1)
            context_lens = _padded(context_lens, num_padded, 0)
        put = self.staging.put
        token_ids, positions_t, slots, places_t = map(put, arrays)
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions_t,
            slots=slots,
            places=places_t,
            query_starts=put(query_starts.astype(np.int32)),
            context_lens=put(context_lens.astype(np.int32)),
            owners=put(owners) if any(row.is_pending for row in rows) else None,
            ends=put(ends),
            host_query_starts=query_starts,
            host_context_lens=context_lens,
            max_blocks=max((len(row.sequence.table.block_ids) for row in rows), default=0),
        )
        self._stage_tables(changes)
        return inputs

    def _follow(self, rows: Rows) -> list[NDArray[np.int64]]:
        """Brings the host's tables up to date; which entries changed, as indices into the flattened rows."""
        width = self._host_tables.rows.shape[1]
        changes = []
        for row in rows:
            place, table = row.sequence.place, row.sequence.table
            start = self._host_tables.follow(place, table)
            if not self._is_shared and start < len(table.block_ids):
                first = place * width
                changes.append(np.arange(first + start, first + len(table.block_ids)))
        return changes

    def _stage_tables(self, changes: list[NDArray[np.int64]]) -> None:
        self._changed = None
        if not changes:
            return
        indices = np.concatenate(changes)
        block_ids = self._host_tables.rows.reshape(-1)[indices]
        if len(indices) <= _MAX_STAGED_ENTRIES:
            self._changed = self.staging.put(indices), self.staging.put(block_ids)
        else:  # many long prompts admitted at once
            device = self.tables.device
            self._changed = (
                torch.from_numpy(indices).to(device),
                torch.from_numpy(block_ids).to(device),
            )

    def send(self) -> None:
        """Bring all that was put in to the device, without waiting for it."""
        self.staging.flush()
        if self._changed is not None:
            indices, block_ids = self._changed
            self.tables.view(-1).index_copy_(0, indices, block_ids)

    def batch(self, inputs: StepInputs) -> AttentionBatch:
        """What attention reads; after `send`."""
        tables = self.tables[:, : inputs.max_blocks].index_select(0, inputs.places)
        query_lens = np.diff(inputs.host_query_starts)
        batch = AttentionBatch(
            slots=inputs.slots,
            block_tables=tables,
            query_starts=tuple(inputs.host_query_starts.tolist()),
            context_lens=tuple(inputs.host_context_lens.tolist()),
            block_size=self.block_size,
        )
        batch.memo[DeviceBatch] = DeviceBatch(
            slots=inputs.slots,
            block_tables=tables,
            query_starts=inputs.query_starts,
            context_lens=inputs.context_lens,
            max_query_len=int(query_lens.max()),
            max_context_len=int(inputs.host_context_lens.max()),
            block_size=self.block_size,
        )
        return batch


def _positions(starts: Ints, num_tokens: Ints, query_starts: Ints) -> Ints:
    """start, start + 1, … of each row, one row after another."""
    if len(starts) == query_starts[-1]:
        return starts
    offsets = np.repeat(starts - query_starts[:-1], num_tokens)
    positions: Ints = offsets + np.arange(query_starts[-1])
    return positions


def _token_ids(rows: Rows, num_tokens: int) -> Ints:
    if len(rows) == num_tokens:
        ids = [PENDING if r.is_pending else r.sequence.tokens[r.start] for r in rows]
        return np.array(ids, dtype=np.int64)
    parts = []
    for row in rows:
        known = np.frombuffer(row.sequence.tokens, dtype=np.uint32)
        part = known[row.start : row.start + row.num_tokens].astype(np.int64)
        if row.is_pending:
            part[-1] = PENDING
        parts.append(part)
    return np.concatenate(parts)


def _padded(array: Ints, length: int, fill: int) -> Ints:
    padded = np.full(length, fill, dtype=np.int64)
    padded[: len(array)] = array
    return padded
