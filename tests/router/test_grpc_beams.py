"""Beams, best_of and priority over gRPC."""

import math

import grpc
import pytest
from edge_fakes import FakeBackend, make_service, toy_tokenizer
from test_grpc_api import FakeContext, generate

from router.proto import pando_pb2 as pb
from workers.protocol import BeamParams, GenerateRequest

_TEXTS = ["zz", "yyyy", "x"]


def _reply(_request: GenerateRequest, index: int) -> list[int]:
    return toy_tokenizer().encode(_TEXTS[index])


def _logprob(token_id: int) -> float:
    """Early letters are likelier."""
    return -float(toy_tokenizer().token_bytes(token_id)[0]) / 100


def _texts(responses: list[pb.GenerateResponse]) -> list[str]:
    num_finished = sum(r.HasField("finished") for r in responses)
    return [
        "".join(r.delta.text for r in responses if r.HasField("delta") and r.delta.index == index)
        for index in range(num_finished)
    ]


def test_beams_and_their_scores() -> None:
    backend = FakeBackend(_reply, chunk=1)
    beam = pb.Beam(length_penalty=0, early_stopping=pb.EARLY_STOPPING_NEVER)
    request = pb.GenerateRequest(text="hello", n=2, best_of=3, beam=beam)
    context = FakeContext()
    responses = generate(make_service(backend), request, context)
    assert context.code is grpc.StatusCode.OK
    assert _texts(responses) == ["x", "zz"]
    scores = [r.finished.score for r in responses if r.HasField("finished")]
    assert scores == pytest.approx([math.log(0.5), 2 * math.log(0.5)])
    assert backend.requests[0].beam == BeamParams(3, 0.0, None)
    assert responses[-1].usage.num_completion_tokens == 3


@pytest.mark.parametrize(
    ("early_stopping", "expected"),
    [
        (pb.EARLY_STOPPING_UNSPECIFIED, False),
        (pb.EARLY_STOPPING_FALSE, False),
        (pb.EARLY_STOPPING_TRUE, True),
        (pb.EARLY_STOPPING_NEVER, None),
    ],
)
def test_an_empty_beam_message_means_the_defaults(
    early_stopping: pb.EarlyStopping.ValueType, expected: bool | None
) -> None:
    backend = FakeBackend(_reply)
    beam = pb.Beam(early_stopping=early_stopping)
    generate(make_service(backend), pb.GenerateRequest(text="x", beam=beam), FakeContext())
    assert backend.requests[0].beam == BeamParams(1, 1.0, expected)


def test_best_of_and_priority() -> None:
    backend = FakeBackend(_reply, chunk=1, token_logprob=_logprob)
    request = pb.GenerateRequest(text="hello", best_of=3, priority=-7)
    responses = generate(make_service(backend), request, FakeContext())
    assert _texts(responses) == ["x"]
    (finished,) = (r.finished for r in responses if r.HasField("finished"))
    assert not finished.HasField("score")
    assert not any(r.delta.details for r in responses)
    assert (backend.requests[0].n, backend.requests[0].priority) == (3, -7)
    assert responses[-1].usage.num_completion_tokens == sum(
        len(toy_tokenizer().encode(text)) for text in _TEXTS
    )


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (pb.GenerateRequest(text="x", best_of=0), "best_of"),
        (pb.GenerateRequest(text="x", n=3, best_of=2), "best_of"),
        (pb.GenerateRequest(text="x", priority=1001), "priority"),
        (pb.GenerateRequest(text="x", beam=pb.Beam(length_penalty=99)), "length_penalty"),
        (
            pb.GenerateRequest(text="x", beam=pb.Beam(), sampling=pb.Sampling(top_p=0.5)),
            "top_p",
        ),
        (
            pb.GenerateRequest.FromString(
                pb.GenerateRequest(text="x").SerializeToString() + bytes([9 << 3 | 2, 2, 2 << 3, 9])
            ),
            "early_stopping",
        ),
    ],
)
def test_refusals_name_the_field(request_: pb.GenerateRequest, param: str) -> None:
    context = FakeContext()
    (response,) = generate(make_service(), request_, context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert response.failed.param == param
    assert "use_beam_search" not in response.failed.message
