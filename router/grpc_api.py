"""The gRPC interface as plain functions: protocol messages in, protocol messages out, errors on the context.

A server of any kind calls them from its own methods.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import grpc

from router.inference import InferenceService
from router.loopback import address_of_peer, check_is_local
from router.proto import pando_pb2 as pb
from router.requests import (
    BeamFields,
    ChatMessage,
    ChatPrompt,
    Delta,
    Finished,
    InferenceRequest,
    Output,
    Prompt,
    SamplingFields,
    Started,
    TextPrompt,
    TokenChoice,
    TokensPrompt,
    Usage,
)
from router.status_codes import retry_after_s, status_of
from router.tenancy import Tenant, key_from_headers
from workers.errors import InternalError, InvalidRequest, PandoError
from workers.protocol import FinishReason

_log = logging.getLogger(__name__)

ERROR_CODE_KEY = "pando-error-code"
RETRY_AFTER_KEY = "retry-after-ms"

_reason_to_proto = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


_early_stopping_from_proto: dict[int, bool | None] = {
    pb.EARLY_STOPPING_UNSPECIFIED: False,
    pb.EARLY_STOPPING_FALSE: False,
    pb.EARLY_STOPPING_TRUE: True,
    pb.EARLY_STOPPING_NEVER: None,
}


class CallContext(Protocol):
    """What `grpc.aio.ServicerContext` and Ray Serve's context have in common."""

    def invocation_metadata(self) -> Any: ...
    def peer(self) -> str: ...
    def set_code(self, code: grpc.StatusCode) -> Any: ...
    def set_details(self, details: str) -> Any: ...
    def set_trailing_metadata(self, trailing_metadata: Any) -> Any: ...


class GrpcInference:
    """The calls of `pando.v1.Inference`.

    A call that fails puts its error on the context and then *returns*: a stream ends with a `failed`
    message, a unary call with an empty one, which gRPC does not deliver beside a status that is not OK.
    Raising would lose the trailing metadata under Ray Serve, whose proxy takes a context from a replica
    only together with a message, and from an exception only its code and details.
    """

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def generate(
        self, request: pb.GenerateRequest, context: CallContext, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Answer one prompt; closing the generator cancels the request.

        Args:
            timeout_s: what is left of the client's deadline, when it set one.
        """
        try:
            async with aclosing(self._answer(request, context, timeout_s)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            yield pb.GenerateResponse(failed=self._fail(context, error))

    async def list_models(
        self, _request: pb.ListModelsRequest, context: CallContext
    ) -> pb.ListModelsResponse:
        """The models served here."""
        try:
            self._authenticate(context)
            max_model_len = self._service.info().max_model_len
            names = self._service.model_names()
        except Exception as error:
            self._fail(context, error)
            return pb.ListModelsResponse()
        return pb.ListModelsResponse(
            models=[pb.Model(id=name, max_model_len=max_model_len) for name in names]
        )

    async def tokenize(
        self, request: pb.TokenizeRequest, context: CallContext
    ) -> pb.TokenizeResponse:
        """Token ids of a text or a chat."""
        try:
            self._authenticate(context)
            self._service.resolve_model(request.model or None)
            prompt = _to_prompt(request, self._service.options.max_messages)
            adds_special = not request.HasField("add_special_tokens") or request.add_special_tokens
            token_ids = await self._service.tokenize(prompt, add_special_tokens=adds_special)
        except Exception as error:
            self._fail(context, error)
            return pb.TokenizeResponse()
        return pb.TokenizeResponse(token_ids=token_ids)

    def is_client_allowed(self, context: CallContext) -> bool:
        """Whether the client may ask anything at all; when not, `context` says why."""
        try:
            self._check_client(context)
        except PandoError as error:
            self._fail(context, error)
            return False
        return True

    async def _answer(
        self, request: pb.GenerateRequest, context: CallContext, timeout_s: float | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        tenant = self._authenticate(context)
        work = _to_inference_request(request, self._service.options.max_messages, timeout_s)
        usage = Usage()
        async with aclosing(self._service.generate(work, tenant)) as outputs:
            async for output in outputs:
                usage = output.usage
                yield _to_response(output)
        yield pb.GenerateResponse(usage=_to_usage(usage))

    def _authenticate(self, context: CallContext) -> Tenant:
        self._check_client(context)
        # grpc hands keys over in lower case; values of keys that end in -bin are bytes.
        name_to_value = {
            name: value for name, value in context.invocation_metadata() if isinstance(value, str)
        }
        key = key_from_headers(name_to_value.get("authorization"), name_to_value.get("x-api-key"))
        return self._service.tenants.resolve(key)

    def _check_client(self, context: CallContext) -> None:
        """Without API keys, clients on this machine only. Raises PermissionDenied."""
        if not self._service.tenants.has_keys:
            check_is_local(address_of_peer(context.peer()))

    def _fail(self, context: CallContext, error: Exception) -> pb.Failed:
        if not isinstance(error, PandoError):
            _log.error("unexpected failure", exc_info=error)
            error = InternalError("an internal error; it has been logged")
        self._service.metrics.count_error(error.code)
        return set_error(context, error)


def set_error(context: CallContext, error: PandoError) -> pb.Failed:
    """Put `error` on a call: status code, message, `pando-error-code`, `retry-after-ms`; and as a message."""
    failed = pb.Failed(code=error.code, message=error.message, param=error.param)
    # A list: Ray Serve's context prepends a list of its own.
    trailing = [(ERROR_CODE_KEY, error.code)]
    delay_s = retry_after_s(error)
    if delay_s is not None:
        failed.retry_after_ms = round(delay_s * 1000)
        trailing.append((RETRY_AFTER_KEY, str(failed.retry_after_ms)))
    context.set_code(status_of(error).grpc_code)
    context.set_details(error.message)
    context.set_trailing_metadata(trailing)
    return failed


def _to_inference_request(
    request: pb.GenerateRequest, max_messages: int, timeout_s: float | None
) -> InferenceRequest:
    return InferenceRequest(
        model=request.model or None,
        prompt=_to_prompt(request, max_messages),
        sampling=_to_sampling(request.sampling),
        n=request.n if request.HasField("n") else 1,
        best_of=request.best_of if request.HasField("best_of") else None,
        beam=_to_beam(request.beam) if request.HasField("beam") else None,
        stop=tuple(request.stop),
        priority=request.priority,
        timeout_s=timeout_s,
    )


def _to_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, max_messages: int) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if isinstance(request, pb.GenerateRequest) and kind == "token_ids":
        return TokensPrompt(tuple(request.token_ids.ids))
    if kind == "messages":
        messages = request.messages.messages
        if not 1 <= len(messages) <= max_messages:
            raise InvalidRequest(
                f"messages has {len(messages)} entries, must have 1 to {max_messages}",
                param="messages",
            )
        return ChatPrompt(tuple(ChatMessage(m.role, m.content) for m in messages))
    raise InvalidRequest("no prompt: give text, messages or token_ids", param="prompt")


def _to_beam(beam: pb.Beam) -> BeamFields:
    if beam.early_stopping not in _early_stopping_from_proto:
        raise InvalidRequest(
            f"early_stopping is {beam.early_stopping}, which is no EarlyStopping",
            param="early_stopping",
        )
    return BeamFields(
        length_penalty=beam.length_penalty if beam.HasField("length_penalty") else 1.0,
        early_stopping=_early_stopping_from_proto[beam.early_stopping],
        name="beam",
    )


def _to_sampling(sampling: pb.Sampling) -> SamplingFields:
    given = {
        descriptor.name: value
        for descriptor, value in sampling.ListFields()
        if descriptor.name not in ("logit_bias", "stop_token_ids")
    }
    return SamplingFields(
        logit_bias=dict(sampling.logit_bias),
        stop_token_ids=tuple(sampling.stop_token_ids),
        **given,
    )


def _to_response(output: Output) -> pb.GenerateResponse:
    match output:
        case Started():
            return pb.GenerateResponse(
                started=pb.Started(
                    request_id=output.request_id,
                    model=output.model,
                    num_prompt_tokens=output.usage.num_prompt_tokens,
                    num_cached_tokens=output.usage.num_cached_tokens,
                    replica_id=output.replica_id,
                )
            )
        case Delta():
            details = [
                pb.TokenDetail(
                    chosen=_to_choice(detail.chosen), top=[_to_choice(c) for c in detail.top]
                )
                for detail in output.details
            ]
            return pb.GenerateResponse(
                delta=pb.Delta(index=output.index, text=output.text, details=details)
            )
        case Finished():
            reason = _reason_to_proto[output.reason]
            finished = pb.Finished(
                index=output.index, reason=reason, stop=output.stop, score=output.score
            )
            return pb.GenerateResponse(finished=finished)


def _to_choice(choice: TokenChoice) -> pb.TokenChoice:
    return pb.TokenChoice(token_id=choice.token_id, data=choice.data, logprob=choice.logprob)


def _to_usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_completion_tokens=usage.num_completion_tokens,
    )
