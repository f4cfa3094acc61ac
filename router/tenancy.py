"""From an API key to a tenant and its salt. Nothing in a request's body has a say in it."""

import hashlib
import hmac
from dataclasses import dataclass, field

from router.options import MIN_PRIORITY, TenancyOptions, TenantKey
from workers.errors import PermissionDenied, Unauthenticated

LOCAL_TENANT_ID = "local"
_SALT_TAG = b"pando-tenant-salt-v1"
_MAX_KEY_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer. `salt` roots every prefix hash of his requests, and must not leave the cluster.

    `min_priority` is the most urgent one his requests may have.
    """

    id: str
    salt: bytes = field(repr=False)
    is_admin: bool = False
    min_priority: int = 0


@dataclass(frozen=True, slots=True)
class _KnownKey:
    digest: bytes
    tenant: Tenant


class Tenants:
    """The tenants of `options`, by API key.

    Raises:
        ValueError: two tenants have the same key.
    """

    def __init__(self, options: TenancyOptions) -> None:
        secret = options.secret.get_secret_value().encode() if options.secret else b""
        # On a cluster without keys there is nobody to be kept apart from, so the salt may be public.
        self._local = Tenant(
            LOCAL_TENANT_ID,
            salt_of(secret, LOCAL_TENANT_ID),
            is_admin=True,
            min_priority=MIN_PRIORITY,
        )
        self._known: list[_KnownKey] = []
        digest_to_tenant: dict[bytes, str] = {}
        for key in options.keys:
            digest = _digest_of(key)
            if digest in digest_to_tenant:
                raise ValueError(
                    f"tenants {digest_to_tenant[digest]!r} and {key.tenant!r} have the same key"
                )
            digest_to_tenant[digest] = key.tenant
            salt = salt_of(secret, key.tenant)
            tenant = Tenant(key.tenant, salt, key.is_admin, key.min_priority)
            self._known.append(_KnownKey(digest, tenant))

    @property
    def has_keys(self) -> bool:
        return bool(self._known)

    def all(self) -> tuple[Tenant, ...]:
        """Everybody who can call, each once."""
        if not self._known:
            return (self._local,)
        return tuple({known.tenant.id: known.tenant for known in self._known}.values())

    def resolve(self, key: str | None) -> Tenant:
        """The tenant whose key this is; `local` when no keys are configured, whatever the key.

        Raises:
            Unauthenticated: keys are configured and `key` is missing or not one of them.
        """
        if not self._known:
            return self._local
        if not key:
            raise Unauthenticated(
                "no API key: send it as 'Authorization: Bearer <key>' or in 'x-api-key'"
            )
        found: Tenant | None = None
        if len(key) <= _MAX_KEY_CHARS:
            digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
            # Every entry is compared, so that the time taken does not tell which one came close.
            for known in self._known:
                if hmac.compare_digest(known.digest, digest):
                    found = known.tenant
        if found is None:
            raise Unauthenticated("the API key is not known here")
        return found

    def resolve_admin(self, key: str | None) -> Tenant:
        """As `resolve`, for what only an operator may see.

        Raises:
            Unauthenticated: as `resolve`.
            PermissionDenied: the key is a tenant's, not an operator's.
        """
        tenant = self.resolve(key)
        if not tenant.is_admin:
            raise PermissionDenied(f"tenant {tenant.id!r} has no admin key, which this needs")
        return tenant


def salt_of(secret: bytes, tenant_id: str) -> bytes:
    """HMAC-SHA256 of the tagged, length-prefixed tenant id under the cluster's secret."""
    name = tenant_id.encode()
    return hmac.digest(secret, _SALT_TAG + len(name).to_bytes(8, "little") + name, "sha256")


def key_from_headers(authorization: str | None, x_api_key: str | None) -> str | None:
    """The API key in `Authorization: Bearer …`, else in `x-api-key`, else None."""
    if authorization is not None:
        scheme, _, credentials = authorization.strip().partition(" ")
        if scheme.lower() == "bearer" and credentials.strip():
            return credentials.strip()
    return x_api_key.strip() if x_api_key else None


def _digest_of(key: TenantKey) -> bytes:
    if key.key_sha256 is not None:
        return bytes.fromhex(key.key_sha256)
    assert key.key is not None  # TenantKey has exactly one of the two
    return hashlib.sha256(key.key.get_secret_value().encode()).digest()
