"""The gRPC interface as plain functions: protocol messages in, protocol messages out, PandoErrors raised.

A server of any kind calls them from its own methods and hands errors to `set_error`.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import grpc

from router.inference import InferenceService
from router.proto import pando_pb2 as pb
from router.requests import (
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
from workers.errors import InvalidRequest, PandoError
from workers.protocol import FinishReason

ERROR_CODE_KEY = "pando-error-code"
RETRY_AFTER_KEY = "retry-after-ms"
Metadata = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]]

_reason_to_proto = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


class ErrorContext(Protocol):
    """What `grpc.aio.ServicerContext` and Ray Serve's context have in common."""

    def set_code(self, code: grpc.StatusCode) -> Any: ...
    def set_details(self, details: str) -> Any: ...
    def set_trailing_metadata(self, trailing_metadata: Any) -> Any: ...


class GrpcInference:
    """The calls of `pando.v1.Inference`."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def generate(
        self, request: pb.GenerateRequest, metadata: Metadata, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Answer one prompt; closing the generator cancels the request.

        Args:
            timeout_s: what is left of the client's deadline, when it set one.

        Raises:
            PandoError: when the request is refused or fails.
        """
        tenant = self._authenticate(metadata)
        work = _to_inference_request(request, self._service.options.max_messages, timeout_s)
        usage = Usage()
        try:
            async with aclosing(self._service.generate(work, tenant)) as outputs:
                async for output in outputs:
                    usage = output.usage
                    yield _to_response(output)
            yield pb.GenerateResponse(usage=_to_usage(usage))
        except PandoError as error:
            self._service.metrics.count_error(error.code)
            raise

    async def list_models(
        self, _request: pb.ListModelsRequest, metadata: Metadata
    ) -> pb.ListModelsResponse:
        """The models served here. Raises Unauthenticated, or Unavailable while no replica is known."""
        self._authenticate(metadata)
        max_model_len = self._service.info().max_model_len
        names = self._service.model_names()
        return pb.ListModelsResponse(
            models=[pb.Model(id=name, max_model_len=max_model_len) for name in names]
        )

    async def tokenize(
        self, request: pb.TokenizeRequest, metadata: Metadata
    ) -> pb.TokenizeResponse:
        """Token ids of a text or a chat. Raises PandoError."""
        self._authenticate(metadata)
        self._service.resolve_model(request.model or None)
        prompt = _to_prompt(request, self._service.options.max_messages)
        adds_special = not request.HasField("add_special_tokens") or request.add_special_tokens
        token_ids = await self._service.tokenize(prompt, add_special_tokens=adds_special)
        return pb.TokenizeResponse(token_ids=token_ids)

    def _authenticate(self, metadata: Metadata) -> Tenant:
        pairs = metadata.items() if isinstance(metadata, Mapping) else metadata
        # grpc hands keys over in lower case; values of keys that end in -bin are bytes.
        name_to_value = {name: value for name, value in pairs if isinstance(value, str)}
        key = key_from_headers(name_to_value.get("authorization"), name_to_value.get("x-api-key"))
        try:
            return self._service.tenants.resolve(key)
        except PandoError as error:
            self._service.metrics.count_error(error.code)
            raise


def set_error(context: ErrorContext, error: PandoError) -> None:
    """Put `error` on a call: status code, message, `pando-error-code`, `retry-after-ms`."""
    context.set_code(status_of(error).grpc_code)
    context.set_details(error.message)
    trailing = [(ERROR_CODE_KEY, error.code)]
    delay_s = retry_after_s(error)
    if delay_s is not None:
        trailing.append((RETRY_AFTER_KEY, str(round(delay_s * 1000))))
    context.set_trailing_metadata(tuple(trailing))


def _to_inference_request(
    request: pb.GenerateRequest, max_messages: int, timeout_s: float | None
) -> InferenceRequest:
    return InferenceRequest(
        model=request.model or None,
        prompt=_to_prompt(request, max_messages),
        sampling=_to_sampling(request.sampling),
        n=request.n if request.HasField("n") else 1,
        stop=tuple(request.stop),
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
            finished = pb.Finished(index=output.index, reason=reason, stop=output.stop)
            return pb.GenerateResponse(finished=finished)


def _to_choice(choice: TokenChoice) -> pb.TokenChoice:
    return pb.TokenChoice(token_id=choice.token_id, data=choice.data, logprob=choice.logprob)


def _to_usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_completion_tokens=usage.num_completion_tokens,
    )
