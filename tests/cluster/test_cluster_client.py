"""The commands' HTTP client: against a real Gateway, and against streams cut up and broken at will."""

import json
from collections.abc import Iterator

import httpx
import pytest
from cli_driver import DEMO_TENANCY, gateway, toy_backend
from hypothesis import given
from hypothesis import strategies as st

from cluster.client import Client, ClientError, ServerAway, ServerRefused
from workers.errors import Overloaded

MESSAGES = [{"role": "user", "content": "hello"}]


class Pieces(httpx.BaseTransport):
    """A server that answers everything with these bytes, cut up like this."""

    def __init__(
        self, pieces: list[bytes], status: int = 200, failure: Exception | None = None
    ) -> None:
        self._pieces = pieces
        self._status = status
        self._failure = failure

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        pieces, failure = self._pieces, self._failure

        class Stream(httpx.SyncByteStream):
            def __iter__(self) -> Iterator[bytes]:
                yield from pieces
                if failure is not None:
                    raise failure

        headers = {"x-pando-replica": "r7"}
        return httpx.Response(self._status, headers=headers, stream=Stream())


def client_of(*pieces: bytes, status: int = 200, failure: Exception | None = None) -> Client:
    return Client("http://pando", transport=Pieces(list(pieces), status, failure))


def chat(client: Client) -> object:
    return client.chat(MESSAGES, model="m", max_tokens=5)


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def words(*texts: str) -> list[bytes]:
    return [event(choices=[{"index": 0, "delta": {"content": text}}]) for text in texts]


USAGE = event(
    choices=[],
    usage={
        "prompt_tokens": 20,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 16},
    },
)
ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}], usage=None)
DONE = b"data: [DONE]\n\n"


@given(st.lists(st.integers(1, 40), max_size=60))
def test_an_answer_is_the_same_however_it_is_cut_up(sizes: list[int]) -> None:
    whole = b"".join([ROLE, b": a comment\n\n", *words("good ", "day 你"), USAGE, DONE])
    pieces, start = [], 0
    for size in sizes:
        pieces.append(whole[start : start + size])
        start += size
    answer = client_of(*pieces, whole[start:]).chat(MESSAGES, model="m", max_tokens=5)
    assert answer.text == "good day 你"
    assert (answer.num_prompt_tokens, answer.num_cached_tokens) == (20, 16)
    assert (answer.num_completion_tokens, answer.replica_id) == (2, "r7")


def test_first_text_is_what_is_timed() -> None:
    ticks = iter([10.0, 10.5, 12.0])
    transport = Pieces([ROLE, *words("a", "b"), USAGE, DONE])
    client = Client("http://pando", transport=transport, clock=lambda: next(ticks))
    answer = client.chat(MESSAGES, model="m", max_tokens=5)
    assert (answer.ttft_s, answer.total_s) == (0.5, 2.0)


def test_an_answer_without_text_has_no_first_token() -> None:
    answer = client_of(ROLE, USAGE, DONE).chat(MESSAGES, model="m", max_tokens=5)
    assert (answer.text, answer.ttft_s) == ("", None)


@pytest.mark.parametrize("pieces", [[], [ROLE], [*words("a"), DONE], [*words("a")]])
def test_an_answer_that_ends_early_is_not_taken_for_whole(pieces: list[bytes]) -> None:
    with pytest.raises(ServerAway, match="broke the answer off"):
        chat(client_of(*pieces))


def test_an_error_in_mid_stream() -> None:
    error = event(error={"message": "it died\x1b[31m", "code": "replica_lost"})
    with pytest.raises(ServerRefused, match="it died") as caught:
        chat(client_of(*words("a"), error))
    assert caught.value.code == "replica_lost"
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (httpx.ReadTimeout("slow"), "does not answer in time"),
        (httpx.RemoteProtocolError("peer closed"), "cannot reach http://pando: peer closed"),
    ],
)
def test_connections_that_fail(failure: Exception, said: str) -> None:
    with pytest.raises(ServerAway, match=said):
        chat(client_of(*words("a"), failure=failure))
    with pytest.raises(ServerAway, match=said):
        client_of(failure=failure).status()


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"5", b'{"replicas": [5]}', b"\xff"])
def test_answers_of_another_shape(body: bytes) -> None:
    for ask in (Client.status, Client.model_names, Client.version):
        with pytest.raises(ClientError, match="does not answer as Pando does"):
            ask(client_of(body))
    with pytest.raises(ClientError):
        chat(client_of(b"data: " + body + b"\n\n"))


@pytest.mark.parametrize("body", [b"<h1>Bad\x00 Gateway</h1>", b"x" * 10_000, b"[]", b""])
def test_refusals_that_are_not_ours(body: bytes) -> None:
    with pytest.raises(ServerRefused, match="HTTP 502") as caught:
        client_of(body, status=502).status()
    assert caught.value.status == 502
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


def test_endless_answers_are_cut() -> None:
    many = [b"x" * 2**20] * 20
    with pytest.raises(ClientError, match="larger than"):
        client_of(*many).status()
    with pytest.raises(ClientError, match="larger than"):
        chat(client_of(*many))


@pytest.mark.parametrize("key", ["ключ", "a\nb", "a\r\nx: y"])
def test_keys_that_no_header_can_hold(key: str) -> None:
    with pytest.raises(ClientError):
        Client("http://127.0.0.1:1", key).version()


def test_a_real_gateway() -> None:
    backend = toy_backend()
    with gateway(backend, DEMO_TENANCY) as url:
        with Client(url) as anonymous:
            assert anonymous.is_ready()
            assert anonymous.version()
            with pytest.raises(ServerRefused) as caught:
                anonymous.model_names()
            assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
        with Client(url + "/", "demo-acme") as client:
            (model,) = client.model_names()
            first = client.chat(MESSAGES, model=model, max_tokens=50)
            assert first.text == "nine in the morning"
            assert first.num_cached_tokens == 0
            assert first.replica_id == "replica-0"
            backend.fail_after, backend.failure = 0, Overloaded("full")
            with pytest.raises(ServerRefused, match="full"):
                client.chat(MESSAGES, model=model, max_tokens=50)
            with pytest.raises(ServerRefused, match="nope"):
                client.chat(MESSAGES, model="nope", max_tokens=50)
            backend.is_up = False
            assert not client.is_ready()
