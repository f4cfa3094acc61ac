"""Beam search as clients ask for it: what reaches the engine, what comes back, what does not go with it."""

import asyncio
import json
import math
from collections.abc import Iterator

import httpx
import openai
import pytest
from edge_fakes import MODEL, FakeBackend, make_service, says, toy_tokenizer
from edge_server import serving
from inference_driver import ask, gather, outputs_of, refused, run

from router.http_api.schemas import GenerationBody
from router.requests import BeamFields, Delta, Finished
from workers.errors import DeadlineExceeded, InvalidRequest
from workers.protocol import BeamParams, FinishReason, GenerateRequest, SequenceFinished

_TEXTS = ["one # two", "naïve 你", "", "z"]
_CHAT = [{"role": "user", "content": "hello"}]


def _reply(_request: GenerateRequest, index: int) -> list[int]:
    return toy_tokenizer().encode(_TEXTS[index])


def _score(text: str, length_penalty: float) -> float:
    num_tokens = len(toy_tokenizer().encode(text))
    return num_tokens * math.log(0.5) / max(num_tokens, 1) ** length_penalty


@pytest.fixture(scope="module")
def shared_url() -> Iterator[str]:
    with serving(make_service(FakeBackend(says("x")))) as url:
        yield url


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        (BeamFields(), BeamParams(4, 1.0, False)),
        (BeamFields(0.0, True), BeamParams(4, 0.0, True)),
        (BeamFields(-2.0, None), BeamParams(4, -2.0, None)),
    ],
)
def test_what_the_engine_is_told(fields: BeamFields, params: BeamParams) -> None:
    backend = FakeBackend(_reply)
    run(make_service(backend), ask(n=2, best_of=4, beam=fields, min_tokens=1, ignore_eos=True))
    (request,) = backend.requests
    assert (request.beam, request.n) == (params, 2)
    assert (request.sampling.temperature, request.sampling.logprobs) == (0.0, None)
    assert (request.sampling.min_tokens, request.sampling.ignore_eos) == (1, True)
    run(make_service(backend), ask(n=3, beam=fields))
    assert backend.requests[1].beam == BeamParams(3, params.length_penalty, params.early_stopping)


def test_beams_come_whole_at_the_end_best_first_with_scores() -> None:
    service = make_service(FakeBackend(_reply, chunk=1))
    outputs = run(service, ask(n=4, beam=BeamFields(length_penalty=0.0)))
    expected = sorted(_TEXTS, key=lambda text: -_score(text, 0.0))
    assert [gather(outputs, i).text for i in range(4)] == expected
    for index, text in enumerate(expected):
        gathered = gather(outputs, index)
        assert len(gathered.pieces) == (text != "")
        assert gathered.finished is not None
        assert gathered.finished.score == pytest.approx(_score(text, 0.0))
        assert gathered.finished.reason is FinishReason.STOP
    total = sum(len(toy_tokenizer().encode(text)) for text in _TEXTS)
    assert outputs[-1].usage.num_completion_tokens == total


def test_a_stop_string_cuts_the_text_and_not_the_score() -> None:
    backend = FakeBackend(says("one # two"))
    outputs = run(make_service(backend), ask(n=2, stop=("#",), beam=BeamFields()))
    for index in range(2):
        gathered = gather(outputs, index)
        assert gathered.text == "one "
        assert gathered.finished is not None
        assert (gathered.finished.reason, gathered.finished.stop) == (FinishReason.STOP, "#")
        assert gathered.finished.score == pytest.approx(_score("one # two", 1.0))
    assert (backend.num_open, backend.num_completed) == (0, 1)


def test_beams_in_pieces_and_late_ends_are_still_whole() -> None:
    """However a replica cuts its events up, and also when a stop string is in the first piece."""

    class Dribbling(FakeBackend):
        async def generate(self, request):  # type: ignore[no-untyped-def, override]
            async for batch in super().generate(request):
                for event in batch:
                    if isinstance(event, SequenceFinished):
                        await asyncio.sleep(0)
                    yield (event,)

    outputs = run(make_service(Dribbling(_reply)), ask(n=4, stop=("n",), beam=BeamFields()))
    assert sum(isinstance(output, Finished) for output in outputs) == 4
    assert all(o.score is not None for o in outputs if isinstance(o, Finished))
    assert sum(isinstance(output, Delta) for output in outputs) == 2  # "o" and "z"


def test_max_tokens_cuts_inside_a_character() -> None:
    num_tokens = len(toy_tokenizer().encode("ab🦊")) - 1
    outputs = run(
        make_service(FakeBackend(says("ab🦊"))), ask(beam=BeamFields(), max_tokens=num_tokens)
    )
    gathered = gather(outputs)
    assert gathered.pieces == ["ab\ufffd"]
    assert gathered.finished is not None
    assert gathered.finished.reason is FinishReason.LENGTH


def test_a_deadline_ends_the_search() -> None:
    backend = FakeBackend(says("x" * 90), delay_s=30)
    with pytest.raises(DeadlineExceeded):
        asyncio.run(outputs_of(make_service(backend), ask(n=2, beam=BeamFields(), timeout_s=0.05)))
    assert (backend.num_open, backend.num_cancelled) == (0, 1)


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("temperature", 0.7),
        ("temperature", 1.0),
        ("top_p", 0.5),
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("logit_bias", {5: 1.0}),
        ("logprobs", 0),
    ],
)
def test_what_does_not_go_with_beams(field_name: str, value: object) -> None:
    error = refused(ask(beam=BeamFields(), **{field_name: value}))
    assert isinstance(error, InvalidRequest)
    assert error.param == field_name
    assert "not supported with use_beam_search" in error.message


def test_neutral_values_go_with_beams() -> None:
    run(
        make_service(FakeBackend(says("x"))),
        ask(
            beam=BeamFields(), temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, seed=3,
            repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("value", [10.5, -11.0, float("nan"), float("inf")])
def test_length_penalty_has_bounds(value: float) -> None:
    assert refused(ask(beam=BeamFields(length_penalty=value))).param == "length_penalty"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"use_beam_search": True, "early_stopping": "always"}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": 1}, "early_stopping"),
        ({"use_beam_search": True, "length_penalty": "1"}, "length_penalty"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "best_of": 17}, "best_of"),
        ({"use_beam_search": True, "best_of": 1.5}, "best_of"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"early_stopping": "never", "use_beam_search": False}, "early_stopping"),
    ],
)
def test_bad_bodies(shared_url: str, change: dict[str, object], param: str) -> None:
    response = httpx.post(f"{shared_url}/v1/completions", json={"prompt": "hello", **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"]


def test_bodies_that_ask_for_nothing_pass(shared_url: str) -> None:
    body = {"prompt": "hello", "use_beam_search": False, "length_penalty": 1.0}
    response = httpx.post(f"{shared_url}/v1/completions", json={**body, "early_stopping": False})
    assert response.status_code == 200
    assert "score" not in response.json()["choices"][0]


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), (False, False), (True, True), ("never", None)]
)
def test_early_stopping_in_a_body(value: object, expected: bool | None) -> None:
    body = GenerationBody.model_validate({"use_beam_search": True, "early_stopping": value})
    request = body.to_request(ask().prompt, ask().sampling)
    assert request.beam == BeamFields(1.0, expected)


@pytest.mark.parametrize("is_chat", [True, False])
def test_over_http_whole_and_streamed(is_chat: bool) -> None:
    backend = FakeBackend(_reply, chunk=1)
    expected = sorted(_TEXTS, key=lambda text: -_score(text, 0.0))[:3]
    extra = {"use_beam_search": True, "best_of": 4, "length_penalty": 0.0}
    with (
        serving(make_service(backend)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):

        def create(**options: object) -> object:
            fields = {"model": MODEL, "n": 3, "temperature": 0, **options}
            if is_chat:
                return client.chat.completions.create(  # type: ignore[call-overload]
                    messages=_CHAT, extra_body=extra, **fields
                )
            return client.completions.create(prompt="hello", extra_body=extra, **fields)  # type: ignore[call-overload]

        whole = create().to_dict()  # type: ignore[attr-defined]
        chunks = [chunk.to_dict() for chunk in create(stream=True)]  # type: ignore[attr-defined]
    texts = [c["message"]["content"] if is_chat else c["text"] for c in whole["choices"]]
    assert texts == expected
    scores = [choice["score"] for choice in whole["choices"]]
    assert scores == [pytest.approx(_score(text, 0.0)) for text in expected]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, text in enumerate(expected):
        mine = [choice for choice in choices if choice["index"] == index]
        pieces = [c["delta"].get("content") if is_chat else c["text"] for c in mine]
        assert [piece for piece in pieces if piece] == [text] * (text != "")
        assert [choice["score"] for choice in mine if "score" in choice] == [scores[index]]
        assert mine[-1]["score"] == scores[index]
    assert backend.requests[0].beam == BeamParams(4, 0.0, False)
    json.dumps(whole)
