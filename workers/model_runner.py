"""Carries a step plan out: tensors in, tokens out. Knows nothing of requests, radix trees or queues."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kvstore.kv_pool import KvPool
from workers.decode_graphs import Capture, DecodeGraphs
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
        capture: makes replays of decode steps; without it every step is launched operation by operation.
    """

    def __init__(
        self,
        model: CausalModel,
        pool: KvPool,
        device: torch.device,
        limits: SchedulerOptions,
        *,
        capture: Capture | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._device = device
        self._inputs = InputBuilder(limits, pool.layout.block_size, device)
        # The last token drawn for each place, so that the next step can begin before the host has read it.
        self._latest = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        self._graphs = None if capture is None else self._captured(capture, limits)

    @torch.inference_mode()
    def _captured(self, capture: Capture, limits: SchedulerOptions) -> DecodeGraphs:
        return DecodeGraphs(
            lambda inputs, batch: self._model.logits(self._forward(inputs, inputs.places, batch)),
            self._inputs,
            capture,
            limits.max_num_seqs,
            limits.max_model_len,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> RunningStep:
        """One forward pass and its draws, in the order of the launches."""
        if plan.copies:
            self._pool.copy_blocks([(copy.source, copy.target) for copy in plan.copies])
        if not plan.rows:
            return RunningStep((), None, [], [])
        drawing = [row for row in plan.rows if row.num_draws]
        size = self._graph_size(plan.rows)
        inputs = self._inputs.build(plan.rows, size)
        draws = stage_draws(_draws(drawing), len(drawing), self._inputs.staging)
        self._inputs.send()
        if self._graphs is not None and size is not None:
            logits = self._graphs.replay(size)[: len(drawing)]
            return self._draw(logits, plan.rows, drawing, draws, [()] * len(drawing))
        hidden = self._forward(inputs, inputs.owners, self._inputs.batch(inputs))
        scores = [self._score(hidden, row, start) for row, start in _starts(plan.rows)]
        if not drawing:
            return RunningStep(plan.rows, None, [], scores)
        logits = self._model.logits(hidden.index_select(0, inputs.ends))
        return self._draw(logits, plan.rows, drawing, draws, scores)

    def _graph_size(self, rows: Rows) -> int | None:
        """The size of the captured step that these rows fit; None: another kind of step."""
        is_decode = all(
            row.num_tokens == 1 and row.num_draws == 1 and row.num_prompt_top is None
            for row in rows
        )
        if self._graphs is None or not is_decode:
            return None
        return self._graphs.size_for(len(rows))

    def _forward(self, inputs: StepInputs, owners: Tensor | None, batch: AttentionBatch) -> Tensor:
        token_ids = inputs.token_ids
        if owners is not None:
            latest = self._latest.index_select(0, owners)
            token_ids = torch.where(token_ids == PENDING, latest, token_ids)
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
