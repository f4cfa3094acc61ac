"""The right answer, the same in every form of asking."""

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from live_cluster import KEYS, MODEL, Cluster

from router.proto import pando_pb2 as pb
from router.proto import pando_pb2_grpc

pytestmark = pytest.mark.integration

QUESTION = "What is the capital of France?"
METADATA = (("authorization", f"Bearer {KEYS['acme']}"),)


def grpc_request(**sampling: object) -> pb.GenerateRequest:
    message = pb.ChatMessage(role="user", content=QUESTION)
    return pb.GenerateRequest(
        model=MODEL,
        messages=pb.ChatMessages(messages=[message]),
        sampling=pb.Sampling(temperature=0, max_tokens=32, **sampling),
    )


def test_paris_in_all_four_ways(cluster: Cluster) -> None:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 32,
    }
    client = cluster.openai()
    whole = client.chat.completions.create(**asked).choices[0].message.content
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices
    )
    with cluster.channel() as channel:
        stub = pando_pb2_grpc.InferenceStub(channel)
        events = list(stub.Generate(grpc_request(), metadata=METADATA))
        over_grpc = "".join(e.delta.text for e in events)
        one_by_one = ""
        for event in stub.Generate(grpc_request(), metadata=METADATA):
            one_by_one += event.delta.text
    assert "Paris" in whole
    assert whole == streamed == over_grpc == one_by_one
    assert events[-1].usage.num_completion_tokens > 0
    assert events[-2].finished.reason == pb.FINISH_REASON_STOP


def test_grpc_says_what_is_wrong_with_the_right_code(cluster: Cluster) -> None:
    with cluster.channel() as channel:
        stub = pando_pb2_grpc.InferenceStub(channel)
        for request, metadata, code, words in (
            (grpc_request(top_p=7), METADATA, grpc.StatusCode.INVALID_ARGUMENT, "top_p is 7"),
            (grpc_request(), (), grpc.StatusCode.UNAUTHENTICATED, "API key"),
            (
                pb.GenerateRequest(model="gpt-9", text="x"),
                METADATA,
                grpc.StatusCode.NOT_FOUND,
                "gpt-9",
            ),
        ):
            with pytest.raises(grpc.RpcError) as error:
                list(stub.Generate(request, metadata=metadata))
            assert error.value.code() is code
            assert words in error.value.details()


def test_a_deadline_ends_the_work(cluster: Cluster) -> None:
    request = pb.GenerateRequest(
        text="Once", sampling=pb.Sampling(max_tokens=3000, ignore_eos=True)
    )
    with cluster.channel() as channel, pytest.raises(grpc.RpcError) as error:
        list(
            pando_pb2_grpc.InferenceStub(channel).Generate(request, metadata=METADATA, timeout=1.5)
        )
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    cluster.wait_for("is_idle", 10)


def test_a_cancelled_call_ends_the_work(cluster: Cluster) -> None:
    request = pb.GenerateRequest(
        text="Once", sampling=pb.Sampling(max_tokens=3000, ignore_eos=True)
    )
    with cluster.channel() as channel:
        call = pando_pb2_grpc.InferenceStub(channel).Generate(request, metadata=METADATA)
        next(call)
        call.cancel()
    cluster.wait_for("is_idle", 10)


def test_health_reflection_models_and_tokenize(cluster: Cluster) -> None:
    with cluster.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "pando.v1.Inference" in database.get_services()
        service = DescriptorPool(database).FindServiceByName("pando.v1.Inference")
        assert {"Generate", "ListModels", "Tokenize"} <= set(service.methods_by_name)
        stub = pando_pb2_grpc.InferenceStub(channel)
        models = stub.ListModels(pb.ListModelsRequest(), metadata=METADATA).models
        assert [m.id for m in models] == [MODEL]
        tokens = stub.Tokenize(pb.TokenizeRequest(text="hello"), metadata=METADATA).token_ids
    with cluster.http() as client:
        body = client.post("/tokenize", json={"model": MODEL, "prompt": "hello"}).json()
    assert list(tokens) == body["tokens"]
