"""One token stream and where it stands."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.block_table import BlockTable
from kvstore.prefix_hash import HASH_BYTES, TOKEN_BYTES, extend
from workers.protocol import FinishReason, SamplingParams


class SequenceState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """The prompt and what was generated after it.

        tokens     |<- num_prompt_tokens ->|<- generated ->|
        KV         |<- num_computed_tokens ->| the rest is still to be computed

    Attributes:
        index: which of the request's n this is.
        tokens: prompt and output; survives preemption, when only KV is lost.
        num_draws: sequences to make when the prompt is complete (n for the first one, 1 for the others).
        hashes: chained hashes of the sealed blocks, concatenated; for a fresh request those of the prompt
            that the Gateway computed.
        seed: drives the counter-based random numbers; the position is the counter.
    """

    request_id: str
    index: int
    root: bytes
    tokens: "array[int]"
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    table: BlockTable
    num_draws: int = 1
    hashes: bytearray = field(default_factory=bytearray)
    num_computed_tokens: int = 0
    num_sealed_blocks: int = 0
    has_started: bool = False
    state: SequenceState = SequenceState.WAITING
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.tokens) - self.num_computed_tokens

    def packed(self, num_tokens: int) -> bytes:
        """The first `num_tokens` tokens, packed."""
        return self.tokens[:num_tokens].tobytes()

    def hashes_of(self, num_blocks: int) -> bytes:
        """Chained hashes of the first `num_blocks` full blocks, extending the chain where it is short."""
        block_size = self.table.block_size
        known = len(self.hashes) // HASH_BYTES
        for i in range(known, num_blocks):
            parent = bytes(self.hashes[-HASH_BYTES:]) or self.root
            block = self.tokens[i * block_size : (i + 1) * block_size].tobytes()
            assert len(block) == block_size * TOKEN_BYTES
            self.hashes += extend(parent, block)
        return bytes(self.hashes[: num_blocks * HASH_BYTES])

    def finish_reason(self, token_id: int, max_model_len: int) -> FinishReason | None:
        """Whether drawing `token_id` next ends the sequence (the token not yet appended)."""
        if token_id in self.stop_token_ids and self.num_output_tokens >= self.sampling.min_tokens:
            return FinishReason.STOP
        if self.num_output_tokens + 1 >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        if self.num_tokens + 1 >= max_model_len:
            return FinishReason.LENGTH
        return None
