"""best_of without beams: more is drawn than returned, and the likeliest are what is returned."""

import math
from collections.abc import Iterable
from itertools import pairwise

import httpx
import openai
import pytest
from edge_fakes import MODEL, FakeBackend, make_service, toy_tokenizer
from edge_server import serving
from hypothesis import given
from hypothesis import strategies as st
from inference_driver import ask, gather, refused, run

from router.best_of import BestOf
from router.options import GatewayOptions
from router.requests import Delta, Finished, Output, Started, TokenChoice, TokenDetail, Usage
from workers.errors import InvalidRequest
from workers.protocol import FinishReason, GenerateRequest

_TEXTS = ["zzz", "b", "", "aaaa", "b#cut"]


def _reply(_request: GenerateRequest, index: int) -> list[int]:
    return toy_tokenizer().encode(_TEXTS[index])


def _logprob(token_id: int) -> float:
    """Early letters are likelier."""
    return -float(toy_tokenizer().token_bytes(token_id)[0]) / 100


def _backend() -> FakeBackend:
    return FakeBackend(_reply, token_logprob=_logprob, chunk=1)


def _detail(logprob: float, offset: int) -> TokenDetail:
    return TokenDetail(TokenChoice(65, b"A", logprob), (), offset)


@given(
    st.lists(st.lists(st.floats(-20, 0), max_size=4), min_size=1, max_size=6),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_the_likeliest_come_out_in_order_whatever_came_first(
    rows: list[list[float]], n: int, random: object, shows_details: bool
) -> None:
    n = min(n, len(rows))
    pending = [
        [
            *(Delta(i, "A", (_detail(p, k),), Usage(1, 0, k)) for k, p in enumerate(row)),
            Finished(i, FinishReason.STOP, f"s{i}", Usage(1, 0, 99)),
        ]
        for i, row in enumerate(rows)
    ]
    interleaved: list[Output] = []
    while any(pending):
        mine = random.choice([p for p in pending if p])  # type: ignore[attr-defined]
        interleaved.append(mine.pop(0))
    best_of = BestOf(len(rows), n, shows_details=shows_details)
    assert list(best_of.consume(interleaved[:-1])) == []
    outputs = list(best_of.consume(interleaved[-1:]))

    def mean(i: int) -> float:
        return sum(rows[i]) / len(rows[i]) if rows[i] else -math.inf

    finished = [output for output in outputs if isinstance(output, Finished)]
    assert [f.index for f in finished] == list(range(n))
    drawn = [int((f.stop or "")[1:]) for f in finished]
    left_out = set(range(len(rows))) - set(drawn)
    means = [mean(i) for i in drawn]
    assert all(a >= b - 1e-9 for a, b in pairwise(means))
    assert all(mean(i) <= means[-1] + 1e-9 for i in left_out)
    for index, i in enumerate(drawn):
        mine_out = [o for o in outputs if isinstance(o, Delta) and o.index == index]
        assert "".join(o.text for o in mine_out) == "A" * len(rows[i])
        shown = [d.chosen.logprob for o in mine_out for d in o.details]
        assert shown == (rows[i] if shows_details else [])
    assert all(output.usage == Usage(1, 0, 99) for output in outputs)


def test_what_is_drawn_and_what_is_returned() -> None:
    backend = _backend()
    outputs = run(make_service(backend), ask(n=2, best_of=5, stop=("#",)))
    assert isinstance(outputs[0], Started)
    # "b" and "b#cut" are equally likely as far as they are shown, and less likely than "aaaa".
    assert [gather(outputs, i).text for i in range(2)] == ["aaaa", "b"]
    assert {o.index for o in outputs[1:] if not isinstance(o, Started)} == {0, 1}
    assert gather(outputs).details == []
    assert (backend.requests[0].n, backend.requests[0].sampling.logprobs) == (5, 0)
    assert backend.requests[0].beam is None
    assert backend.num_open == 0


def test_an_empty_answer_is_the_last_choice() -> None:
    outputs = run(make_service(_backend()), ask(n=4, best_of=5))
    assert gather(outputs, 3).text == "zzz"
    outputs = run(make_service(_backend()), ask(n=4, best_of=4))
    assert [gather(outputs, i).text for i in range(4)] == _TEXTS[:4]


def test_usage_counts_what_was_drawn() -> None:
    usage = run(make_service(_backend()), ask(n=1, best_of=4))[-1].usage
    assert usage.num_completion_tokens == sum(
        len(toy_tokenizer().encode(text)) for text in _TEXTS[:4]
    )


def test_log_probabilities_are_shown_to_those_who_ask() -> None:
    backend = _backend()
    outputs = run(make_service(backend), ask(n=1, best_of=4, logprobs=2))
    details = gather(outputs).details
    assert b"".join(d.chosen.data for d in details) == b"aaaa"
    assert all(len(d.top) == 2 for d in details)
    assert backend.requests[0].sampling.logprobs == 2


def test_without_a_choice_to_make_answers_stream() -> None:
    backend = _backend()
    outputs = run(make_service(backend), ask(n=4, best_of=4))
    assert backend.requests[0].sampling.logprobs is None
    assert sum(isinstance(o, Delta) and o.index == 3 for o in outputs) > 1


@pytest.mark.parametrize(("n", "best_of"), [(3, 2), (1, 0), (1, 17), (1, -1)])
def test_best_of_out_of_range(n: int, best_of: int) -> None:
    error = refused(ask(n=n, best_of=best_of))
    assert isinstance(error, InvalidRequest)
    assert (error.param, str(best_of) in error.message) == ("best_of", True)


def test_a_failure_among_those_drawn_fails_all() -> None:
    backend = _backend()
    backend.fail_after = 2
    with pytest.raises(type(backend.failure)):
        run(make_service(backend), ask(n=1, best_of=4))
    assert backend.num_open == 0


def _texts(choices: Iterable[openai.types.CompletionChoice]) -> list[str]:
    return [choice.text for choice in choices]


def test_over_http() -> None:
    service = make_service(_backend(), GatewayOptions(max_n=5))
    with (
        serving(service) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        one = client.completions.create(model=MODEL, prompt="hello", best_of=4, logprobs=1)
        assert _texts(one.choices) == ["aaaa"]
        assert one.choices[0].logprobs is not None
        assert one.usage is not None
        assert one.usage.completion_tokens > len(toy_tokenizer().encode("aaaa"))
        two = client.completions.create(model=MODEL, prompt=["hello", "the"], n=2, best_of=4)
        assert _texts(two.choices) == ["aaaa", "b"] * 2
        assert "score" not in two.choices[0].to_dict()
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="x", best_of=2, stream=True)
        assert caught.value.param == "best_of"
        with pytest.raises(openai.BadRequestError, match="between n"):
            client.completions.create(model=MODEL, prompt="x", best_of=6)
        streamed = client.completions.create(model=MODEL, prompt="x", best_of=1, stream=True)
        assert "".join(c.choices[0].text for c in streamed) == "zzz"
        chat = {"messages": [{"role": "user", "content": "hi"}], "best_of": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat).json()
        assert [c["message"]["content"] for c in answer["choices"]] == ["aaaa"]
