"""An honest fake of a model: its KV cache is one token id a slot, and attention is reading them back.

The next token is a digest of the whole context *as found through the block table*, so a wrong block, a missed
copy, a stale block or a lost preemption changes the output.
"""

from collections.abc import Sequence as SequenceOf
from hashlib import blake2b

from kvstore.prefix_hash import chain, pack_tokens, root_hash
from workers.beam_search import BeamSearch, FinishedBeam, Offer
from workers.protocol import (
    BeamParams,
    EngineEvent,
    GenerateRequest,
    ReplicaInfo,
    SamplingParams,
    TokenLogprobs,
    TokensEmitted,
)
from workers.step_plan import FinishedStep, PlannedRow, RowResult, SampledToken, StepPlan

VOCAB = 50
EMPTY = -1


def next_token(context: SequenceOf[int], index: int) -> int:
    data = repr((list(context), index)).encode()
    return int.from_bytes(blake2b(data, digest_size=4).digest(), "little") % VOCAB


def expected_output(prompt: SequenceOf[int], num_tokens: int, index: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, index))
    return tokens[len(prompt) :]


def offers(context: SequenceOf[int], count: int) -> list[Offer]:
    """What a beam with this context could go on with, likeliest first."""
    digest = blake2b(repr(list(context)).encode(), digest_size=2 * VOCAB // 2).digest()
    logprobs = [-1.0 - digest[t % len(digest)] / 16 - t * 1e-4 for t in range(VOCAB)]
    ranked = sorted(range(VOCAB), key=lambda t: -logprobs[t])
    return [Offer(t, logprobs[t]) for t in ranked[:count]]


def expected_beams(
    prompt: SequenceOf[int],
    params: BeamParams,
    max_tokens: int,
    n: int,
    stops: frozenset[int] = frozenset(),
) -> list[FinishedBeam]:
    """The search over whole contexts, without blocks."""
    search = BeamSearch(params, stops, max_tokens)
    outputs: list[list[int]] = [[]]
    while not search.is_done:
        rows = [offers([*prompt, *output], search.num_candidates) for output in outputs]
        survivors = search.advance(outputs, rows)
        outputs = [[*outputs[s.parent], s.token_id] for s in survivors]
    return search.results(n)


class SlotRunner:
    """Runs plans over a pool of token ids; every slot is EMPTY until written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [EMPTY] * (num_blocks * block_size)
        self.num_copies = 0
        self.num_computed_tokens = 0
        self._place_to_latest: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> FinishedStep:
        size = self.block_size
        for copy in plan.copies:
            source = self.slots[copy.source * size : (copy.source + 1) * size]
            self.slots[copy.target * size : (copy.target + 1) * size] = source
            self.num_copies += 1
        written: set[int] = set()
        for row in plan.rows:
            for position in range(row.start, row.start + row.num_tokens):
                slot = row.sequence.table.slot(position)
                assert slot not in written, "two sequences write one slot in one step"
                written.add(slot)
                self.slots[slot] = row.sequence.tokens[position]
                self.num_computed_tokens += 1
            if row.is_pending:
                self.slots[slot] = self._place_to_latest[row.sequence.place]
        results = [RowResult(self._draw(row)) for row in plan.rows]
        for row, result in zip(plan.rows, results, strict=True):
            if result.tokens:
                self._place_to_latest[row.sequence.place] = result.tokens[0].token_id
        return FinishedStep(results)

    def _draw(self, row: PlannedRow) -> list[SampledToken]:
        sequence, end = row.sequence, row.start + row.num_tokens
        context = [self.slots[sequence.table.slot(p)] for p in range(end)]
        if row.is_beam:
            return [
                SampledToken(offer.token_id, TokenLogprobs(offer.logprob, ()))
                for offer in offers(context, row.num_draws)
            ]
        return [SampledToken(next_token(context, sequence.index + k)) for k in range(row.num_draws)]


def make_info(num_blocks: int, block_size: int, max_model_len: int = 4096) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id="r0", epoch="e0", model="slots", fingerprint="f", block_size=block_size,
        num_blocks=num_blocks, kv_dtype="auto", kv_bytes_per_token=4, compute_dtype="int",
        device="cpu", max_model_len=max_model_len, vocab_size=VOCAB,
    )  # fmt: skip


def make_request(
    request_id: str,
    prompt: SequenceOf[int],
    max_tokens: int,
    *,
    n: int = 1,
    salt: bytes = b"t",
    block_size: int = 4,
    beam: BeamParams | None = None,
    priority: int = 0,
    **sampling: object,
) -> GenerateRequest:
    tokens = pack_tokens(prompt)
    return GenerateRequest(
        request_id=request_id,
        tokens=tokens,
        fingerprint="f",
        salt=salt,
        block_hashes=chain(root_hash("f", salt), tokens, block_size),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0, **sampling),  # type: ignore[arg-type]
        n=n,
        beam=beam,
        priority=priority,
    )


def outputs_of(events: SequenceOf[EngineEvent], n: int = 1) -> list[list[int]]:
    """The tokens of each of the n sequences, in order."""
    outputs: list[list[int]] = [[] for _ in range(n)]
    for event in events:
        if isinstance(event, TokensEmitted):
            outputs[event.index].extend(event.token_ids)
    return outputs
