"""OpenAI's endpoints and the tokenizer's."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from router.http_api.generation import authenticate, make_reply, respond
from router.http_api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.http_api.shapes import ChatShape, CompletionShape, Json
from router.http_api.unsupported import refuse_unsupported_chat, refuse_unsupported_completion
from router.inference import InferenceService
from router.requests import TextPrompt, TokensPrompt
from router.validation import check_token_ids


def make_generation_router(service: InferenceService) -> APIRouter:
    """/v1/chat/completions and /v1/completions."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        tenant = authenticate(service, request)
        refuse_unsupported_chat(body)
        shape = ChatShape(has_logprobs=bool(body.logprobs))
        reply = make_reply(service, body, request, tenant, shape, 1)
        prompt = body.to_prompt(service.options.max_messages)
        work = body.to_request(prompt, body.to_sampling())
        return await respond(service, request, [work], tenant, reply, is_stream=body.wants_stream)

    @router.post("/v1/completions", response_model=None)
    async def complete(body: CompletionBody, request: Request) -> Response:
        tenant = authenticate(service, request)
        refuse_unsupported_completion(body)
        prompts = body.to_prompts(service.options.max_prompts)
        echoes = [_text_of(service, prompt) for prompt in prompts] if body.echo else []
        shape = CompletionShape(has_logprobs=body.logprobs is not None, echoes=echoes)
        reply = make_reply(service, body, request, tenant, shape, len(prompts))
        sampling = body.to_sampling()
        default_max_tokens = service.options.default_completion_max_tokens
        work = [body.to_request(prompt, sampling, default_max_tokens) for prompt in prompts]
        return await respond(service, request, work, tenant, reply, is_stream=body.wants_stream)

    return router


def make_tokenizer_router(service: InferenceService) -> APIRouter:
    """/tokenize and /detokenize."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Json:
        authenticate(service, request)
        service.resolve_model(body.model)
        prompt = body.to_prompt(service.options.max_messages)
        tokens = await service.tokenize(prompt, add_special_tokens=body.add_special_tokens)
        return {
            "count": len(tokens),
            "max_model_len": service.info().max_model_len,
            "tokens": tokens,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> Json:
        authenticate(service, request)
        service.resolve_model(body.model)
        check_token_ids("tokens", body.tokens, service.info().vocab_size)
        return {"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return router


def _text_of(service: InferenceService, prompt: TextPrompt | TokensPrompt) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    check_token_ids("prompt", prompt.token_ids, service.info().vocab_size)
    return service.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
