"""One token stream and where it stands."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.block_table import BlockTable
from kvstore.prefix_hash import HASH_BYTES, TOKEN_BYTES, extend, root_hash, unpack_tokens
from kvstore.radix_messages import PartialBlock
from kvstore.radix_node import RadixNode
from workers.beam_search import BeamSearch, Survivor
from workers.protocol import FinishReason, GenerateRequest, SamplingParams, TokenLogprobs


class SequenceState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The running beams of one request, in the order of the search's last survivors; at first the bare prompt.

    Beams step together. After a preemption each is computed up to its last token, and the group goes on when
    it is level again.
    """

    search: BeamSearch
    beams: "list[Sequence]" = field(default_factory=list)
    num_made: int = 1

    @property
    def is_level(self) -> bool:
        """Whether the next step can be taken by all beams at once. A single beam has nobody to wait for."""
        if len(self.beams) == 1:
            return self.beams[0].state is SequenceState.RUNNING
        return all(
            beam.state is SequenceState.RUNNING and beam.num_uncomputed_tokens == 1
            for beam in self.beams
        )

    @property
    def leader(self) -> "Sequence":
        """The member at which the whole group is planned; one of them must be running."""
        return next(beam for beam in self.beams if beam.state is SequenceState.RUNNING)

    def childless(self, survivors: "list[Survivor]") -> "list[Sequence]":
        """The beams that no survivor goes on from."""
        parents = {survivor.parent for survivor in survivors}
        return [beam for i, beam in enumerate(self.beams) if i not in parents]


@dataclass(slots=True, eq=False)
class Sequence:
    """The prompt and what was generated after it.

        tokens     |<- num_prompt_tokens ->|<- generated ->|
        KV         |<- num_computed_tokens ->| the rest is still to be computed

    Attributes:
        index: which of the request's sequences this is.
        tokens: prompt and output; survives preemption, when only KV is lost.
        seed: drives the counter-based random numbers; the position is the counter.
        priority, arrival: lower is served first.
        num_draws: sequences to make when the prompt is complete (n for the first one, 1 for the others).
        group: the beams this one belongs to, if it is a beam.
        hashes: chained hashes of the full blocks, concatenated, as far as they are known.
        num_announced_blocks: blocks up to this one were announced to `PendingPrefixes`.
        prompt_logprobs: those of the prompt's tokens computed so far, until they were told; None when not wanted.
        path_end: where in the radix tree its sealed blocks end, as far as that is known.
        has_pending_token: the last of `tokens` is still being drawn; what stands there means nothing yet.
        place: a number below `max_num_seqs` that no other running sequence has; -1 while it does not run.
        has_penalty: what is drawn depends on which tokens were drawn before, beyond the model's own memory.
        adjusts_logits: the logits are changed before anything is drawn from them.
        partial: the head of a known block that goes on where the table ends, until it is copied.
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
    priority: int = 0
    arrival: int = 0
    num_draws: int = 1
    group: BeamGroup | None = None
    hashes: bytearray = field(default_factory=bytearray)
    num_computed_tokens: int = 0
    num_sealed_blocks: int = 0
    num_announced_blocks: int = 0
    partial: PartialBlock | None = None
    path_end: RadixNode | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    has_looked_up: bool = False
    has_started: bool = False
    has_pending_token: bool = False
    place: int = -1
    state: SequenceState = SequenceState.WAITING
    has_penalty: bool = field(init=False)
    adjusts_logits: bool = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.sampling
        self.has_penalty = bool(
            sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.repetition_penalty != 1.0
        )
        has_minimum = sampling.min_tokens > 0 and bool(self.stop_token_ids)
        self.adjusts_logits = self.has_penalty or has_minimum or bool(sampling.logit_bias)

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.priority, self.arrival, self.index)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.tokens) - self.num_computed_tokens

    @property
    def output(self) -> "array[int]":
        return self.tokens[self.num_prompt_tokens :]

    @property
    def unit(self) -> "list[Sequence]":
        """The sequences that can only be preempted together: a group's beams, or this one alone."""
        return [self] if self.group is None else self.group.beams

    def add_pending_token(self) -> None:
        """Stand in for the token that is being drawn."""
        self.tokens.append(0)
        self.has_pending_token = True

    def forget_pending_token(self) -> None:
        """The token is known now, or will be drawn again."""
        if self.has_pending_token:
            self.tokens.pop()
            self.has_pending_token = False

    def is_full(self, max_model_len: int) -> bool:
        """Whether no further token may follow those that are there, a pending one included."""
        is_at_length = self.num_output_tokens >= self.sampling.max_tokens
        return is_at_length or self.num_tokens >= max_model_len

    def packed(self, first: int, end: int) -> bytes:
        """Tokens first … end−1, packed."""
        return self.tokens[first:end].tobytes()

    def hashes_of(self, first: int, end: int) -> bytes:
        """Chained hashes of full blocks first … end−1, concatenated; the chain is extended where it is short."""
        block_size = self.table.block_size
        known = len(self.hashes) // HASH_BYTES
        for i in range(known, end):
            parent = bytes(self.hashes[-HASH_BYTES:]) or self.root
            block = self.tokens[i * block_size : (i + 1) * block_size].tobytes()
            assert len(block) == block_size * TOKEN_BYTES
            self.hashes += extend(parent, block)
        return bytes(self.hashes[first * HASH_BYTES : end * HASH_BYTES])

    def finish_reason(self, token_id: int, max_model_len: int) -> FinishReason | None:
        """Whether drawing `token_id` next ends the sequence (the token not yet appended)."""
        if token_id in self.stop_token_ids and self.num_output_tokens >= self.sampling.min_tokens:
            return FinishReason.STOP
        if self.num_output_tokens + 1 >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        if self.num_tokens + 1 >= max_model_len:
            return FinishReason.LENGTH
        return None


def make_sequence(
    request: GenerateRequest,
    *,
    fingerprint: str,
    block_size: int,
    seed: int,
    eos_token_ids: frozenset[int],
    arrival: int,
) -> Sequence:
    """The first sequence of a request, from which its others are forked.

    Args:
        fingerprint: the replica's own; hashes made under another one are not taken over.
        arrival: counts up from request to request.
    """
    tokens = array("I", unpack_tokens(request.tokens))
    sampling = request.sampling
    stop_token_ids = frozenset(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_token_ids |= eos_token_ids
    sequence = Sequence(
        request_id=request.request_id,
        index=0,
        root=root_hash(fingerprint, request.salt),
        tokens=tokens,
        num_prompt_tokens=len(tokens),
        sampling=sampling,
        seed=seed,
        stop_token_ids=stop_token_ids,
        table=BlockTable(block_size),
        priority=request.priority,
        arrival=arrival,
        num_draws=request.n,
    )
    num_hash_bytes = len(tokens) // block_size * HASH_BYTES
    if request.fingerprint == fingerprint and len(request.block_hashes) == num_hash_bytes:
        sequence.hashes = bytearray(request.block_hashes)
    if sampling.prompt_logprobs is not None:
        sequence.prompt_logprobs = []
    if request.beam is not None:
        search = BeamSearch(request.beam, stop_token_ids, sampling.max_tokens, sampling.min_tokens)
        sequence.group = BeamGroup(search, [sequence])
        sequence.num_draws = search.num_candidates
    return sequence
