"""Carries a step plan out: tensors in, tokens out. Knows nothing of requests, radix trees or queues."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kvstore.kv_pool import KvPool
from workers.options import SchedulerOptions
from workers.protocol import TokenLogprobs
from workers.sampling import Draw, DrawInputs, Drawn, draw, finish, likeliest, score, stage_draws
from workers.step_inputs import PENDING, InputBuilder, Rows, StepInputs
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


@dataclass(frozen=True, eq=False)
class RunningStep:
    """A step that was launched. On a CUDA device it may still be running until `results` returns."""

    rows: Rows
    drawn: Drawn | None
    offered: list[list[SampledToken]]
    scores: list[tuple[TokenLogprobs, ...]]

    def results(self) -> list[RowResult]:
        """For each row what it asked for; waits for it."""
        sampled = iter([] if self.drawn is None else finish(self.drawn))
        offered = iter(self.offered)
        tokens = (
            next(offered) if row.is_beam and row.num_draws else list(islice(sampled, row.num_draws))
            for row in self.rows
        )
        return [RowResult(*each) for each in zip(tokens, self.scores, strict=True)]


class ModelRunner:
    """Runs plans of one model over one KV pool, on the pool's device.

    Args:
        limits: of the scheduler whose plans these are.
    """

    def __init__(
        self, model: CausalModel, pool: KvPool, device: torch.device, limits: SchedulerOptions
    ) -> None:
        self._model = model
        self._pool = pool
        self._device = device
        self._inputs = InputBuilder(limits, pool.layout.block_size, device)
        # The last token drawn for each place, so that the next step can begin before the host has read it.
        self._latest = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> RunningStep:
        """One forward pass and its draws, in the order of the launches."""
        if plan.copies:
            self._pool.copy_blocks([(copy.source, copy.target) for copy in plan.copies])
        if not plan.rows:
            return RunningStep((), None, [], [])
        drawing = [row for row in plan.rows if row.num_draws]
        inputs = self._inputs.build(plan.rows)
        draws = stage_draws(_draws(drawing), len(drawing), self._inputs.staging)
        self._inputs.send()
        hidden = self._forward(inputs)
        scores = [self._score(hidden, row, start) for row, start in _starts(plan.rows)]
        if not drawing:
            return RunningStep(plan.rows, None, [], scores)
        logits = self._model.logits(hidden.index_select(0, inputs.ends))
        return self._draw(logits, plan.rows, drawing, draws, scores)

    def _forward(self, inputs: StepInputs) -> Tensor:
        token_ids = inputs.token_ids
        if inputs.owners is not None:
            latest = self._latest.index_select(0, inputs.owners)
            token_ids = torch.where(token_ids == PENDING, latest, token_ids)
        batch = self._inputs.batch(inputs)
        return self._model.forward(token_ids, inputs.positions, batch, self._pool)

    def _draw(
        self,
        logits: Tensor,
        rows: Rows,
        drawing: list[PlannedRow],
        inputs: DrawInputs,
        scores: list[tuple[TokenLogprobs, ...]],
    ) -> RunningStep:
        drawn = None
        if inputs.draws:
            drawn = draw(logits, inputs)
            # Of a row about to be forked any draw may stay: nobody goes on from it before the host has read it.
            self._latest.index_copy_(0, inputs.places, drawn.token_ids)
        beams = [(i, row.num_draws) for i, row in enumerate(drawing) if row.is_beam]
        return RunningStep(rows, drawn, likeliest(logits, beams), scores)

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


def _draws(drawing: Sequence[PlannedRow]) -> list[Draw]:
    return [
        Draw(i, row.sequence, row.sequence.index + k, row.start + row.num_tokens)
        for i, row in enumerate(drawing)
        if not row.is_beam
        for k in range(row.num_draws)
    ]


def _starts(rows: Rows) -> Iterator[tuple[PlannedRow, int]]:
    """Each row with where it begins in the batch."""
    start = 0
    for row in rows:
        yield row, start
        start += row.num_tokens
