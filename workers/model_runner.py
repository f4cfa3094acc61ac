"""Carries a step plan out: tensors in, tokens out. Knows nothing of requests, radix trees or queues."""

from typing import Protocol

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kvstore.kv_pool import KvPool
from workers.sampling import Draw, sample
from workers.step_plan import PlannedRow, SampledToken, StepPlan


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
    def run(self, plan: StepPlan) -> list[list[SampledToken]]:
        """One forward pass; for each row as many tokens as it asks for."""
        if plan.copies:
            self._pool.copy_blocks([(copy.source, copy.target) for copy in plan.copies])
        if not plan.rows:
            return []
        token_ids, positions = self._inputs(plan.rows)
        hidden = self._model.forward(token_ids, positions, self._batch(plan.rows), self._pool)
        drawing = [row for row in plan.rows if row.num_draws]
        if not drawing:
            return [[] for _ in plan.rows]
        logits = self._model.logits(hidden[self._last_positions(plan.rows)])
        draws = [
            Draw(i, row.sequence, row.sequence.index + k)
            for i, row in enumerate(drawing)
            for k in range(row.num_draws)
        ]
        sampled = iter(sample(logits, draws))
        return [[next(sampled) for _ in range(row.num_draws)] for row in plan.rows]

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
        last: list[int] = []
        end = 0
        for row in rows:
            end += row.num_tokens
            if row.num_draws:
                last.append(end - 1)
        return torch.tensor(last, dtype=torch.int64, device=self._device)
