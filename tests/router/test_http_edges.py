"""Bad bodies, odd headers and clients that leave, over raw HTTP."""

import json

import httpx
import pytest
from edge_fakes import MODEL, FakeBackend, make_service, says
from edge_server import serving, wait_until
from test_http_api import CHAT

from router.options import GatewayOptions

_COMPLETION = {"model": MODEL, "prompt": "hello"}


def assert_nested(response: httpx.Response, status: int, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 10**30}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"guided_json": {}}, None),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": 5}, "model"),
    ],
)
def test_bad_completions(shared_url: str, change: dict[str, object], param: str | None) -> None:
    body = json.dumps({**_COMPLETION, **change})
    response = httpx.post(
        f"{shared_url}/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert_nested(response, 400, param)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_bad_chats(shared_url: str, change: dict[str, object], param: str) -> None:
    body = {"model": MODEL, "messages": CHAT, **change}
    assert_nested(httpx.post(f"{shared_url}/v1/chat/completions", json=body), 400, param)


def test_fields_that_ask_for_nothing_or_that_nobody_knows_pass(shared_url: str) -> None:
    chat = {
        "model": MODEL,
        "messages": CHAT,
        "tools": None,
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"a": "b"},
        "some_new_field": [1, 2],
        "logit_bias": {"5": -100, "6": 100},
        "stop": None,
        "store": False,
    }
    assert httpx.post(f"{shared_url}/v1/chat/completions", json=chat).status_code == 200
    completion = {**_COMPLETION, "best_of": 1, "suffix": None, "use_beam_search": False}
    assert httpx.post(f"{shared_url}/v1/completions", json=completion).status_code == 200


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '"x"', "[" * 100_000, '{"n": ' + "9" * 5000 + "}", "\xff"]
)
def test_bodies_that_are_no_request(shared_url: str, content: str) -> None:
    response = httpx.post(
        f"{shared_url}/v1/completions",
        content=content.encode("latin-1"),
        headers={"content-type": "application/json"},
    )
    assert_nested(response, 400)


def test_paths_and_methods(shared_url: str) -> None:
    assert_nested(httpx.get(f"{shared_url}/v2/nothing"), 404)
    assert_nested(httpx.get(f"{shared_url}/v1/completions"), 405)
    assert_nested(httpx.post(f"{shared_url}/v1/models", json={}), 405)
    unknown = {**_COMPLETION, "model": "nope"}
    assert_nested(httpx.post(f"{shared_url}/v1/completions", json=unknown), 404, "model")


def test_request_id_is_echoed_or_made(shared_url: str) -> None:
    def id_for(given: str | None) -> str:
        headers = {} if given is None else {"x-request-id": given}
        return httpx.get(f"{shared_url}/version", headers=headers).headers["x-request-id"]

    assert id_for("abc-1.2") == "abc-1.2"
    assert id_for(None) != id_for(None)
    for bad in ("", "a b", "x" * 129):
        assert id_for(bad) not in (bad, "")
    too_big = httpx.post(
        f"{shared_url}/v1/completions", content=b"x" * 200_000, headers={"x-request-id": "big"}
    )
    assert too_big.headers["x-request-id"] == "big"


@pytest.mark.parametrize("num_bytes", [100_001, 700_000, 5_000_000])
@pytest.mark.parametrize("has_length", [True, False])
def test_body_limit(shared_url: str, num_bytes: int, has_length: bool) -> None:
    pieces = (b"x" * min(50_000, num_bytes - i) for i in range(0, num_bytes, 50_000))
    content = b"x" * num_bytes if has_length else pieces
    try:
        response = httpx.post(f"{shared_url}/v1/completions", content=content)
    except (httpx.WriteError, httpx.ReadError):
        assert num_bytes > 800_000, "only far beyond the limit may the server hang up"
        return
    assert_nested(response, 413)


def test_body_of_exactly_the_limit_passes(shared_url: str) -> None:
    body = json.dumps(_COMPLETION).encode()
    body += b" " * (100_000 - len(body))
    response = httpx.post(
        f"{shared_url}/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 200


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("prompt", ["hello", ["hello", "the cat"]])
def test_a_client_that_leaves_ends_its_work(is_stream: bool, prompt: object) -> None:
    backend = FakeBackend(says("x" * 400), chunk=1, delay_s=0.05)
    service = make_service(backend)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 400, "stream": is_stream}
    with serving(service) as url:
        client = httpx.Client()
        if is_stream:
            with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                next(response.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{url}/v1/completions", json=body, timeout=0.3)
        client.close()
        wait_until(lambda: backend.requests and backend.num_open == 0)
        wait_until(lambda: service.num_in_flight == 0)
    assert backend.num_cancelled == (2 if isinstance(prompt, list) else 1)
    assert backend.num_completed == 0


def test_a_client_that_leaves_before_a_stream_begins_ends_its_work() -> None:
    class Queued(FakeBackend):
        async def generate(self, request):  # type: ignore[no-untyped-def, override]
            import asyncio

            self.requests.append(request)
            self.num_open += 1
            try:
                await asyncio.sleep(60)
                yield ()
            finally:
                self.num_open -= 1

    backend = Queued()
    with serving(make_service(backend)) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={**_COMPLETION, "stream": True}, timeout=0.3)
        wait_until(lambda: backend.requests and backend.num_open == 0)


def test_one_prompt_that_fails_ends_the_others() -> None:
    backend = FakeBackend(says("x" * 100), delay_s=0.01)
    service = make_service(backend, GatewayOptions(max_in_flight=2))
    with serving(service) as url:
        body = {"model": MODEL, "prompt": ["a", "b", "c"]}
        assert_nested(httpx.post(f"{url}/v1/completions", json=body), 429)
        wait_until(lambda: service.num_in_flight == 0 and backend.num_open == 0)


@pytest.fixture(scope="module")
def shared_url():  # type: ignore[no-untyped-def]
    options = GatewayOptions(max_body_bytes=100_000)
    with serving(make_service(FakeBackend(says("x")), options)) as url:
        yield url
