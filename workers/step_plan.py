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
    of that many likeliest ones. `is_pending`: the last token to compute is what the sequence's last draw, in the
    step before, turns out to be.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_draws: int
    is_beam: bool = False
    num_prompt_top: int | None = None
    is_pending: bool = False


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
        is_complete and sequence.has_pending_token,
    )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Copies first, then the rows, all in one forward pass. An empty plan has neither."""

    copies: tuple[BlockCopy, ...]
    rows: tuple[PlannedRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def is_predictable(self) -> bool:
        """Whether, but for the tokens themselves, it is known what every sequence does next.

        Forks and beams depend on what is drawn, and penalties must have seen it; prompts that are scored
        are told apart for simplicity.
        """
        return all(
            row.num_draws <= 1
            and row.num_prompt_top is None
            and row.sequence.group is None
            and not row.sequence.has_penalty
            for row in self.rows
        )


class SampledToken(NamedTuple):
    """A drawn token; `logprobs` when the request asked for them. `is_valid` False: the logits were not finite."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    is_valid: bool = True


class RowResult(NamedTuple):
    """What came of one row: its `num_draws` tokens, and the prompt's log-probabilities when they were asked for."""

    tokens: list[SampledToken]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class FinishedStep(NamedTuple):
    """A step that had run by the time its launch returned."""

    rows: list[RowResult]

    def results(self) -> list[RowResult]:
        return self.rows


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
