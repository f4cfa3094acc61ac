"""The gRPC interface through a real server and a real channel on a loopback port."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from edge_fakes import MAX_MODEL_LEN, MODEL, FakeBackend, make_service, says, toy_tokenizer
from pydantic import SecretStr

from router.grpc_api import GrpcInference
from router.inference import InferenceService
from router.options import GatewayOptions, TenancyOptions, TenantKey
from router.proto import pando_pb2 as pb
from router.proto import pando_pb2_grpc as pb_grpc
from workers.errors import ReplicaLost

TENANCY = TenancyOptions(
    secret=SecretStr("s" * 16), keys=(TenantKey(tenant="a", key=SecretStr("key-a")),)
)
Stub = Any
Scenario = Callable[[Stub], Awaitable[None]]


class Servicer(pb_grpc.InferenceServicer):
    """As a Gateway's methods: they call the adaptor, which puts its errors on the call."""

    def __init__(self, service: InferenceService) -> None:
        self._calls = GrpcInference(service)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override] # noqa: N802
        async with aclosing(
            self._calls.generate(request, context, context.time_remaining())
        ) as responses:
            async for response in responses:
                yield response

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._calls.list_models(request, context)

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._calls.tokenize(request, context)


def with_server(service: InferenceService, scenario: Scenario) -> None:
    async def run() -> None:
        server = grpc.aio.server()
        pb_grpc.add_InferenceServicer_to_server(Servicer(service), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await scenario(pb_grpc.InferenceStub(channel))
        finally:
            await server.stop(None)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (the fake signals nothing)
            await asyncio.sleep(0.005)


def text_of(responses: list[Any], index: int = 0) -> str:
    return "".join(
        r.delta.text for r in responses if r.HasField("delta") and r.delta.index == index
    )


def test_text_chat_and_tokens() -> None:
    text = "Paris 😀 你好"
    backend = FakeBackend(says(text), chunk=1)

    async def scenario(stub: Stub) -> None:
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hello")])
        ids = toy_tokenizer().encode("hello")
        for request in (
            pb.GenerateRequest(text="hello", model=MODEL),
            pb.GenerateRequest(messages=chat),
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids)),
        ):
            responses = [r async for r in stub.Generate(request)]
            assert text_of(responses) == text
            kinds = [r.WhichOneof("event") for r in responses]
            assert (kinds[0], kinds[-2:]) == ("started", ["finished", "usage"])
            assert responses[-2].finished.reason == pb.FINISH_REASON_STOP
            assert not responses[-2].finished.HasField("stop")
            usage = responses[-1].usage
            assert usage.num_completion_tokens == len(toy_tokenizer().encode(text))
            assert usage.num_prompt_tokens == responses[0].started.num_prompt_tokens
        assert backend.requests[0].tokens == backend.requests[2].tokens

    with_server(make_service(backend), scenario)


def test_sampling_fields_arrive_and_zero_is_a_value() -> None:
    backend = FakeBackend(says("abc#def"))

    async def scenario(stub: Stub) -> None:
        sampling = pb.Sampling(
            temperature=0, seed=0, top_k=3, logit_bias={5: -1.5}, logprobs=0, max_tokens=40
        )
        request = pb.GenerateRequest(text="x", n=2, stop=["#"], sampling=sampling)
        responses = [r async for r in stub.Generate(request)]
        assert [text_of(responses, i) for i in range(2)] == ["abc", "abc"]
        finished = [r.finished for r in responses if r.HasField("finished")]
        assert [f.stop for f in finished] == ["#", "#"]
        details = [d for r in responses for d in r.delta.details if r.delta.index == 0]
        assert b"".join(d.chosen.data for d in details) == b"abc"
        await anext(aiter(stub.Generate(pb.GenerateRequest(text="x"))))

    with_server(make_service(backend), scenario)
    given, default = (request.sampling for request in backend.requests)
    assert (given.temperature, given.seed, given.top_k, given.logprobs) == (0, 0, 3, 0)
    assert given.logit_bias == ((5, -1.5),)
    assert (default.temperature, default.seed, default.logprobs) == (1.0, None, None)


@pytest.mark.parametrize(
    ("request_", "code", "error_code"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "invalid_request"),
        (pb.GenerateRequest(text=""), "INVALID_ARGUMENT", "invalid_request"),
        (pb.GenerateRequest(text="x", n=0), "INVALID_ARGUMENT", "invalid_request"),
        (pb.GenerateRequest(messages=pb.ChatMessages()), "INVALID_ARGUMENT", "invalid_request"),
        (
            pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=MAX_MODEL_LEN)),
            "INVALID_ARGUMENT",
            "context_length_exceeded",
        ),
        (
            pb.GenerateRequest(text="x", sampling=pb.Sampling(top_p=float("nan"))),
            "INVALID_ARGUMENT",
            "invalid_request",
        ),
        (pb.GenerateRequest(text="x", model="nope"), "NOT_FOUND", "model_not_found"),
    ],
)
def test_refusals(request_: pb.GenerateRequest, code: str, error_code: str) -> None:
    async def scenario(stub: Stub) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [r async for r in stub.Generate(request_)]
        assert caught.value.code().name == code
        trailing = dict(caught.value.trailing_metadata())
        assert trailing["pando-error-code"] == error_code
        assert "retry-after-ms" not in trailing

    with_server(make_service(), scenario)


def test_keys_in_metadata() -> None:
    async def scenario(stub: Stub) -> None:
        request = pb.TokenizeRequest(text="hello")
        for metadata in ((("authorization", "Bearer key-a"),), (("x-api-key", "key-a"),)):
            response = await stub.Tokenize(request, metadata=metadata)
            assert list(response.token_ids) == toy_tokenizer().encode("hello")
        for metadata in ((), (("x-api-key", "no"),), (("x-api-key-bin", b"key-a"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Tokenize(request, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    with_server(make_service(tenancy=TENANCY), scenario)


def test_models_and_tokenize() -> None:
    async def scenario(stub: Stub) -> None:
        models = (await stub.ListModels(pb.ListModelsRequest())).models
        assert [(m.id, m.max_model_len) for m in models] == [(MODEL, MAX_MODEL_LEN)]
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hello")])
        response = await stub.Tokenize(pb.TokenizeRequest(messages=chat))
        expected = toy_tokenizer().render_chat([{"role": "user", "content": "hello"}])
        assert list(response.token_ids) == expected

    with_server(make_service(), scenario)


def test_deadline_and_cancellation_reach_the_backend() -> None:
    backend = FakeBackend(says("x" * 50), chunk=1, delay_s=0.05)
    service = make_service(backend)

    async def scenario(stub: Stub) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [r async for r in stub.Generate(pb.GenerateRequest(text="x"), timeout=0.2)]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: (backend.num_open, service.num_in_flight) == (0, 0))
        call = stub.Generate(pb.GenerateRequest(text="x"))
        await call.read()
        await until(lambda: backend.num_open == 1)
        call.cancel()
        await until(lambda: (backend.num_open, service.num_in_flight) == (0, 0))

    with_server(service, scenario)
    assert (backend.num_cancelled, backend.num_completed) == (2, 0)


def test_overload_and_outage_say_when_to_come_back() -> None:
    backend = FakeBackend(says("x" * 50), chunk=1, delay_s=0.05)
    service = make_service(backend, GatewayOptions(max_in_flight=1, retry_after_s=2.5))

    async def scenario(stub: Stub) -> None:
        async def fail() -> grpc.aio.AioRpcError:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [r async for r in stub.Generate(pb.GenerateRequest(text="x"))]
            return caught.value

        held = stub.Generate(pb.GenerateRequest(text="x"))
        await held.read()
        error = await fail()
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata())["retry-after-ms"] == "2500"
        held.cancel()
        await until(lambda: service.num_in_flight == 0)
        backend.delay_s, backend.fail_after, backend.failure = 0, 1, ReplicaLost("it died")
        error = await fail()
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "it died"
        backend.is_up = False
        assert (await fail()).code() is grpc.StatusCode.UNAVAILABLE

    with_server(service, scenario)
