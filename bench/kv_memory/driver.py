"""The real engine, stepped by hand, over runners that compute nothing of a model."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvstore.prefix_hash import chain, pack_tokens, root_hash
from workers.beam_search import Offer
from workers.engine import Engine, LaunchedStep, Runner, Sink
from workers.options import SchedulerOptions
from workers.protocol import (
    BeamParams,
    EngineEvent,
    GenerateRequest,
    ReplicaInfo,
    ReplicaStats,
    RequestFailed,
    RequestStarted,
    SamplingParams,
    SequenceFinished,
    TokenLogprobs,
    TokensEmitted,
)
from workers.step_plan import FinishedStep, PlannedRow, RowResult, SampledToken, StepPlan

VOCAB_SIZE = 32_000
FINGERPRINT = "bench"
SALT = b"bench"
_EMPTY = 0xFFFFFFFF
_ONE_TOKEN = [SampledToken(7)]
# Mean step between the log-probabilities of neighbouring candidates: the likeliest has about half of the whole.
_MEAN_GAP = 0.7

Watcher = Callable[[StepPlan], None]


class NullRunner:
    """Draws one and the same token, at once."""

    def launch(self, plan: StepPlan) -> FinishedStep:
        return FinishedStep([RowResult(_ONE_TOKEN * row.num_draws) for row in plan.rows])


class SlotRunner:
    """An honest fake of a model: KV is one token id a slot, and the next token is a digest of the context as the
    block table finds it, so that a wrong block or a missed copy changes the output."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._slots: NDArray[np.uint32] = np.full((num_blocks, block_size), _EMPTY, dtype=np.uint32)

    def launch(self, plan: StepPlan) -> FinishedStep:
        if plan.copies:
            sources = self._slots[[copy.source for copy in plan.copies]]
            self._slots[[copy.target for copy in plan.copies]] = sources
        for row in plan.rows:
            self._write(row)
        return FinishedStep(
            [RowResult(self._draw(row) if row.num_draws else []) for row in plan.rows]
        )

    def _write(self, row: PlannedRow) -> None:
        size = self._slots.shape[1]
        positions = np.arange(row.start, row.start + row.num_tokens)
        blocks = np.array(row.sequence.table.block_ids)[positions // size]
        tokens = row.sequence.tokens[row.start : row.start + row.num_tokens]
        self._slots[blocks, positions % size] = np.frombuffer(tokens, dtype=np.uint32)

    def _draw(self, row: PlannedRow) -> list[SampledToken]:
        found = self._slots[row.sequence.table.block_ids].reshape(-1)[: row.start + row.num_tokens]
        context = found.tobytes()
        if row.is_beam:
            return [
                SampledToken(offer.token_id, TokenLogprobs(offer.logprob, ()))
                for offer in offers_after(context, row.num_draws)
            ]
        first = row.sequence.index
        return [SampledToken(token_after(context, first + k)) for k in range(row.num_draws)]


def token_after(context: bytes, index: int) -> int:
    """What sequence `index` of a request goes on with after these packed tokens."""
    digest = blake2b(context, digest_size=8, salt=index.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def offers_after(context: bytes, count: int) -> list[Offer]:
    """What a beam could go on with, likeliest first; probabilities fall geometrically, at random paces."""
    random = np.random.default_rng(int.from_bytes(blake2b(context, digest_size=8).digest()))
    falls = np.cumsum(random.exponential(_MEAN_GAP, count))
    logprobs = -falls - np.log(np.exp(-falls).sum())
    first = int(random.integers(VOCAB_SIZE))
    return [Offer((first + i) % VOCAB_SIZE, float(logprob)) for i, logprob in enumerate(logprobs)]


class WatchedRunner:
    """Shows every plan to `watch` before it runs, when tables hold what the step is going to write."""

    def __init__(self, inner: Runner, watch: Watcher) -> None:
        self._inner = inner
        self._watch = watch

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._watch(plan)
        return self._inner.launch(plan)


@dataclass(slots=True)
class Answer:
    """What a request was told so far; complete when the driver has come to rest."""

    num_sequences: int
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    outputs: list[list[int]] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    failure: str | None = None

    def take(self, events: tuple[EngineEvent, ...]) -> None:
        for event in events:
            match event:
                case RequestStarted():
                    self.num_prompt_tokens = event.num_prompt_tokens
                    self.num_cached_tokens = event.num_cached_tokens
                    self.outputs = [[] for _ in range(self.num_sequences)]
                case TokensEmitted():
                    self.outputs[event.index].extend(event.token_ids)
                case SequenceFinished():
                    self.scores.append(event.score)
                case RequestFailed():
                    self.failure = event.message


class EngineDriver:
    """Submits requests and steps the engine on the caller's thread.

    Args:
        runner: what the engine runs plans with; by default a `SlotRunner` over this pool.
        watch: sees every plan.
        eos_token_ids: a real model's.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        options: SchedulerOptions,
        *,
        runner: Runner | None = None,
        watch: Watcher | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        inner = SlotRunner(num_blocks, block_size) if runner is None else runner
        watched = inner if watch is None else WatchedRunner(inner, watch)
        info = _info(num_blocks, block_size, options.max_model_len)
        self._block_size = block_size
        self._num_submitted = 0
        self._open: list[Answer] = []
        self._engine = Engine(watched, info, options, eos_token_ids)

    @property
    def stats(self) -> ReplicaStats:
        return self._engine.report().stats

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        n: int = 1,
        beam: BeamParams | None = None,
        ignore_eos: bool = True,
        when_told: Callable[[], None] | None = None,
    ) -> Answer:
        """Queue a request; its answer fills while `run` steps.

        Args:
            when_told: called first whenever the request is told something.
        """
        tokens = pack_tokens(prompt)
        answer = Answer(n)
        request = GenerateRequest(
            request_id=str(self._num_submitted),
            tokens=tokens,
            fingerprint=FINGERPRINT,
            salt=SALT,
            block_hashes=chain(root_hash(FINGERPRINT, SALT), tokens, self._block_size),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, seed=0),
            n=n,
            beam=beam,
        )
        self._num_submitted += 1
        self._open.append(answer)
        self._engine.submit(
            request, answer.take if when_told is None else _after(when_told, answer.take)
        )
        return answer

    def run(self) -> None:
        """Step until nothing is left to do, then check every structure's invariants.

        Raises:
            RuntimeError: the engine failed one of the requests.
        """
        while self.step():
            pass
        self._engine.check_invariants()
        failure = next((each.failure for each in self._open if each.failure), None)
        if failure is not None:
            raise RuntimeError(f"the engine failed a request: {failure}")
        self._open.clear()

    def step(self) -> bool:
        """One step; False when nothing is left to do."""
        return self._engine.step()


def _after(first: Callable[[], None], sink: Sink) -> Sink:
    def take(events: tuple[EngineEvent, ...]) -> None:
        first()
        sink(events)

    return take


def _info(num_blocks: int, block_size: int, max_model_len: int) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id="bench", epoch="0", model="slots", fingerprint=FINGERPRINT,
        block_size=block_size, num_blocks=num_blocks, kv_dtype="auto", kv_bytes_per_token=4,
        compute_dtype="int", device="cpu", max_model_len=max_model_len, vocab_size=VOCAB_SIZE,
    )  # fmt: skip


def random_tokens(random: np.random.Generator, count: int) -> "array[int]":
    """Token ids that share no prefix with any others."""
    return array("I", random.integers(VOCAB_SIZE, size=count, dtype=np.uint32).tobytes())
