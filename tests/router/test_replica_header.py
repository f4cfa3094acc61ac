"""Which replica answered, and the request's id: on the response once, whoever puts it there."""

import httpx
import pytest
from edge_fakes import MODEL, FakeBackend, make_service, says
from edge_server import serving
from starlette.testclient import TestClient
from test_http_api import CHAT

from router.http_api.app import create_app


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("chat/completions", {"messages": CHAT}),
        ("completions", {"prompt": ["hello", "the cat"]}),
    ],
)
def test_a_response_names_its_replica(
    is_stream: bool, path: str, prompt: dict[str, object]
) -> None:
    with serving(make_service(FakeBackend(says("x")))) as url:
        body = {"model": MODEL, "stream": is_stream, **prompt}
        response = httpx.post(f"{url}/v1/{path}", json=body)
        assert response.status_code == 200
        assert response.headers["x-pando-replica"] == "replica-0"
        refused = httpx.post(f"{url}/v1/{path}", json={**body, "model": "nope"})
        assert "x-pando-replica" not in refused.headers


@pytest.mark.parametrize("adds_header", [True, False])
def test_the_request_id_header_is_added_only_where_nobody_else_does(adds_header: bool) -> None:
    app = create_app(make_service(FakeBackend(says("x"))), adds_request_id_header=adds_header)
    client = TestClient(app, client=("127.0.0.1", 5000))
    response = client.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": CHAT},
        headers={"x-request-id": "mine"},
    )
    assert response.json()["id"].endswith("mine")
    assert response.headers.get_list("x-request-id") == (["mine"] if adds_header else [])
