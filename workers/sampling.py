"""From logits to the next token.

Random numbers are counter-based: Philox keyed by (seed, sequence index), counted by position. A sequence that
was preempted, resumed or moved to another replica draws the same numbers again at the same positions, and
nothing depends on what shares its batch.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.protocol import SamplingParams, TokenLogprobs
from workers.sequence import Sequence
from workers.step_plan import SampledToken


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to draw: from logits row `row`, as sequence `index` of the request."""

    row: int
    sequence: Sequence
    index: int


def sample(logits: Tensor, draws: SequenceOf[Draw]) -> list[SampledToken]:
    """Draw one token each.

    Args:
        logits: float32 [num_rows, vocab_size], the model's own; not changed.
        draws: in the order of the result; several may share a row.

    A row with NaN or +inf yields a token marked not valid: one broken request must not end its neighbours.
    """
    if not draws:
        return []
    rows = logits[
        torch.tensor([draw.row for draw in draws], device=logits.device)
    ]  # [num_draws, vocab_size]
    is_valid = torch.isfinite(rows.amax(dim=-1)).tolist()
    logprobs = _logprobs_rows(rows, draws)
    rows = torch.stack([_adjust(row, draw.sequence) for row, draw in zip(rows, draws, strict=True)])
    greedy = rows.argmax(dim=-1).tolist()
    sampled: list[SampledToken] = []
    for i, draw in enumerate(draws):
        token_id = greedy[i]
        if is_valid[i] and draw.sequence.sampling.temperature > 0:
            token_id = _draw(rows[i], draw)
        top = (
            None
            if logprobs is None
            else _logprobs_of(logprobs[i], token_id, draw.sequence.sampling)
        )
        sampled.append(SampledToken(token_id, top, is_valid[i]))
    return sampled


def likeliest(logits: Tensor, rows: SequenceOf[tuple[int, int]]) -> list[list[SampledToken]]:
    """For beams: of each (row of `logits`, count) the likeliest tokens with their log-probabilities, best first."""
    if not rows:
        return []
    index = torch.tensor([row for row, _ in rows], device=logits.device)
    logprobs = logits[index].log_softmax(dim=-1)  # [num_rows, vocab_size]
    is_valid = torch.isfinite(logprobs.amax(dim=-1)).tolist()
    count = min(max(count for _, count in rows), logits.shape[-1])
    values, ids = logprobs.topk(count)
    return [
        [
            SampledToken(token_id, TokenLogprobs(value, ()), is_valid[i])
            for token_id, value in zip(
                ids[i, :wanted].tolist(), values[i, :wanted].tolist(), strict=True
            )
        ]
        for i, (_, wanted) in enumerate(rows)
    ]


def score(
    logits: Tensor, next_token_ids: SequenceOf[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of given next tokens.

    Args:
        logits: float32 [num_positions, vocab_size].
        next_token_ids: one a position.
        num_top: how many of the likeliest tokens to name beside each.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(next_token_ids, device=logits.device)[:, None])[:, 0]
    values, ids = logprobs.topk(min(num_top, logits.shape[-1]))
    return tuple(
        TokenLogprobs(logprob, tuple(zip(top_ids, top, strict=True)))
        for logprob, top_ids, top in zip(
            chosen.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    )


def uniform(seed: int, index: int, position: int) -> float:
    """The random number in [0, 1) of one position of one sequence."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, index], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=position)
    return float(np.random.Generator(bits).random())


def filtered_probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Probabilities after temperature, top_k, top_p and min_p, in that order; float32 [vocab_size].

    top_p keeps the smallest set of tokens whose probabilities reach it; min_p is relative to the likeliest.
    """
    scaled = logits / sampling.temperature
    if sampling.top_k:
        kth = scaled.topk(min(sampling.top_k, scaled.numel())).values[-1]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True, stable=True)
        # A token stays while the mass before it is below top_p: the one that crosses the line is kept.
        is_out = ordered.cumsum(dim=-1) - ordered >= sampling.top_p
        is_out[0] = False
        probabilities = probabilities.index_fill(0, order[is_out], 0.0)
    if sampling.min_p > 0.0:
        floor = sampling.min_p * probabilities.amax()
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
    return probabilities


def _draw(logits: Tensor, draw: Draw) -> int:
    """Invert the cumulative distribution, in token-id order, at this position's random number."""
    probabilities = filtered_probabilities(logits, draw.sequence.sampling)
    cumulative = probabilities.double().cumsum(dim=-1)
    target = uniform(draw.sequence.seed, draw.index, draw.sequence.num_tokens) * cumulative[-1]
    token_id = int(torch.searchsorted(cumulative, target.reshape(1), right=True))
    return min(token_id, int(probabilities.nonzero()[-1]))


def _adjust(logits: Tensor, sequence: Sequence) -> Tensor:
    """Penalties, bias and the minimum length; the row itself when nothing of it is asked for."""
    sampling = sequence.sampling
    is_short = sequence.num_output_tokens < sampling.min_tokens and bool(sequence.stop_token_ids)
    has_penalty = (
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )
    if not (is_short or has_penalty or sampling.logit_bias):
        return logits
    logits = logits.clone()
    if has_penalty:
        _penalize(logits, sequence)
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        index = torch.tensor(ids, device=logits.device)
        logits.index_add_(0, index, torch.tensor(values, dtype=logits.dtype, device=logits.device))
    if is_short:
        logits[torch.tensor(sorted(sequence.stop_token_ids), device=logits.device)] = -torch.inf
    return logits


def _penalize(logits: Tensor, sequence: Sequence) -> None:
    """Repetition counts prompt and output (CTRL, section 4.1); presence and frequency the output alone."""
    sampling = sequence.sampling
    tokens = torch.tensor(sequence.tokens.tolist(), device=logits.device)
    if sampling.repetition_penalty != 1.0:
        seen = torch.unique(tokens)
        values = logits[seen]
        factor = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if sequence.num_output_tokens:
        output = tokens[sequence.num_prompt_tokens :]
        seen, counts = torch.unique(output, return_counts=True)
        logits[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts.to(
            logits.dtype
        )


def _logprobs_rows(rows: Tensor, draws: SequenceOf[Draw]) -> Tensor | None:
    if all(draw.sequence.sampling.logprobs is None for draw in draws):
        return None
    return rows.log_softmax(dim=-1)


def _logprobs_of(row: Tensor, token_id: int, sampling: SamplingParams) -> TokenLogprobs | None:
    if sampling.logprobs is None:
        return None
    top: tuple[tuple[int, float], ...] = ()
    if sampling.logprobs > 0:
        values, ids = row.topk(sampling.logprobs)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(row[token_id]), top)
