"""From logits to the next token.

Random numbers are counter-based: Philox keyed by (seed, sequence index), counted by position. A sequence that
was preempted, resumed or moved to another replica draws the same numbers again at the same positions, and
nothing depends on what shares its batch.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import dispatch
from workers.host_fetch import HostFetch
from workers.philox import uniforms
from workers.protocol import TokenLogprobs
from workers.sequence import Sequence
from workers.staging import StagingBuffer
from workers.step_plan import SampledToken

_WORD = (1 << 64) - 1
# The largest float32 below 1: a number rounded up to 1 would point behind the last token.
_BELOW_ONE = np.float32(1 - 2.0**-24)


class Draw(NamedTuple):
    """One token to draw: from logits row `row`, from random stream `stream` of the request's seed, to stand at `position`."""

    row: int
    sequence: Sequence
    stream: int
    position: int


@dataclass(frozen=True, eq=False)
class DrawInputs:
    """Draws as columns on the device.

    Attributes:
        draws: what they were made of.
        rows: int64 [num_draws], or None when each row of the logits is drawn from once, in order.
        places: int64 [num_draws]; of the sequences that draw.
        filters: temperature, top_k, top_p, min_p and a random number of each draw, [num_draws], as
            `kernels.dispatch.sample_tokens` takes them; None when all draws are greedy.
    """

    draws: SequenceOf[Draw]
    rows: Tensor | None
    places: Tensor
    filters: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None


@dataclass(frozen=True, eq=False)
class Drawn:
    """Tokens on the device, maybe still to be computed.

    Attributes:
        token_ids: int64 [num_draws].
        fetch: brings to the host: int64 [num_draws], a token id, or its complement where the logits held NaN
            or +inf (one broken request must not end its neighbours); and when a draw wants log-probabilities
            those of the tokens, float32 [num_draws], and of the likeliest ones values and ids [num_draws, k].
    """

    inputs: DrawInputs
    token_ids: Tensor
    fetch: HostFetch


def stage_draws(draws: SequenceOf[Draw], num_rows: int, staging: StagingBuffer) -> DrawInputs:
    """Put what `draw` needs into the staging buffer; `num_rows` is the logits'."""
    is_plain = len(draws) == num_rows and all(draw.row == i for i, draw in enumerate(draws))
    rows = None if is_plain else staging.put(np.array([draw.row for draw in draws], np.int64))
    places = staging.put(np.array([draw.sequence.place for draw in draws], np.int64))
    samplings = [draw.sequence.sampling for draw in draws]
    temperature = np.array([s.temperature for s in samplings], np.float32)
    if not temperature.any():
        return DrawInputs(draws, rows, places, None)
    filters = (
        staging.put(temperature),
        staging.put(np.array([s.top_k for s in samplings], np.int32)),
        staging.put(np.array([s.top_p for s in samplings], np.float32)),
        staging.put(np.array([s.min_p for s in samplings], np.float32)),
        staging.put(_random_numbers(draws)),
    )
    return DrawInputs(draws, rows, places, filters)


def _random_numbers(draws: SequenceOf[Draw]) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """float32 [num_draws] in [0, 1); greedy draws have no use for theirs."""
    seeds = np.array([draw.sequence.seed & _WORD for draw in draws], np.uint64)
    streams = np.array([draw.stream for draw in draws], np.uint64)
    positions = np.array([draw.position for draw in draws], np.uint64)
    return np.minimum(uniforms(seeds, streams, positions).astype(np.float32), _BELOW_ONE)


def draw(logits: Tensor, inputs: DrawInputs) -> Drawn:
    """Draw one token each, without waiting for it.

    Args:
        logits: float32 [num_rows, vocab_size], the model's own; not changed.
    """
    rows = logits if inputs.rows is None else logits.index_select(0, inputs.rows)
    token_ids = _token_ids(_adjusted(rows, inputs.draws), inputs)
    is_valid = torch.isfinite(rows.amax(dim=-1))
    signed = torch.where(is_valid, token_ids, ~token_ids)
    num_top = max((n for n in map(_num_top, inputs.draws) if n is not None), default=None)
    if num_top is None:
        return Drawn(inputs, token_ids, HostFetch([signed]))
    logprobs = rows.log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])[:, 0]
    values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]))
    return Drawn(inputs, token_ids, HostFetch([signed, chosen, values, ids]))


def _token_ids(rows: Tensor, inputs: DrawInputs) -> Tensor:
    if inputs.filters is None:
        return rows.argmax(dim=-1)
    return dispatch.sample_tokens(rows, *inputs.filters)


def _num_top(draw: Draw) -> int | None:
    return draw.sequence.sampling.logprobs


def finish(drawn: Drawn) -> list[SampledToken]:
    """The tokens, in the order of the draws; waits for the device."""
    signed, *scores = (tensor.tolist() for tensor in drawn.fetch.wait())
    if not scores:
        return [SampledToken(t) if t >= 0 else SampledToken(~t, is_valid=False) for t in signed]
    return [
        SampledToken(max(token_id, ~token_id), _logprobs(_num_top(draw), *score), token_id >= 0)
        for draw, token_id, *score in zip(drawn.inputs.draws, signed, *scores, strict=True)
    ]


def _logprobs(
    num_top: int | None, chosen: float, values: list[float], ids: list[int]
) -> TokenLogprobs | None:
    if num_top is None:
        return None
    return TokenLogprobs(chosen, tuple(zip(ids[:num_top], values[:num_top], strict=True)))


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


def _adjusted(rows: Tensor, draws: SequenceOf[Draw]) -> Tensor:
    """The rows with penalties, bias and minimum lengths; the rows themselves when nobody asks for any."""
    if not any(draw.sequence.adjusts_logits for draw in draws):
        return rows
    rows = rows.clone()
    for i, draw in enumerate(draws):
        if draw.sequence.adjusts_logits:
            _adjust(rows[i], draw.sequence)
    return rows


def _adjust(logits: Tensor, sequence: Sequence) -> None:
    """Penalties, bias and the minimum length, in place."""
    sampling = sequence.sampling
    _penalize(logits, sequence)
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        index = torch.tensor(ids, device=logits.device)
        logits.index_add_(0, index, torch.tensor(values, dtype=logits.dtype, device=logits.device))
    if sequence.num_output_tokens < sampling.min_tokens and sequence.stop_token_ids:
        logits[torch.tensor(sorted(sequence.stop_token_ids), device=logits.device)] = -torch.inf


def _penalize(logits: Tensor, sequence: Sequence) -> None:
    """Repetition counts prompt and output (CTRL, section 4.1); presence and frequency the output alone."""
    sampling = sequence.sampling
    if not sequence.has_penalty:
        return
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
