"""A small tokenizer and an honest stand-in for the replicas, for tests of what stands before them."""

import asyncio
import hashlib
import math
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvstore.prefix_hash import split_hashes, unpack_tokens
from router.inference import InferenceService
from router.options import GatewayOptions, TenancyOptions
from router.tenancy import Tenants
from workers.errors import PandoError, Unavailable
from workers.protocol import (
    BeamParams,
    EngineEvent,
    FinishReason,
    GenerateRequest,
    ReplicaInfo,
    ReplicaReport,
    ReplicaStats,
    RequestFailed,
    RequestStarted,
    SequenceFinished,
    TokenLogprobs,
    TokensEmitted,
)
from workers.tokenizer import Tokenizer

MODEL = "toy/model"
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and the cat",
    "hello world, hello there, the world is wide",
    "你好世界 สวัสดี 😀 naïve café",
]


@lru_cache(maxsize=1)
def toy_tokenizer() -> Tokenizer:
    """Byte-level BPE of 400 tokens: any text can be written, most characters beyond ASCII take several."""
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS * 4, trainer)
    return Tokenizer(backend, CHAT_TEMPLATE, {"eos_token": "<|im_end|>"})


def toy_reply(request: GenerateRequest, index: int) -> list[int]:
    """What the toy model says: printable characters that depend on the prompt, and on the seed if sampled.

    Of beams no two are alike.
    """
    seed = request.tokens
    if request.beam is not None:
        seed += repr(index).encode()
    if request.sampling.temperature > 0:
        own = request.sampling.seed
        seed += repr((random.random() if own is None else own, index)).encode()
    digest = hashlib.blake2b(seed, digest_size=32).hexdigest()
    return toy_tokenizer().encode(digest)


def says(text: str) -> Callable[[GenerateRequest, int], list[int]]:
    """A model that always says `text`."""
    return lambda request, index: toy_tokenizer().encode(text)


@dataclass
class FakeBackend:
    """Replicas without a model: real events, a real prefix cache over block hashes, and a real EOS.

    Attributes:
        reply: the tokens that sequence or beam `index` would say before its EOS.
        token_logprob: the log-probability of a token, wherever it stands.
        chunk: how many tokens come in one batch of events.
        delay_s: how long each batch takes.
        fail_after: raise or send `failure` after this many batches.
        is_failure_an_event: send it as `RequestFailed` instead of raising it.
    """

    reply: Callable[[GenerateRequest, int], list[int]] = toy_reply
    token_logprob: Callable[[int], float] = lambda _: math.log(0.5)
    chunk: int = 3
    delay_s: float = 0.0
    fail_after: int | None = None
    failure: Exception = field(default_factory=lambda: Unavailable("gone"))
    is_failure_an_event: bool = False
    is_up: bool = True
    max_model_len: int = MAX_MODEL_LEN
    requests: list[GenerateRequest] = field(default_factory=list)
    num_open: int = 0
    num_cancelled: int = 0
    num_completed: int = 0
    _resident: set[bytes] = field(default_factory=set)

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[tuple[EngineEvent, ...], None]:
        self.requests.append(request)
        self.num_open += 1
        is_complete = False
        try:
            num_prompt = len(unpack_tokens(request.tokens))
            yield (RequestStarted("replica-0", "epoch-0", num_prompt, self._cached(request)),)
            batches = self._batches(request)
            for i, batch in enumerate(batches):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.fail_after is not None and i >= self.fail_after:
                    if not self.is_failure_an_event:
                        raise self.failure
                    assert isinstance(self.failure, PandoError)
                    yield (RequestFailed(self.failure.code, self.failure.message),)
                is_complete = i == len(batches) - 1
                if batch:
                    yield batch
        finally:
            self.num_open -= 1
            self.num_completed += is_complete
            self.num_cancelled += not is_complete

    def info(self) -> ReplicaInfo:
        if not self.is_up:
            raise Unavailable("no replica is up")
        return ReplicaInfo(
            replica_id="replica-0",
            epoch="epoch-0",
            model=MODEL,
            fingerprint="0123456789abcdef",
            block_size=BLOCK_SIZE,
            num_blocks=4096,
            kv_dtype="fp8",
            kv_bytes_per_token=64,
            compute_dtype="float32",
            device="cpu",
            max_model_len=self.max_model_len,
            vocab_size=toy_tokenizer().vocab_size,
        )

    async def reports(self) -> list[ReplicaReport]:
        if not self.is_up:
            return []
        stats = ReplicaStats(
            num_running=self.num_open,
            num_waiting=0,
            num_free_blocks=4000,
            num_cached_blocks=len(self._resident),
            num_used_blocks=96,
            prompt_tokens_total=7,
            cached_tokens_total=3,
            generation_tokens_total=5,
            preemptions_total=0,
            evicted_blocks_total=0,
            requests_total=len(self.requests),
            steps_total=11,
            digest=0,
            index_connected=True,
        )
        return [ReplicaReport(self.info(), stats)]

    async def status(self) -> dict[str, object]:
        return {"replicas": [self.info().replica_id]}

    def _cached(self, request: GenerateRequest) -> int:
        hashes = split_hashes(request.block_hashes)
        num_hits = 0
        while num_hits < len(hashes) and hashes[num_hits] in self._resident:
            num_hits += 1
        self._resident.update(hashes)
        num_prompt = len(unpack_tokens(request.tokens))
        return min(num_hits * BLOCK_SIZE, num_prompt - 1)

    def _batches(self, request: GenerateRequest) -> list[tuple[EngineEvent, ...]]:
        """Sequences take turns, `chunk` tokens at a time; a sequence's end comes with its last tokens."""
        if request.beam is not None:
            return self._beam_batches(request, request.beam)
        outputs = [self._output(request, i) for i in range(request.n)]
        longest = max(len(tokens) for tokens, _ in outputs)
        batches: list[tuple[EngineEvent, ...]] = []
        for start in range(0, max(longest, 1), self.chunk):
            events: list[EngineEvent] = []
            for index, (tokens, reason) in enumerate(outputs):
                piece = tuple(tokens[start : start + self.chunk])
                if piece:
                    events.append(TokensEmitted(index, piece, self._logprobs(piece, request)))
                if start <= max(len(tokens) - 1, 0) < start + self.chunk:
                    events.append(SequenceFinished(index, reason))
            batches.append(tuple(events))
        return batches

    def _beam_batches(
        self, request: GenerateRequest, beam: BeamParams
    ) -> list[tuple[EngineEvent, ...]]:
        """As long as the longest beam runs nothing is heard; then the n best of `width` come, best first."""
        outputs = [self._output(request, i) for i in range(beam.width)]
        scored = [(self._score(tokens, beam), tokens, reason) for tokens, reason in outputs]
        scored.sort(key=lambda entry: -entry[0])
        events: list[EngineEvent] = []
        for index, (score, tokens, reason) in enumerate(scored[: request.n]):
            if tokens:
                events.append(TokensEmitted(index, tuple(tokens)))
            events.append(SequenceFinished(index, reason, score))
        num_steps = max(len(tokens) for tokens, _ in outputs) // self.chunk
        return [*([()] * num_steps), tuple(events)]

    def _score(self, tokens: list[int], beam: BeamParams) -> float:
        return sum(map(self.token_logprob, tokens)) / max(len(tokens), 1) ** beam.length_penalty

    def _output(self, request: GenerateRequest, index: int) -> tuple[list[int], FinishReason]:
        sampling = request.sampling
        tokens = self.reply(request, index)
        for i, token_id in enumerate(tokens):
            if i >= sampling.min_tokens and token_id in sampling.stop_token_ids:
                tokens = tokens[:i]
                break
        if len(tokens) >= sampling.max_tokens:
            return tokens[: sampling.max_tokens], FinishReason.LENGTH
        return tokens, FinishReason.STOP

    def _logprobs(
        self, tokens: Sequence[int], request: GenerateRequest
    ) -> tuple[TokenLogprobs, ...] | None:
        """The others halve from each likeliest token to the next, the chosen one first."""
        count = request.sampling.logprobs
        if count is None:
            return None
        vocab_size = toy_tokenizer().vocab_size
        return tuple(
            TokenLogprobs(
                self.token_logprob(token_id),
                tuple(
                    ((token_id + k) % vocab_size, self.token_logprob(token_id) * (k + 1))
                    for k in range(count)
                ),
            )
            for token_id in tokens
        )


def make_service(
    backend: FakeBackend | None = None,
    options: GatewayOptions | None = None,
    tenancy: TenancyOptions | None = None,
) -> InferenceService:
    return InferenceService(
        backend or FakeBackend(),
        toy_tokenizer(),
        Tenants(tenancy or TenancyOptions()),
        options or GatewayOptions(),
    )
