"""Who is on this machine: a Gateway without API keys answers nobody else."""

from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

from workers.errors import PermissionDenied


def check_is_local(client: str | None) -> None:
    """Refuse a client that is not on this machine.

    Args:
        client: its IP address, as the server that took the connection saw it; None when it is not known,
            which counts as far away.

    Raises:
        PermissionDenied: it is not a loopback address.
    """
    if client is None or not is_loopback(client):
        shown = "a client of unknown address" if client is None else f"not {client[:64]}"
        raise PermissionDenied(
            f"no API keys are configured, so only clients on this machine are answered, {shown}; to serve "
            "others, configure tenancy.secret and tenancy.keys"
        )


def is_loopback(address: str) -> bool:
    """Whether `address` is an IP address of this machine's loopback; names are not looked up."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped.is_loopback
    return parsed.is_loopback


def address_of_peer(peer: str) -> str | None:
    """The IP address in gRPC's name for a peer; None when it holds none.

    `ipv4:127.0.0.1:5000`, `ipv6:[::1]:5000` (its brackets may be percent-encoded), and `unix:/path`, whose
    client is always on this machine and is given as `127.0.0.1`.
    """
    scheme, _, rest = peer.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return "127.0.0.1"
    if scheme not in ("ipv4", "ipv6"):
        return None
    host, _, _port = unquote(rest).rpartition(":")
    return host.removeprefix("[").removesuffix("]") or None
