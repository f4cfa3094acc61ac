"""What one step shall do, and what came of it: the messages between scheduler, runner and engine.

Those made once for each sequence and step are named tuples, which cost a third of a frozen dataclass.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvstore.block_table import BlockCopy
from workers.protocol import EngineEvent, TokenLogprobs
from workers.sequence import Sequence


class PlannedRow(NamedTuple):
    """Compute positions start … start+num_tokens−1 of a sequence, then draw `num_draws` next tokens.

    `num_draws` is 0 while the prompt is not complete; n > 1 draws are for sequences about to be forked. With
    `is_beam` they are not drawn but the likeliest ones, best first, with the model's own log-probabilities.
    `num_prompt_top` asks for the log-probability of the prompt token that follows each of these positions, and
    of that many likeliest ones.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_draws: int
    is_beam: bool = False
    num_prompt_top: int | None = None


def planned_row(sequence: Sequence, num_tokens: int) -> PlannedRow:
    """The next `num_tokens` positions of a sequence, and its draws when these are the last ones."""
    is_complete = num_tokens == sequence.num_uncomputed_tokens
    return PlannedRow(
        sequence,
        sequence.num_computed_tokens,
        num_tokens,
        sequence.num_draws if is_complete else 0,
        sequence.group is not None,
        None if sequence.prompt_logprobs is None else sequence.sampling.prompt_logprobs,
    )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Copies first, then the rows, all in one forward pass. An empty plan has neither."""

    copies: tuple[BlockCopy, ...]
    rows: tuple[PlannedRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class SampledToken(NamedTuple):
    """A drawn token; `logprobs` when the request asked for them. `is_valid` False: the logits were not finite."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    is_valid: bool = True


class RowResult(NamedTuple):
    """What came of one row: its `num_draws` tokens, and the prompt's log-probabilities when they were asked for."""

    tokens: list[SampledToken]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class RequestEvent(NamedTuple):
    """An event and the request it belongs to."""

    request_id: str
    event: EngineEvent


@dataclass(slots=True)
class SchedulerCounters:
    """Since the engine began."""

    requests_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
