"""From the service's outputs to an HTTP response, the same way for chats and completions."""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from router.fan_in import Tagged, fan_in
from router.http_api.disconnect import until_disconnect
from router.http_api.schemas import GenerationBody
from router.http_api.service_tier import served_tier
from router.http_api.shapes import Json, Shape, WholeChoice
from router.http_api.sse import EventStream
from router.http_api.usage import usage_body
from router.inference import InferenceService
from router.requests import Delta, Finished, InferenceRequest, Started, Usage
from router.tenancy import Tenant, key_from_headers
from router.validation import check_request
from workers.errors import InternalError, InvalidRequest


def authenticate(service: InferenceService, request: Request) -> Tenant:
    """The tenant whose key the request carries; raises Unauthenticated."""
    return service.tenants.resolve(key_of(request))


def key_of(request: Request) -> str | None:
    return key_from_headers(request.headers.get("authorization"), request.headers.get("x-api-key"))


# Which replica answered; of several prompts each one's, in the order in which they began.
REPLICA_HEADER = "x-pando-replica"


@dataclass(frozen=True, slots=True)
class Reply:
    """What to answer with: the endpoint's shape and what the client wants to see in it."""

    shape: Shape
    request_id: str
    created: int
    model: str
    n: int
    num_prompts: int
    shows_usage: bool
    shows_usage_always: bool
    service_tier: str | None


@dataclass(slots=True)
class _Progress:
    """What is known of the whole request so far."""

    fingerprint: str | None = None
    replica_ids: list[str] = field(default_factory=list)
    prompt_index_to_usage: dict[int, Usage] = field(default_factory=dict)

    @property
    def usage(self) -> Usage:
        return sum(self.prompt_index_to_usage.values(), Usage())

    def see(self, tagged: Tagged) -> None:
        self.prompt_index_to_usage[tagged.prompt_index] = tagged.output.usage
        if isinstance(tagged.output, Started):
            self.fingerprint = f"fp_{tagged.output.fingerprint[:12]}"
            if tagged.output.replica_id not in self.replica_ids:
                self.replica_ids.append(tagged.output.replica_id)

    @property
    def headers(self) -> dict[str, str]:
        return {REPLICA_HEADER: ",".join(self.replica_ids)} if self.replica_ids else {}


def make_reply(
    service: InferenceService,
    body: GenerationBody,
    request: Request,
    tenant: Tenant,
    shape: Shape,
    num_prompts: int,
) -> Reply:
    """Raises InvalidRequest for stream_options without a stream, ModelNotFound for a model not served here."""
    options = body.stream_options
    if options is not None and not body.wants_stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    shows_usage = bool(options and options.include_usage)
    return Reply(
        shape=shape,
        request_id=shape.id_prefix + request.state.request_id,
        created=int(time.time()),
        model=service.resolve_model(body.model),
        n=body.num_choices,
        num_prompts=num_prompts,
        shows_usage=shows_usage,
        shows_usage_always=bool(shows_usage and options and options.continuous_usage_stats),
        service_tier=served_tier(body.service_tier, tenant.min_priority),
    )


async def respond(
    service: InferenceService,
    request: Request,
    work: Sequence[InferenceRequest],
    tenant: Tenant,
    reply: Reply,
    *,
    is_stream: bool,
) -> Response:
    """Answer all prompts of one HTTP request.

    A streamed answer begins once a replica has begun, so that a refusal still has its own status.

    Raises:
        PandoError: the request was refused, or failed before the response began.
        ClientGone: the client left before the response began.
    """
    for one in work:
        # Before anything here is sized by n.
        check_request(one, service.options)
    outputs = fan_in([service.generate(one, tenant) for one in work])
    try:
        if not is_stream:
            return await until_disconnect(request, _whole(outputs, reply))
        first = await until_disconnect(request, _first(outputs))
    except BaseException:
        await outputs.aclose()
        raise
    progress = _Progress()
    progress.see(first)
    chunks = _chunks(first, outputs, reply, progress)
    return EventStream(chunks, outputs, service.metrics.count_error, progress.headers)


async def _first(outputs: AsyncGenerator[Tagged, None]) -> Tagged:
    return await anext(outputs)


async def _whole(outputs: AsyncGenerator[Tagged, None], reply: Reply) -> JSONResponse:
    progress = _Progress()
    choices = [WholeChoice() for _ in range(reply.num_prompts * reply.n)]
    async for tagged in outputs:
        progress.see(tagged)
        match tagged.output:
            case Delta(index=index, text=text, details=details):
                choice = choices[tagged.prompt_index * reply.n + index]
                choice.texts.append(text)
                choice.details.extend(details)
            case Finished(index=index) as finished:
                choices[tagged.prompt_index * reply.n + index].finished = finished
    if any(choice.finished is None for choice in choices):
        raise InternalError("the answer ended before all of its choices did")
    body = {
        **_envelope(reply, reply.shape.whole_object, progress),
        "choices": [reply.shape.whole(i, i // reply.n, c) for i, c in enumerate(choices)],
        "usage": usage_body(progress.usage),
    }
    return JSONResponse(body, headers=progress.headers)


async def _chunks(
    first: Tagged, outputs: AsyncGenerator[Tagged, None], reply: Reply, progress: _Progress
) -> AsyncGenerator[Json, None]:
    for chunk in _chunks_of(first, reply, progress):
        yield chunk
    async for tagged in outputs:
        for chunk in _chunks_of(tagged, reply, progress):
            yield chunk
    if reply.shows_usage:
        yield {
            **_envelope(reply, reply.shape.chunk_object, progress),
            "choices": [],
            "usage": usage_body(progress.usage),
        }


def _chunks_of(tagged: Tagged, reply: Reply, progress: _Progress) -> Iterator[Json]:
    progress.see(tagged)
    for choice in _choices_of(tagged, reply):
        chunk = {**_envelope(reply, reply.shape.chunk_object, progress), "choices": [choice]}
        if reply.shows_usage:
            chunk["usage"] = usage_body(progress.usage) if reply.shows_usage_always else None
        yield chunk


def _choices_of(tagged: Tagged, reply: Reply) -> Iterator[Json]:
    base = tagged.prompt_index * reply.n
    match tagged.output:
        case Started():
            for index in range(base, base + reply.n):
                choice = reply.shape.first(index, tagged.prompt_index)
                if choice is not None:
                    yield choice
        case Delta(index=index) as delta:
            yield reply.shape.delta(base + index, delta)
        case Finished(index=index) as finished:
            yield reply.shape.last(base + index, finished)


def _envelope(reply: Reply, object_name: str, progress: _Progress) -> Json:
    tier = {} if reply.service_tier is None else {"service_tier": reply.service_tier}
    return {
        "id": reply.request_id,
        "object": object_name,
        "created": reply.created,
        "model": reply.model,
        "system_fingerprint": progress.fingerprint,
        **tier,
    }
