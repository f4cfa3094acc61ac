"""What the service refuses, and with which words: ranges, prompts, the context's length."""

import pytest
from edge_fakes import MAX_MODEL_LEN, FakeBackend, make_service, says
from inference_driver import VOCAB_SIZE, ask, refused, run

from router.options import GatewayOptions
from router.requests import ChatMessage, ChatPrompt, InferenceRequest, Started, TokensPrompt
from workers.errors import ContextTooLong, InvalidRequest, ModelNotFound, Unavailable


def test_context_limits() -> None:
    backend = FakeBackend(says("x" * 1000))
    service = make_service(backend)
    for num_prompt, room in ((1, MAX_MODEL_LEN - 1), (MAX_MODEL_LEN - 1, 1)):
        prompt = TokensPrompt((65,) * num_prompt)
        outputs = run(service, ask(prompt))
        assert backend.requests[-1].sampling.max_tokens == room
        assert outputs[-1].usage.num_completion_tokens == room
        error = refused(ask(prompt, max_tokens=room + 1))
        assert isinstance(error, ContextTooLong)
        assert str(room + 1) in error.message
        assert str(MAX_MODEL_LEN) in error.message
        assert error.param == "max_tokens"
    for num_prompt in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
        error = refused(ask(TokensPrompt((65,) * num_prompt)))
        assert isinstance(error, ContextTooLong)
        assert f"{num_prompt} tokens" in error.message
        assert str(MAX_MODEL_LEN) in error.message


def test_a_default_never_exceeds_the_room() -> None:
    backend = FakeBackend(says("x"))
    service = make_service(backend, GatewayOptions(default_max_tokens=300))
    for num_prompt, expected in ((1, 300), (MAX_MODEL_LEN - 5, 5)):
        run(service, ask(TokensPrompt((65,) * num_prompt)))
        assert backend.requests[-1].sampling.max_tokens == expected


@pytest.mark.parametrize(
    ("field_name", "values"),
    [
        ("temperature", (-0.1, 2.1, float("nan"), float("inf"))),
        ("top_p", (0.0, -1.0, 1.1, float("nan"))),
        ("top_k", (-2,)),
        ("min_p", (-0.1, 1.1, float("nan"))),
        ("repetition_penalty", (0.0, -1.0, 11.0, float("nan"))),
        ("presence_penalty", (-2.1, 2.1)),
        ("frequency_penalty", (-2.1, 2.1, float("nan"))),
        ("max_tokens", (0, -1)),
        ("min_tokens", (-1, 10_000)),
        ("seed", (2**63, -(2**63) - 1)),
        ("logprobs", (-1, 21)),
        ("logit_bias", ({VOCAB_SIZE: 1.0}, {-1: 1.0}, {5: 100.5}, {5: float("nan")})),
        ("stop_token_ids", ((VOCAB_SIZE,), (-1,), (1,) * 129)),
    ],
)
def test_ranges(field_name: str, values: tuple[object, ...]) -> None:
    for value in values:
        error = refused(ask(**{field_name: value}))
        assert isinstance(error, InvalidRequest)
        assert error.param == field_name
        assert field_name in error.message


def test_edges_of_the_ranges_are_fine() -> None:
    backend = FakeBackend(says("x"))
    service = make_service(backend)
    for sampling in (
        {"temperature": 0.0, "top_p": 1.0, "min_p": 1.0, "logprobs": 20, "seed": 2**63 - 1},
        {"temperature": 2.0, "logit_bias": {VOCAB_SIZE - 1: -100.0, 0: 100.0}, "seed": -(2**63)},
        {"top_k": 10**9, "presence_penalty": -2.0, "frequency_penalty": 2.0, "max_tokens": 1},
    ):
        run(service, ask(**sampling))
    assert backend.requests[1].sampling.logit_bias == ((0, 100.0), (VOCAB_SIZE - 1, -100.0))
    assert backend.requests[2].sampling.top_k == VOCAB_SIZE


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (ask(""), "prompt"),
        (ask(TokensPrompt(())), "prompt"),
        (ask(TokensPrompt((1, VOCAB_SIZE))), "prompt"),
        (ask(TokensPrompt((-1,))), "prompt"),
        (ask("\ud800"), "prompt"),
        (ask(ChatPrompt((ChatMessage("user", "\ud800"),))), "messages"),
        (ask(n=0), "n"),
        (ask(n=17), "n"),
        (ask(stop=("",)), "stop"),
        (ask(stop=("a",) * 17), "stop"),
        (ask(stop=("a" * 1025,)), "stop"),
    ],
)
def test_bad_requests(request_: InferenceRequest, param: str) -> None:
    error = refused(request_)
    assert isinstance(error, InvalidRequest)
    assert error.param == param


def test_models() -> None:
    error = refused(ask(model="nope\ud800"))
    assert isinstance(error, ModelNotFound)
    assert "toy/model" in error.message
    error.message.encode()
    service = make_service(options=GatewayOptions(served_model_names=("big", "alias")))
    started = run(service, ask(model="alias"))[0]
    assert isinstance(started, Started)
    assert started.model == "alias"
    with pytest.raises(ModelNotFound):
        run(service, ask(model="toy/model"))


def test_no_replica_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        run(make_service(FakeBackend(is_up=False)), ask())
