"""Prefixes are reused where they are, spread where they are not, and never shared between tenants."""

import threading
import uuid

import pytest
from live_cluster import MODEL, Cluster

pytestmark = pytest.mark.integration

BLOCK = 16
# Long enough that a hit saves much more than any difference in load could cost.
STORY = "The lighthouse keeper counted the ships that passed in the night. " * 20


def ask(
    cluster: Cluster, messages: list[dict[str, str]], tenant: str = "acme", max_tokens: int = 24
) -> tuple[str, int, int, str]:
    """(text, prompt tokens, cached tokens, replica)."""
    raw = cluster.openai(tenant, timeout=300).chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=max_tokens,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    body = raw.parse()
    details = body.usage.prompt_tokens_details
    return (
        body.choices[0].message.content,
        body.usage.prompt_tokens,
        details.cached_tokens,
        raw.headers["x-pando-replica"],
    )


def test_the_second_turn_reuses_the_first_on_the_same_replica(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": f"{uuid.uuid4()} {STORY} What did he count?"}]
    text, num_prompt, num_cached, replica = ask(cluster, messages)
    assert num_cached < BLOCK * 3  # at most the template's own head
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And where?"},
    ]
    _, _, num_cached_later, replica_later = ask(cluster, messages)
    assert replica_later == replica
    # All full blocks of the first turn, its answer included, as far as the template repeats it token by token.
    assert num_cached_later >= num_prompt // BLOCK * BLOCK


def test_another_tenant_gets_nothing_and_the_first_still_hits(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": f"{STORY} {uuid.uuid4()} Who passed?"}]
    _, num_prompt, _, _ = ask(cluster, messages, "acme")
    _, _, num_cached_other, _ = ask(cluster, messages, "globex")
    _, _, num_cached_again, _ = ask(cluster, messages, "acme")
    assert num_cached_other == 0
    assert (num_prompt - 1) // BLOCK * BLOCK <= num_cached_again < num_prompt


def test_a_salt_or_tenant_in_the_body_changes_nothing(cluster: Cluster) -> None:
    with cluster.http("globex") as client:
        for trick in ({"cache_salt": "acme"}, {"user": "acme"}, {"tenant": "acme"}):
            # A text that acme has sent and globex has not; the template's own head it may have.
            messages = [{"role": "user", "content": f"{uuid.uuid4()} {STORY}"}]
            ask(cluster, messages, "acme")
            body = {"model": MODEL, "messages": messages, "max_tokens": 1, **trick}
            usage = client.post("/v1/chat/completions", json=body).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] < 3 * BLOCK


def test_two_busy_prefixes_end_on_different_replicas(cluster: Cluster) -> None:
    prompts = [f"{uuid.uuid4()} {STORY * 2}" for _ in range(2)]
    replicas: dict[int, set[str]] = {0: set(), 1: set()}

    def client(which: int) -> None:
        for turn in range(3):
            messages = [{"role": "user", "content": f"{prompts[which]} {turn}"}]
            replicas[which].add(ask(cluster, messages, max_tokens=4)[3])

    threads = [threading.Thread(target=client, args=(w,)) for w in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(names) == 1 for names in replicas.values()), replicas
    assert replicas[0] != replicas[1]
