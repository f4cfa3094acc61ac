"""Checks of what the configuration names: ports, the index's server, the model's files. Each changes nothing."""

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cluster.cli.finding import GIB, Finding, Verdict
from cluster.client import Client, ClientError
from cluster.config import ClusterConfig

_PING_TIMEOUT_S = 3.0


def check_port(name: str, key: str, host: str, port: int) -> Finding:
    """Whether `pando serve` could listen there; a Pando that does already is no failure.

    Args:
        key: the configuration's, to change it by.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: a connection that still lingers is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            found = f"cannot listen on {host}:{port}: {error.strerror}"
            return Finding(name, Verdict.FAILED, found, f"free it, or set {key} to another port")
    return Finding(name, Verdict.OK, f"{port} is free")


def check_http_port(config: ClusterConfig, timeout_s: float = _PING_TIMEOUT_S) -> Finding:
    """As `check_port`, and who it is that listens there, if he says so within `timeout_s`."""
    listen = config.listen
    finding = check_port("http port", "listen.http_port", listen.host, listen.http_port)
    if finding.verdict is Verdict.OK:
        return finding
    version = _version_of_running_pando(listen.host, listen.http_port, timeout_s)
    if version is None:
        return finding
    found = f"a Pando ({version}) runs on {listen.http_port} already"
    return Finding("http port", Verdict.NOTE, found)


def check_grpc_port(config: ClusterConfig, *, is_running: bool) -> Finding:
    """`is_running`: a Pando holds the HTTP port, so the gRPC port is most likely its own too."""
    # Serve's gRPC proxy listens on every interface, whatever listen.host says.
    any_host = "0.0.0.0"  # noqa: S104
    finding = check_port("grpc port", "listen.grpc_port", any_host, config.listen.grpc_port)
    if finding.verdict is Verdict.FAILED and is_running:
        return Finding("grpc port", Verdict.NOTE, f"{config.listen.grpc_port} is in use")
    return finding


def check_index(config: ClusterConfig) -> Finding:
    """Whether the server of the prefix index answers PING."""
    # Here, since the check alone needs it: it brings a network client along.
    from kvstore.prefix_index.redis_store import is_answering

    if config.index.url is None:
        return Finding("index", Verdict.OK, "an embedded Valkey, started with the cluster")
    url = config.index.url.get_secret_value()
    parts = urlsplit(url)
    # Never the whole URL: it may hold a password.
    shown = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}"
    if is_answering(url, _PING_TIMEOUT_S):
        return Finding("index", Verdict.OK, f"{shown} answers")
    advice = "start it, or mend index.url (host, port, password, TLS)"
    return Finding("index", Verdict.FAILED, f"{shown} does not answer PING", advice)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is here of a model already. `weights_bytes` None: nothing, it has to be fetched first."""

    finding: Finding
    weights_bytes: int | None = None


def check_model(config: ClusterConfig) -> ModelFiles:
    """Whether the model's files are here; a hub id that is not yet is fetched at the first start."""
    name = config.model.name
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if path.is_file():
            size = path.stat().st_size
            return ModelFiles(Finding("model", Verdict.OK, f"{name}, {size / GIB:.2f} GiB"), size)
        return ModelFiles(Finding("model", Verdict.FAILED, f"no file {name}", "mend model.name"))
    is_path = path.is_dir()
    for place in [path] if is_path else _cached_places(config):
        size = sum(file.stat().st_size for file in place.glob("*.safetensors"))
        if size and (place / "config.json").is_file():
            return ModelFiles(Finding("model", Verdict.OK, f"{name}, {size / GIB:.2f} GiB"), size)
    if is_path:
        found = f"{name} lacks config.json or *.safetensors"
        return ModelFiles(Finding("model", Verdict.FAILED, found, "mend model.name"))
    found = f"{name} is not in the cache; the first start fetches it"
    return ModelFiles(Finding("model", Verdict.NOTE, found))


def _version_of_running_pando(host: str, port: int, timeout_s: float) -> str | None:
    shown = f"[{host}]" if ":" in host else host
    try:
        with Client(f"http://{shown}:{port}", timeout_s=timeout_s) as client:
            return client.version()
    except ClientError:
        return None


def _cached_places(config: ClusterConfig) -> list[Path]:
    """Where `workers.model_store` keeps a hub id's files, those that exist."""
    cache_dir = config.model_cache_dir
    folder = "models--" + config.model.name.replace("/", "--")
    snapshots = sorted((cache_dir / "hub" / folder / "snapshots").glob("*"))
    return [*snapshots, cache_dir / "converted" / config.model.name.rpartition("/")[2]]
