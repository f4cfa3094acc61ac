"""A Gateway without API keys answers this machine only."""

import asyncio
import ipaddress

import httpx
import pytest
from edge_fakes import MODEL, FakeBackend, make_service, says
from edge_server import TENANCY
from hypothesis import given
from hypothesis import strategies as st

from router.http_api.app import create_app
from router.loopback import address_of_peer, check_is_local, is_loopback
from router.options import TenancyOptions
from workers.errors import PermissionDenied


def ask(client: tuple[str, int] | None, tenancy: TenancyOptions | None = None) -> httpx.Response:
    """A completion as a client with this address would get it."""
    app = create_app(make_service(FakeBackend(says("x")), tenancy=tenancy))

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=client)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://pando") as session:
            return await session.post(
                "/v1/completions",
                json={"model": MODEL, "prompt": "hello"},
                headers={"x-api-key": "key-a", "x-request-id": "mine"},
            )

    return asyncio.run(asked())


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
def test_this_machine_is_answered(address: str) -> None:
    assert ask((address, 5000)).status_code == 200


@pytest.mark.parametrize(
    "address", ["10.1.2.3", "192.0.2.7", "fd00::2", "::ffff:10.0.0.1", "0.0.0.0", "localhost", ""]
)
def test_others_are_refused_and_told_what_to_configure(address: str) -> None:
    response = ask((address, 5000))
    assert response.status_code == 403
    assert response.headers["x-request-id"] == "mine"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("permission_error", "permission_denied")
    assert f"not {address}" in error["message"]
    assert "tenancy.keys" in error["message"]


def test_a_client_whose_address_is_unknown_is_refused() -> None:
    assert ask(None).status_code == 403


def test_with_keys_anybody_may_ask() -> None:
    assert ask(("192.0.2.7", 5000), TENANCY).status_code == 200


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1"),
        ("ipv4:192.0.2.7:5000", "192.0.2.7"),
        ("ipv6:[::1]:5000", "::1"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:%5Bfd00::2%5D:5000", "fd00::2"),
        ("unix:", "127.0.0.1"),
        ("unix:/run/pando.sock", "127.0.0.1"),
        ("vsock:3:5000", None),
        ("127.0.0.1:5000", None),
        ("", None),
    ],
)
def test_grpc_names_of_peers(peer: str, address: str | None) -> None:
    assert address_of_peer(peer) == address


@given(st.ip_addresses())
def test_only_loopback_addresses_pass(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    brackets = f"[{address}]" if address.version == 6 else str(address)
    assert address_of_peer(f"ipv{address.version}:{brackets}:1") == str(address)
    in_network = any(
        address in ipaddress.ip_network(network)
        for network in ("127.0.0.0/8", "::1/128", "::ffff:127.0.0.0/104")
        if ipaddress.ip_network(network).version == address.version
    )
    assert is_loopback(str(address)) == in_network


def test_a_long_address_does_not_fill_the_message() -> None:
    with pytest.raises(PermissionDenied) as caught:
        check_is_local("9" * 10_000)
    assert len(caught.value.message) < 300
