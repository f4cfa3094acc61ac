"""API keys, salts, and what configuration is refused."""

import hashlib
import hmac

import pytest
from pydantic import SecretStr, ValidationError

from router.options import GatewayOptions, TenancyOptions, TenantKey
from router.tenancy import Tenants, key_from_headers, salt_of
from workers.errors import PermissionDenied, Unauthenticated

SECRET = "a secret of sixteen"


def _tenants() -> Tenants:
    digest = hashlib.sha256(b"key-b").hexdigest()
    return Tenants(
        TenancyOptions(
            secret=SecretStr(SECRET),
            keys=(
                TenantKey(tenant="a", key=SecretStr("key-a")),
                TenantKey(tenant="a", key=SecretStr("key-a2")),
                TenantKey(tenant="b", key_sha256=digest, is_admin=True),
            ),
        )
    )


def test_keys_lead_to_tenants() -> None:
    tenants = _tenants()
    assert tenants.resolve("key-a").id == "a"
    assert tenants.resolve("key-a2") == tenants.resolve("key-a")
    assert tenants.resolve("key-b").id == "b"
    assert tenants.resolve("key-a").salt != tenants.resolve("key-b").salt
    for key in (None, "", "key-c", "key-a ", "k" * 10_000, "\ud800"):
        with pytest.raises(Unauthenticated):
            tenants.resolve(key)
    with pytest.raises(PermissionDenied, match="'a'"):
        tenants.resolve_admin("key-a")
    assert tenants.resolve_admin("key-b").is_admin


def test_without_keys_everybody_is_local() -> None:
    tenants = Tenants(TenancyOptions())
    assert tenants.resolve(None) == tenants.resolve("anything")
    assert tenants.resolve_admin(None).id == "local"
    assert Tenants(TenancyOptions()).resolve(None).salt == tenants.resolve(None).salt


def test_salt_is_an_hmac_of_the_length_prefixed_id() -> None:
    message = b"pando-tenant-salt-v1" + (4).to_bytes(8, "little") + b"acme"
    expected = hmac.new(b"secret", message, hashlib.sha256).digest()
    assert salt_of(b"secret", "acme") == expected
    assert salt_of(b"another", "acme") != expected
    assert salt_of(b"secret", "acm") != expected


def test_salt_and_secret_do_not_show() -> None:
    tenant = _tenants().resolve("key-a")
    assert repr(tenant.salt) not in repr(tenant)
    assert SECRET not in repr(TenancyOptions(secret=SecretStr(SECRET)))


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "expected"),
    [
        ("Bearer abc", None, "abc"),
        ("bearer  abc ", "other", "abc"),
        ("Basic abc", "other", "other"),
        ("Bearer", None, None),
        (None, " abc ", "abc"),
        (None, None, None),
    ],
)
def test_key_from_headers(
    authorization: str | None, x_api_key: str | None, expected: str | None
) -> None:
    assert key_from_headers(authorization, x_api_key) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": [{"tenant": "a", "key": "k"}]}, "secret is not"),
        ({"secret": "short"}, "at least 16"),
        ({"secret": SECRET, "keys": [{"tenant": "a b", "key": "k"}]}, "'a b'"),
        ({"secret": SECRET, "keys": [{"tenant": "a"}]}, "exactly one"),
        ({"secret": SECRET, "keys": [{"tenant": "a", "key": ""}]}, "empty"),
        ({"secret": SECRET, "keys": [{"tenant": "a", "key_sha256": "XY"}]}, "64 lower-case"),
        ({"secrets": SECRET}, "secrets"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TenancyOptions.model_validate(options)


def test_one_key_for_two_tenants_is_refused() -> None:
    keys = (
        TenantKey(tenant="a", key=SecretStr("k")),
        TenantKey(tenant="b", key_sha256=hashlib.sha256(b"k").hexdigest()),
    )
    with pytest.raises(ValueError, match="'a' and 'b'"):
        Tenants(TenancyOptions(secret=SecretStr(SECRET), keys=keys))


def test_unknown_gateway_option_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_inflight"):
        GatewayOptions.model_validate({"max_inflight": 3})
