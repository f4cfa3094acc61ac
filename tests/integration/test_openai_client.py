"""The official client against the live cluster: what works, and an error of each kind."""

import openai
import pytest
from live_cluster import MODEL, Cluster

pytestmark = pytest.mark.integration

CHAT = [{"role": "user", "content": "Say hello."}]


def test_chat_stream_completions_and_models(cluster: Cluster) -> None:
    client = cluster.openai()
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=8, temperature=0, n=2, logprobs=True, top_logprobs=2
    )
    assert [c.index for c in chat.choices] == [0, 1]
    assert chat.choices[0].message.content == chat.choices[1].message.content
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
    assert chat.usage is not None
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens

    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]

    completion = client.completions.create(
        model=MODEL, prompt=["One, two,", "Red, green,"], max_tokens=4, temperature=0, logprobs=1
    )
    assert [c.index for c in completion.choices] == [0, 1]
    assert completion.choices[0].logprobs is not None
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_seed_repeats_and_seeds_differ(cluster: Cluster) -> None:
    client = cluster.openai()

    def draw(seed: int) -> str:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Invent a word."}],
            max_tokens=12, temperature=1.3, seed=seed,
        )  # fmt: skip
        return answer.choices[0].message.content or ""

    draw(0)  # so that all that follow find the prompt cached
    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(5)}) > 1


def test_an_error_of_each_kind(cluster: Cluster) -> None:
    client = cluster.openai(max_retries=0)
    ask = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(model=MODEL, messages=CHAT, temperature=9)
    with pytest.raises(openai.BadRequestError, match="8192") as too_long:
        ask(model=MODEL, messages=CHAT, max_tokens=9000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        ask(model="gpt-9", messages=CHAT)
    with pytest.raises(openai.AuthenticationError):
        ask(model=MODEL, messages=CHAT, extra_headers={"Authorization": "Bearer wrong"})
    with pytest.raises(openai.APIStatusError) as too_large:
        ask(model=MODEL, messages=[{"role": "user", "content": "x" * (9 * 2**20)}])
    assert too_large.value.status_code == 413
    with cluster.http("globex") as other:
        assert other.get("/status").status_code == 403


def test_many_waiting_requests_are_told_to_come_back(cluster: Cluster) -> None:
    """Over the configured limit of prompts in work: 429, with a time to wait."""
    client = cluster.openai(max_retries=0, timeout=60)
    prompts = ["count"] * 40
    with pytest.raises(openai.RateLimitError) as error:
        client.completions.create(model=MODEL, prompt=prompts, max_tokens=1, n=1)
    assert float(error.value.response.headers["retry-after"]) > 0
    cluster.wait_for("is_idle", 30)


def test_what_prometheus_reads(cluster: Cluster) -> None:
    with cluster.http() as client:
        text = client.get("/metrics").text
    for name in (
        'pando_requests_total{outcome="ok",tenant="acme"}',
        "pando_time_to_first_token_seconds_bucket",
        "pando_cached_tokens_total",
        "pando_replica_num_free_blocks",
        'pando_index_mode{mode="exact"} 1.0',
        "pando_index_connected 1.0",
        "pando_ledger_owed_tokens",
        "pando_router_decisions_total",
    ):
        assert name in text, name
