"""Who is served first: `priority` and `service_tier`, within what the tenant may ask for."""

import httpx
import openai
import pytest
from edge_fakes import MODEL, FakeBackend, make_service, says
from edge_server import serving
from inference_driver import ask, refused, run
from pydantic import SecretStr, ValidationError

from router.http_api.service_tier import priority_of, served_tier
from router.options import TenancyOptions, TenantKey
from workers.errors import InvalidRequest

_TENANCY = TenancyOptions(
    secret=SecretStr("s" * 16),
    keys=(
        TenantKey(tenant="plain", key=SecretStr("key-plain")),
        TenantKey(tenant="first", key=SecretStr("key-first"), min_priority=-100),
        TenantKey(tenant="last", key=SecretStr("key-last"), min_priority=50),
    ),
)


@pytest.mark.parametrize(
    ("key", "asked", "served"),
    [
        ("key-plain", 0, 0),
        ("key-plain", -1000, 0),
        ("key-plain", 7, 7),
        ("key-first", -1000, -100),
        ("key-first", -99, -99),
        ("key-last", -5, 50),
        ("key-last", 1000, 1000),
    ],
)
def test_a_tenant_cannot_go_below_its_own_limit(key: str, asked: int, served: int) -> None:
    backend = FakeBackend(says("x"))
    run(make_service(backend, tenancy=_TENANCY), ask(priority=asked), key)
    assert backend.requests[0].priority == served


def test_without_keys_the_whole_range_is_everybodys() -> None:
    backend = FakeBackend(says("x"))
    run(make_service(backend), ask(priority=-1000))
    assert backend.requests[0].priority == -1000


@pytest.mark.parametrize("priority", [-1001, 1001, 10**30])
def test_priority_has_bounds(priority: int) -> None:
    error = refused(ask(priority=priority))
    assert (error.param, str(priority) in error.message) == ("priority", True)


def test_a_limit_has_the_same_bounds() -> None:
    with pytest.raises(ValidationError, match="min_priority"):
        TenantKey(tenant="a", key=SecretStr("k"), min_priority=-1001)


def test_tiers_are_priorities() -> None:
    assert [priority_of(None, t) for t in (None, "auto", "default", "flex", "priority")] == [
        0, 0, 0, 100, -100,
    ]  # fmt: skip
    assert priority_of(5, "auto") == priority_of(5, None) == priority_of(5, "default") == 5
    assert priority_of(100, "flex") == 100
    with pytest.raises(InvalidRequest) as caught:
        priority_of(5, "flex")
    assert caught.value.param == "service_tier"


def test_the_tier_named_is_the_one_that_was_served() -> None:
    assert served_tier(None, 0) is None
    assert served_tier("auto", 0) == served_tier("default", 0) == "default"
    assert served_tier("flex", 0) == "flex"
    assert served_tier("priority", -100) == "priority"
    assert served_tier("priority", 0) == "default"


@pytest.mark.parametrize(
    ("body", "priority", "tier"),
    [
        ({}, 0, None),
        ({"priority": -30}, -30, None),
        ({"service_tier": "flex"}, 100, "flex"),
        ({"service_tier": "priority"}, -100, "priority"),
        ({"service_tier": "auto", "priority": 3}, 3, "default"),
        ({"service_tier": None, "priority": None}, 0, None),
    ],
)
def test_over_http(body: dict[str, object], priority: int, tier: str | None) -> None:
    backend = FakeBackend(says("x"))
    headers = {"x-api-key": "key-first"}
    with serving(make_service(backend, tenancy=_TENANCY)) as url:
        for path, prompt in (
            ("completions", {"prompt": "hello"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ):
            answer = httpx.post(f"{url}/v1/{path}", json={**prompt, **body}, headers=headers)
            assert answer.json().get("service_tier") == tier
            assert ("service_tier" in answer.json()) == (tier is not None)
    assert [request.priority for request in backend.requests] == [priority] * 2


def test_streams_name_the_tier_in_every_chunk() -> None:
    with (
        serving(make_service(FakeBackend(says("xyz"), chunk=1), tenancy=_TENANCY)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="key-plain", max_retries=0) as client,
    ):
        chunks = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            service_tier="priority",
        )
        assert {chunk.service_tier for chunk in chunks} == {"default"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"priority": "1"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 2000}, "priority"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"service_tier": 1}, "service_tier"),
        ({"service_tier": "priority", "priority": 1}, "service_tier"),
    ],
)
def test_bad_bodies(body: dict[str, object], param: str) -> None:
    with serving(make_service(FakeBackend(says("x")))) as url:
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "hello", **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
