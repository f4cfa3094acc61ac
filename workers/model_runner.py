"""Carries a step plan out: tensors in, tokens out. Knows nothing of requests, radix trees or queues."""

from collections.abc import Iterator
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kvstore.kv_pool import KvPool
from workers.protocol import TokenLogprobs
from workers.sampling import Draw, likeliest, sample, score
from workers.step_plan import PlannedRow, RowResult, SampledToken, StepPlan


class CausalModel(Protocol):
    """What a runner needs of a model; `workers.weights.load_model` makes one."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, pool: KvPool
    ) -> Tensor:
        """int64 [num_tokens] twice → hidden states [num_tokens, hidden_size]; writes KV into the pool."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] → float32 [n, vocab_size]."""
        ...


class ModelRunner:
    """Runs plans of one model over one KV pool, on the pool's device."""

    def __init__(self, model: CausalModel, pool: KvPool, device: torch.device) -> None:
        self._model = model
        self._pool = pool
        self._device = device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[RowResult]:
        """One forward pass; for each row what it asks for."""
        if plan.copies:
            self._pool.copy_blocks([(copy.source, copy.target) for copy in plan.copies])
        if not plan.rows:
            return []
        token_ids, positions = self._inputs(plan.rows)
        hidden = self._model.forward(token_ids, positions, self._batch(plan.rows), self._pool)
        scores = [self._score(hidden, row, start) for row, start in _starts(plan.rows)]
        tokens = self._draw(hidden, plan.rows)
        return [RowResult(*each) for each in zip(tokens, scores, strict=True)]

    def _draw(self, hidden: Tensor, rows: tuple[PlannedRow, ...]) -> list[list[SampledToken]]:
        drawing = [row for row in rows if row.num_draws]
        if not drawing:
            return [[] for _ in rows]
        logits = self._model.logits(hidden[self._last_positions(rows)])
        draws = [
            Draw(i, row.sequence, row.sequence.index + k)
            for i, row in enumerate(drawing)
            if not row.is_beam
            for k in range(row.num_draws)
        ]
        beams = [(i, row.num_draws) for i, row in enumerate(drawing) if row.is_beam]
        sampled, offered = iter(sample(logits, draws)), iter(likeliest(logits, beams))
        return [
            next(offered) if row.is_beam and row.num_draws else list(islice(sampled, row.num_draws))
            for row in rows
        ]

    def _score(self, hidden: Tensor, row: PlannedRow, start: int) -> tuple[TokenLogprobs, ...]:
        """Of the prompt tokens that follow this row's positions; the logits of a chunk at a time."""
        if row.num_prompt_top is None:
            return ()
        sequence = row.sequence
        end = min(row.start + row.num_tokens, sequence.num_prompt_tokens - 1)
        following = sequence.tokens[row.start + 1 : end + 1].tolist()
        if not following:
            return ()
        logits = self._model.logits(hidden[start : start + len(following)])
        return score(logits, following, row.num_prompt_top)

    def _inputs(self, rows: tuple[PlannedRow, ...]) -> tuple[Tensor, Tensor]:
        token_ids: list[int] = []
        positions: list[int] = []
        for row in rows:
            end = row.start + row.num_tokens
            token_ids.extend(row.sequence.tokens[row.start : end])
            positions.extend(range(row.start, end))
        return (
            torch.tensor(token_ids, dtype=torch.int64, device=self._device),
            torch.tensor(positions, dtype=torch.int64, device=self._device),
        )

    def _batch(self, rows: tuple[PlannedRow, ...]) -> AttentionBatch:
        block_size = rows[0].sequence.table.block_size
        slots: list[int] = []
        query_starts = [0]
        for row in rows:
            table = row.sequence.table
            slots.extend(table.slot(p) for p in range(row.start, row.start + row.num_tokens))
            query_starts.append(query_starts[-1] + row.num_tokens)
        max_blocks = max(len(row.sequence.table.block_ids) for row in rows)
        tables = [
            row.sequence.table.block_ids + [0] * (max_blocks - len(row.sequence.table.block_ids))
            for row in rows
        ]
        return AttentionBatch(
            slots=torch.tensor(slots, dtype=torch.int64, device=self._device),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=self._device),
            query_starts=tuple(query_starts),
            context_lens=tuple(row.start + row.num_tokens for row in rows),
            block_size=block_size,
        )

    def _last_positions(self, rows: tuple[PlannedRow, ...]) -> Tensor:
        """Where in the batch the last token of each drawing row stands."""
        last = [start + row.num_tokens - 1 for row, start in _starts(rows) if row.num_draws]
        return torch.tensor(last, dtype=torch.int64, device=self._device)


def _starts(rows: tuple[PlannedRow, ...]) -> Iterator[tuple[PlannedRow, int]]:
    """Each row with where it begins in the batch."""
    start = 0
    for row in rows:
        yield row, start
        start += row.num_tokens
