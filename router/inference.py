"""The service behind both protocols: a checked, tokenized, hashed request in; text as it grows out."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass

from kvstore import prefix_hash
from router.answer import Answer
from router.backend import Backend
from router.best_of import BestOf
from router.detokenizer import SequenceText
from router.metrics import GatewayMetrics, RequestTimer
from router.options import GatewayOptions
from router.requests import (
    ChatPrompt,
    InferenceRequest,
    Output,
    Prompt,
    TextPrompt,
    TokensPrompt,
)
from router.tenancy import Tenant, Tenants
from router.validation import (
    beam_params,
    check_prompt_length,
    check_request,
    check_token_ids,
    sampling_params,
    shown,
)
from workers.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PandoError,
    ReplicaLost,
)
from workers.protocol import EngineEvent, GenerateRequest, ReplicaInfo
from workers.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

# From here on tokenizing takes milliseconds, and would hold up every other stream of this process.
_LONG_TEXT_CHARS = 16_384


@dataclass(frozen=True, slots=True)
class _Prepared:
    message: GenerateRequest
    answer: Answer
    best_of: BestOf | None

    def outputs_of(self, events: Sequence[EngineEvent]) -> Iterable[Output]:
        outputs = self.answer.consume(events)
        return outputs if self.best_of is None else self.best_of.consume(outputs)


class InferenceService:
    """All that a Gateway does for a request between its two protocols and the replicas.

    Args:
        clock: seconds, monotonic; for metrics only.
        new_id: makes request ids that are unique in the cluster.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        tenants: Tenants,
        options: GatewayOptions,
        *,
        metrics: GatewayMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.tenants = tenants
        self.options = options
        self.metrics = metrics or GatewayMetrics(options.max_metric_tenants)
        self._clock = clock
        self._new_id = new_id
        self._num_in_flight = 0

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def info(self) -> ReplicaInfo:
        """As `Backend.info`; raises Unavailable while no replica is known."""
        return self.backend.info()

    def model_names(self) -> tuple[str, ...]:
        """What clients may call the model; raises Unavailable while only a replica would know it."""
        return self.options.served_model_names or (self.info().model,)

    def resolve_model(self, name: str | None) -> str:
        """The name to answer under; raises ModelNotFound for a model that is not served here."""
        names = self.model_names()
        if name is None:
            return names[0]
        if name not in names:
            raise ModelNotFound(
                f"the model {shown(name)} is not served here; served: {', '.join(names)}",
                param="model",
            )
        return name

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `prompt`, off the event loop when it is long. Raises InvalidRequest."""
        match prompt:
            case TokensPrompt():
                check_token_ids("prompt", prompt.token_ids, self.info().vocab_size)
                return list(prompt.token_ids)
            case TextPrompt():
                num_chars = len(prompt.text)
            case ChatPrompt():
                num_chars = sum(len(message.content) for message in prompt.messages)
        if num_chars < _LONG_TEXT_CHARS:
            return self._encode(prompt, add_special_tokens)
        return await asyncio.to_thread(self._encode, prompt, add_special_tokens)

    async def generate(
        self, request: InferenceRequest, tenant: Tenant
    ) -> AsyncGenerator[Output, None]:
        """Answer one prompt.

        Nothing happens before the first output is asked for. The caller must close the generator on every
        path; closing it early cancels the request on its replica and frees its place here.

        Raises:
            PandoError: before the first output when the request is refused, later when it fails.
        """
        with self.metrics.track(tenant.id, self._clock) as timer:
            model = self.resolve_model(request.model)
            check_request(request, self.options)
            with self._place():
                # One deadline for all of it, kept by the loop's own clock.
                timeout_s = min(request.timeout_s or float("inf"), self.options.request_timeout_s)
                deadline = asyncio.get_running_loop().time() + timeout_s
                prepared = await self._prepare(request, tenant, model)
                async with aclosing(self._run(prepared, deadline, timer)) as outputs:
                    async for output in outputs:
                        yield output

    async def _run(
        self, prepared: _Prepared, deadline: float, timer: RequestTimer
    ) -> AsyncGenerator[Output, None]:
        answer = prepared.answer
        events = self.backend.generate(prepared.message)
        try:
            while not answer.is_finished:
                for output in prepared.outputs_of(await _next_events(events, deadline)):
                    yield output
                timer.observe(answer.usage)
        finally:
            await events.aclose()

    async def _prepare(self, request: InferenceRequest, tenant: Tenant, model: str) -> _Prepared:
        info = self.info()
        param = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
        token_ids = await self.tokenize(request.prompt)
        check_prompt_length(len(token_ids), info, param)
        sampling = sampling_params(request, len(token_ids), info, self.options)
        tokens = prefix_hash.pack_tokens(token_ids)
        root = prefix_hash.root_hash(info.fingerprint, tenant.salt)
        message = GenerateRequest(
            request_id=self._new_id(),
            tokens=tokens,
            fingerprint=info.fingerprint,
            salt=tenant.salt,
            block_hashes=prefix_hash.chain(root, tokens, info.block_size),
            sampling=sampling,
            n=request.num_computed if request.is_ranked else request.n,
            beam=beam_params(request),
            priority=max(request.priority, tenant.min_priority),
            tenant=tenant.id,
        )
        return _Prepared(
            message,
            self._answer(request, message, model, info, token_ids),
            _best_of(request),
        )

    def _answer(
        self,
        request: InferenceRequest,
        message: GenerateRequest,
        model: str,
        info: ReplicaInfo,
        token_ids: list[int],
    ) -> Answer:
        texts = [
            SequenceText(
                self.tokenizer.detokenizer(token_ids),
                request.stop,
                message.sampling.min_tokens,
                self.tokenizer.token_bytes,
            )
            for _ in range(message.n)
        ]
        is_whole = message.beam is not None
        return Answer(message.request_id, model, info, texts, is_whole=is_whole)

    def _encode(self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool) -> list[int]:
        try:
            if isinstance(prompt, ChatPrompt):
                return self.tokenizer.render_chat(
                    [asdict(m) for m in prompt.messages],
                    allow_special_tokens=self.options.allow_special_tokens_in_content,
                )
            return self.tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens)
        except InvalidRequest as error:
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            raise InvalidRequest(error.message, param=param) from error

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Hold one of `max_in_flight` places; raises Overloaded when all are taken."""
        if self._num_in_flight >= self.options.max_in_flight:
            raise Overloaded(
                f"{self._num_in_flight} requests are in work here, which is the limit",
                retry_after_s=self.options.retry_after_s,
            )
        self._num_in_flight += 1
        self.metrics.set_in_flight(self._num_in_flight)
        try:
            yield
        finally:
            self._num_in_flight -= 1
            self.metrics.set_in_flight(self._num_in_flight)


def _best_of(request: InferenceRequest) -> BestOf | None:
    if not request.is_ranked:
        return None
    shows_details = request.sampling.logprobs is not None
    return BestOf(request.num_computed, request.n, shows_details=shows_details)


async def _next_events(
    events: AsyncGenerator[tuple[EngineEvent, ...], None], deadline: float
) -> Sequence[EngineEvent]:
    try:
        async with asyncio.timeout_at(deadline):
            return await anext(events)
    except StopAsyncIteration as error:
        raise ReplicaLost("the replica went away before the answer was complete") from error
    except TimeoutError as error:
        raise DeadlineExceeded("the request's time is over") from error
    except PandoError:
        raise
    except Exception as error:
        _log.exception("the backend failed in a way it does not document")
        raise InternalError("an internal error; it has been logged") from error
