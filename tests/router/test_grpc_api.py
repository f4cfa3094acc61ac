"""The gRPC calls with a context of our own, which shows what a server of any kind is told."""

import asyncio
from typing import Any

import grpc
import pytest
from edge_fakes import MAX_MODEL_LEN, MODEL, FakeBackend, make_service, says, toy_tokenizer
from edge_server import TENANCY

from router.grpc_api import ERROR_CODE_KEY, RETRY_AFTER_KEY, GrpcInference
from router.inference import InferenceService
from router.options import GatewayOptions
from router.proto import pando_pb2 as pb
from workers.errors import ReplicaLost


class FakeContext:
    """A call from `peer`, and all that is put on it."""

    def __init__(self, peer: str = "ipv4:127.0.0.1:5000", key: str | None = None) -> None:
        self._peer = peer
        self._metadata = [] if key is None else [("x-api-key", key)]
        self.code = grpc.StatusCode.OK
        self.details = ""
        self.trailing: dict[str, str] = {}

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def peer(self) -> str:
        return self._peer

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        assert isinstance(trailing_metadata, list)
        self.trailing = dict(trailing_metadata)


def generate(
    service: InferenceService, request: pb.GenerateRequest, context: FakeContext
) -> list[pb.GenerateResponse]:
    async def collect() -> list[pb.GenerateResponse]:
        return [r async for r in GrpcInference(service).generate(request, context)]

    return asyncio.run(collect())


def test_a_stream_begins_with_the_replica_and_ends_with_usage() -> None:
    context = FakeContext()
    responses = generate(
        make_service(FakeBackend(says("out"))), pb.GenerateRequest(text="hello"), context
    )
    assert context.code is grpc.StatusCode.OK
    assert responses[0].started.replica_id == "replica-0"
    assert responses[0].started.model == MODEL
    assert responses[0].started.request_id
    assert "".join(r.delta.text for r in responses) == "out"
    assert responses[-1].usage.num_completion_tokens == len(toy_tokenizer().encode("out"))


@pytest.mark.parametrize(
    ("request_", "code", "error_code", "param"),
    [
        (
            pb.GenerateRequest(text="x", n=0),
            grpc.StatusCode.INVALID_ARGUMENT,
            "invalid_request",
            "n",
        ),
        (
            pb.GenerateRequest(),
            grpc.StatusCode.INVALID_ARGUMENT,
            "invalid_request",
            "prompt",
        ),
        (
            pb.GenerateRequest(text="x", model="nope"),
            grpc.StatusCode.NOT_FOUND,
            "model_not_found",
            "model",
        ),
    ],
)
def test_a_refused_stream_says_why_in_three_places(
    request_: pb.GenerateRequest, code: grpc.StatusCode, error_code: str, param: str
) -> None:
    context = FakeContext()
    service = make_service()
    (response,) = generate(service, request_, context)
    assert context.code is code
    assert context.details == response.failed.message != ""
    assert context.trailing == {ERROR_CODE_KEY: error_code}
    assert (response.failed.code, response.failed.param) == (error_code, param)
    assert not response.failed.HasField("retry_after_ms")
    assert f'pando_errors_total{{code="{error_code}"}} 1.0' in service.metrics.render([]).decode()


def test_a_stream_that_breaks_off_says_when_to_try_again() -> None:
    failure = ReplicaLost("it died", retry_after_s=0.25)
    backend = FakeBackend(says("x" * 50), fail_after=2, failure=failure)
    context = FakeContext()
    responses = generate(make_service(backend), pb.GenerateRequest(text="hello"), context)
    assert any(r.delta.text for r in responses)
    assert not any(r.HasField("usage") for r in responses)
    assert responses[-1].failed.retry_after_ms == 250
    assert context.code is grpc.StatusCode.UNAVAILABLE
    assert context.details == "it died"
    assert context.trailing == {ERROR_CODE_KEY: "replica_lost", RETRY_AFTER_KEY: "250"}
    assert backend.num_open == 0


def test_a_failure_nobody_foresaw_tells_nothing() -> None:
    backend = FakeBackend(says("x"), fail_after=0, failure=RuntimeError("/secret/path"))
    context = FakeContext()
    responses = generate(make_service(backend), pb.GenerateRequest(text="hello"), context)
    assert context.code is grpc.StatusCode.INTERNAL
    assert responses[-1].failed.code == "internal_error"
    assert "secret" not in context.details + responses[-1].failed.message


def test_unary_calls() -> None:
    async def scenario() -> None:
        calls, context = GrpcInference(make_service()), FakeContext()
        models = (await calls.list_models(pb.ListModelsRequest(), context)).models
        assert [(m.id, m.max_model_len) for m in models] == [(MODEL, MAX_MODEL_LEN)]
        response = await calls.tokenize(pb.TokenizeRequest(text="hello"), context)
        assert list(response.token_ids) == toy_tokenizer().encode("hello")
        assert (context.code, context.trailing) == (grpc.StatusCode.OK, {})

    asyncio.run(scenario())


def test_unary_failures_say_when_to_try_again() -> None:
    async def scenario() -> None:
        calls = GrpcInference(make_service(FakeBackend(is_up=False)))
        context = FakeContext()
        response = await calls.list_models(pb.ListModelsRequest(), context)
        assert response == pb.ListModelsResponse()
        assert context.code is grpc.StatusCode.UNAVAILABLE
        assert context.trailing == {ERROR_CODE_KEY: "unavailable", RETRY_AFTER_KEY: "1000"}
        context = FakeContext()
        response_ = await calls.tokenize(pb.TokenizeRequest(), context)
        assert response_ == pb.TokenizeResponse()
        assert context.code is not grpc.StatusCode.OK

    asyncio.run(scenario())


@pytest.mark.parametrize("peer", ["ipv4:192.0.2.7:5000", "ipv6:%5Bfd00::2%5D:5000", "odd"])
def test_without_keys_strangers_are_refused(peer: str) -> None:
    backend = FakeBackend()
    context = FakeContext(peer)
    service = make_service(backend)
    generate(service, pb.GenerateRequest(text="hello"), context)
    assert context.code is grpc.StatusCode.PERMISSION_DENIED
    assert "tenancy.keys" in context.details
    assert backend.requests == []
    context = FakeContext(peer)
    assert not GrpcInference(service).is_client_allowed(context)
    assert context.code is grpc.StatusCode.PERMISSION_DENIED
    assert GrpcInference(service).is_client_allowed(FakeContext())


def test_with_keys_strangers_need_one() -> None:
    service = make_service(FakeBackend(says("x")), GatewayOptions(), TENANCY)
    for key, code in (
        ("key-a", grpc.StatusCode.OK),
        ("no", grpc.StatusCode.UNAUTHENTICATED),
        (None, grpc.StatusCode.UNAUTHENTICATED),
    ):
        context = FakeContext("ipv4:192.0.2.7:5000", key)
        generate(service, pb.GenerateRequest(text="hello"), context)
        assert context.code is code
