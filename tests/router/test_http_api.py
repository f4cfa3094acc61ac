"""The HTTP interface through the official client, against a real server on a loopback port."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest
from edge_fakes import MAX_MODEL_LEN, MODEL, FakeBackend, make_service, says, toy_tokenizer
from edge_server import TENANCY, serving, wait_until

from router.inference import InferenceService
from router.options import GatewayOptions
from workers.errors import ReplicaLost, Unavailable

CHAT = [{"role": "user", "content": "hello there"}]


@contextmanager
def talking(service: InferenceService, key: str = "none") -> Iterator[openai.OpenAI]:
    with (
        serving(service) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client


def test_chat_streamed_and_not_is_the_same() -> None:
    text = "Paris 😀 你好, naïve"
    with talking(make_service(FakeBackend(says(text), chunk=1))) as client:
        whole = client.chat.completions.create(model=MODEL, messages=CHAT)  # type: ignore[arg-type]
        assert whole.choices[0].message.content == text
        assert whole.choices[0].finish_reason == "stop"
        assert whole.object == "chat.completion"
        num_completion = len(toy_tokenizer().encode(text))
        assert whole.usage is not None
        assert whole.usage.completion_tokens == num_completion
        stream = client.chat.completions.create(
            model=MODEL,
            messages=CHAT,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        again = client.chat.completions.create(model=MODEL, messages=CHAT)  # type: ignore[arg-type]
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == 16
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == num_completion
    assert chunks[-2].choices[0].finish_reason == "stop"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_stream_on_the_wire() -> None:
    body = {"model": MODEL, "messages": CHAT, "stream": True, "n": 2}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    with serving(make_service(FakeBackend(says("a\u2028b\x85c"), chunk=1))) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [e for e in response.text.split("\n\n") if e]
        assert events[-1] == "data: [DONE]"
        assert all(len(e.splitlines()) == 1 and e.startswith("data: ") for e in events)
        chunks = [httpx.Response(200, text=e[6:]).json() for e in events[:-1]]
        assert {c["choices"][0]["index"] for c in chunks} == {0, 1}
        assert all("usage" not in c for c in chunks)
        assert [c["choices"][0]["delta"].get("role") for c in chunks[:2]] == ["assistant"] * 2
        response = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream_options": usage})
        events = [e[6:] for e in response.text.split("\n\n") if e][:-1]
        counts = [httpx.Response(200, text=e).json()["usage"]["completion_tokens"] for e in events]
        assert counts == sorted(counts)
        assert counts[-1] > counts[0]


def test_completions_of_every_kind_of_prompt() -> None:
    tokens = toy_tokenizer().encode("hello")
    with talking(make_service(FakeBackend(says("out")))) as client:
        prompts = ("hello", ["hello", "the cat"], tokens, [tokens, [65], [66, 67]])
        for prompt, count in zip(prompts, (1, 2, 1, 3), strict=True):
            answer = client.completions.create(model=MODEL, prompt=prompt, n=2)
            assert [c.index for c in answer.choices] == list(range(count * 2))
            assert [c.text for c in answer.choices] == ["out"] * count * 2
            assert answer.usage is not None
            per_choice = len(toy_tokenizer().encode("out"))
            assert answer.usage.completion_tokens == per_choice * count * 2
            chunks = list(client.completions.create(model=MODEL, prompt=prompt, n=2, stream=True))
            for index in range(count * 2):
                mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
                assert "".join(choice.text for choice in mine) == "out"
                assert mine[-1].finish_reason == "stop"


def test_completion_defaults_and_echo() -> None:
    with talking(make_service(FakeBackend(says("x" * 100)))) as client:
        answer = client.completions.create(model=MODEL, prompt=["hello", "the cat"], echo=True)
        assert [c.text for c in answer.choices] == ["hello" + "x" * 16, "the cat" + "x" * 16]
        assert {c.finish_reason for c in answer.choices} == {"length"}
        ids = toy_tokenizer().encode("hello")
        stream = client.completions.create(model=MODEL, prompt=ids, echo=True, stream=True)
        assert "".join(c.choices[0].text for c in stream) == "hello" + "x" * 16


def test_logprobs_in_both_shapes() -> None:
    with talking(make_service(FakeBackend(says("ab 你"), chunk=1))) as client:
        chat = client.chat.completions.create(
            model=MODEL,
            messages=CHAT,  # type: ignore[arg-type]
            logprobs=True,
            top_logprobs=2,
        )
        assert chat.choices[0].logprobs is not None
        content = chat.choices[0].logprobs.content
        assert content is not None
        assert b"".join(bytes(t.bytes or []) for t in content).decode() == "ab 你"
        assert all(len(t.top_logprobs) == 2 and t.logprob < 0 for t in content)
        assert not any("\ufffd" in t.token for t in content)
        text = client.completions.create(model=MODEL, prompt="hello", logprobs=1)
        logprobs = text.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.text_offset is not None
        assert logprobs.top_logprobs is not None
        assert logprobs.token_logprobs is not None
        lengths = {len(logprobs.tokens), len(logprobs.text_offset), len(logprobs.top_logprobs)}
        assert lengths == {len(content)}
        assert logprobs.text_offset[:2] == [0, 1]
        assert all(
            top[token] == value
            for top, token, value in zip(
                logprobs.top_logprobs, logprobs.tokens, logprobs.token_logprobs, strict=True
            )
        )
        streamed = client.completions.create(model=MODEL, prompt="hello", logprobs=1, stream=True)
        tokens: list[str] = []
        for chunk in streamed:
            if chunk.choices[0].logprobs is not None:
                tokens.extend(chunk.choices[0].logprobs.tokens or [])
        assert tokens == logprobs.tokens


def test_seed_and_temperature_reach_the_model() -> None:
    with talking(make_service()) as client:

        def say(**options: object) -> str | None:
            answer = client.chat.completions.create(  # type: ignore[call-overload]
                model=MODEL, messages=CHAT, **options
            )
            text = answer.choices[0].message.content
            assert text
            return text  # type: ignore[no-any-return]

        assert say(seed=1) == say(seed=1) != say(seed=2)
        assert say() != say()
        assert say(temperature=0) == say(temperature=0)


def test_message_contents() -> None:
    backend = FakeBackend(says("x"))
    with serving(make_service(backend)) as url:

        def post(message: object) -> httpx.Response:
            messages = [{"role": "user", "content": "q"}, message]
            body = {"model": MODEL, "messages": messages}
            return httpx.post(f"{url}/v1/chat/completions", json=body)

        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        for message in (
            {"role": "user", "content": "ab"},
            {"role": "user", "content": parts, "name": "me"},
            {"role": "assistant", "content": None},
            {"role": "assistant"},
        ):
            assert post(message).status_code == 200
        assert backend.requests[0].tokens == backend.requests[1].tokens
        for message in (
            {"role": "user", "content": None},
            {"role": "user", "content": 7},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            {"role": "wizard", "content": "x"},
            {"content": "x"},
            "x",
        ):
            response = post(message)
            assert response.status_code == 400, message
            assert response.json()["error"]["param"] == "messages"


def test_a_salt_or_tenant_in_the_body_changes_nothing() -> None:
    service = make_service(FakeBackend(says("x")), tenancy=TENANCY)
    body = {"model": MODEL, "prompt": "the quick brown fox " * 8}
    with serving(service) as url:

        def cached(key: str, **extra: object) -> int:
            response = httpx.post(
                f"{url}/v1/completions",
                json={**body, **extra},
                headers={"Authorization": f"Bearer {key}", "x-tenant": "a"},
            )
            count = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert isinstance(count, int)
            return count

        assert cached("key-a", cache_salt="one") == 0
        assert cached("key-b", cache_salt="one", user="a", tenant="a") == 0
        assert cached("key-a", cache_salt="two", user="b") > 0


def test_every_kind_of_error_as_the_client_raises_it() -> None:
    options = GatewayOptions(max_in_flight=1, retry_after_s=7)
    backend = FakeBackend(says("x"))
    service = make_service(backend, options, TENANCY)
    with talking(service, "key-a") as client:

        def fail(kind: type[openai.APIStatusError], **changes: object) -> openai.APIStatusError:
            arguments = {"model": MODEL, "messages": CHAT, **changes}
            with pytest.raises(kind) as caught:
                client.chat.completions.create(**arguments)  # type: ignore[call-overload]
            return caught.value

        assert fail(openai.NotFoundError, model="nope").code == "model_not_found"
        error = fail(openai.BadRequestError, temperature=3)
        assert (error.param, error.type) == ("temperature", "invalid_request_error")
        error = fail(openai.BadRequestError, max_completion_tokens=MAX_MODEL_LEN)
        assert (error.code, error.param) == ("context_length_exceeded", "max_completion_tokens")
        backend.delay_s = 0.2
        with client.chat.completions.create(model=MODEL, messages=CHAT, stream=True) as held:  # type: ignore[arg-type, call-overload]
            next(held)
            error = fail(openai.RateLimitError)
            assert error.response.headers["retry-after"] == "7"
        wait_until(lambda: service.num_in_flight == 0)
        backend.delay_s = 0
        backend.fail_after, backend.failure = 0, Unavailable("down", retry_after_s=2.5)
        backend.is_up = False
        error = fail(openai.InternalServerError)
        assert error.status_code == 503
        assert error.response.headers["retry-after"] == "1"
        backend.is_up = True
        backend.failure = RuntimeError("boom")
        assert fail(openai.InternalServerError).status_code == 500
        client.api_key = "key-c"
        error = fail(openai.AuthenticationError)
        assert error.code == "invalid_api_key"
        assert error.response.headers["www-authenticate"] == "Bearer"


def test_a_failure_in_mid_stream_is_an_error_event() -> None:
    backend = FakeBackend(says("x" * 50), fail_after=2, failure=ReplicaLost("it died"))
    with talking(make_service(backend)) as client:
        stream = client.chat.completions.create(model=MODEL, messages=CHAT, stream=True)  # type: ignore[arg-type, call-overload]
        seen = []
        with pytest.raises(openai.APIError, match="it died"):
            seen.extend(stream)
    assert backend.num_open == 0


def test_models_and_system_endpoints() -> None:
    backend = FakeBackend(says("x"))
    with talking(make_service(backend)) as client:
        assert [m.id for m in client.models.list()] == [MODEL]
        model = client.models.retrieve(MODEL)
        assert model.to_dict()["max_model_len"] == MAX_MODEL_LEN
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nope")
        root = str(client.base_url).removesuffix("/v1/")
        assert httpx.get(f"{root}/health").json() == {"status": "ok"}
        assert httpx.get(f"{root}/version").json()["version"]
        assert httpx.get(f"{root}/status").json() == {"replicas": ["replica-0"]}
        client.completions.create(model=MODEL, prompt="hello")
        metrics = httpx.get(f"{root}/metrics").text
        assert 'pando_requests_total{outcome="ok",tenant="local"} 1.0' in metrics
        assert 'pando_replica_num_free_blocks{replica="replica-0"} 4000.0' in metrics
        backend.is_up = False
        assert httpx.get(f"{root}/health").status_code == 503


def test_what_only_operators_may_see() -> None:
    with serving(make_service(tenancy=TENANCY)) as url:
        for path in ("/status", "/metrics"):
            statuses = [
                httpx.get(url + path, headers={"x-api-key": key} if key else {}).status_code
                for key in (None, "key-a", "key-ops")
            ]
            assert statuses == [401, 403, 200]
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.post(f"{url}/tokenize", json={"prompt": "x"}).status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200


def test_tokenize_and_detokenize() -> None:
    with serving(make_service()) as url:
        text = "the 你😀"
        body = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()
        assert body["tokens"] == toy_tokenizer().encode(text)
        assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), MAX_MODEL_LEN)
        back = httpx.post(f"{url}/detokenize", json={"tokens": body["tokens"]}).json()
        assert back == {"prompt": text}
        chat = httpx.post(f"{url}/tokenize", json={"messages": CHAT}).json()
        assert chat["tokens"] == toy_tokenizer().render_chat(CHAT)
        for path, bad in (
            ("tokenize", {}),
            ("tokenize", {"prompt": "a", "messages": CHAT}),
            ("detokenize", {"tokens": [-1]}),
            ("detokenize", {"tokens": [10**6]}),
        ):
            assert httpx.post(f"{url}/{path}", json=bad).status_code == 400
