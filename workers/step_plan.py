"""What one step shall do, and what came of it: the messages between scheduler and runner."""

from dataclasses import dataclass

from kvstore.block_table import BlockCopy
from workers.protocol import TokenLogprobs
from workers.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """Compute positions start … start+num_tokens−1 of a sequence, then draw `num_draws` next tokens.

    `num_draws` is 0 while the prompt is not complete; n > 1 draws are for sequences about to be forked.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_draws: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Copies first, then the rows, all in one forward pass. An empty plan has neither."""

    copies: tuple[BlockCopy, ...]
    rows: tuple[PlannedRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A drawn token; `logprobs` when the request asked for them. `is_valid` False: the logits were not finite."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    is_valid: bool = True
