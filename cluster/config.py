"""The one configuration tree, parsed once and frozen. The only file that reads the environment.

Later wins:  defaults  <  the YAML file  <  PANDO_<SECTION>__<KEY> variables  <  flags (`section.key=value`)

A file may be the tree itself or a Ray Serve config (`applications: …`) whose first application's `args` are the
tree; its `http_options` and `grpc_options` then say where to listen. Unknown keys and bad values are errors that
name the key.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from kvstore.prefix_index.options import IndexOptions
from router.options import GatewayOptions, TenancyOptions
from workers.options import EngineOptions, ModelOptions

ENV_PREFIX = "PANDO_"
# Variables with the prefix that are not keys of the tree.
_ENV_CONFIG_FILE = "PANDO_CONFIG"
_ENV_API_KEY = "PANDO_API_KEY"
# Ray Serve's own switch: HAProxy then stands between clients and Gateways, on all interfaces.
_ENV_HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
_MAX_FILE_BYTES = 4 * 2**20
_LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


class ConfigError(ValueError):
    """The configuration is wrong; the message says which key, and why."""


class ReplicaOptions(BaseModel):
    """How many replicas, and what Ray reserves for each.

    Attributes:
        num_gpus: None takes one GPU, an equal share where replicas outnumber them, or none where none is.
        max_ongoing_requests: Serve's backstop; the engine queues on its own long before.
        health_check_period_s: how often Serve asks a replica whether its step loop runs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_replicas: PositiveInt = 2
    num_cpus: NonNegativeFloat = 1.0
    num_gpus: NonNegativeFloat | None = None
    max_ongoing_requests: PositiveInt = 1024
    health_check_period_s: PositiveFloat = 5.0
    graceful_shutdown_timeout_s: NonNegativeFloat = 20.0


class ListenOptions(BaseModel):
    """Where Ray Serve's proxies listen. Under `serve deploy` Serve's own options say it instead."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    http_port: int = Field(default=8000, ge=1, le=65535)
    grpc_port: int = Field(default=9000, ge=1, le=65535)


class IngressOptions(BaseModel):
    """How many Gateways, and what Ray reserves for each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_gateways: PositiveInt = 1
    num_cpus: NonNegativeFloat = 0.0
    max_ongoing_requests: PositiveInt = 1024


class ClusterConfig(BaseModel):
    """All that can be set.

    Attributes:
        app_name: Ray Serve's name for the application.
        cache_dir: for downloaded and converted models; None is `$XDG_CACHE_HOME/pando` or `~/.cache/pando`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    app_name: str = Field(default="pando", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    cache_dir: Path | None = None
    model: ModelOptions = ModelOptions()
    engine: EngineOptions = EngineOptions()
    replicas: ReplicaOptions = ReplicaOptions()
    gateway: GatewayOptions = GatewayOptions()
    ingress: IngressOptions = IngressOptions()
    index: IndexOptions = IndexOptions()
    tenancy: TenancyOptions = TenancyOptions()
    listen: ListenOptions = ListenOptions()

    @model_validator(mode="after")
    def _open_to_all_is_loopback_only(self) -> Self:
        if not self.tenancy.keys and self.listen.host not in _LOOPBACK_HOSTS:
            raise ValueError(
                f"listen.host is {self.listen.host!r} but tenancy.keys is empty: without API keys everybody is "
                "the tenant `local`, so Pando then listens on loopback only"
            )
        return self

    @property
    def model_cache_dir(self) -> Path:
        if self.cache_dir is not None:
            return self.cache_dir
        root = os.environ.get("XDG_CACHE_HOME")
        return (Path(root) if root else Path.home() / ".cache") / "pando"

    def dump(self) -> dict[str, Any]:
        """The tree as plain values, secrets masked."""
        return self.model_dump(mode="json")


def load_config(
    path: Path | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> ClusterConfig:
    """Read the tree from a file, the environment and flags.

    Args:
        path: YAML; None takes the file that PANDO_CONFIG names, or no file.
        flags: `section.key` → value, taken as it is; None counts as not given.
        overrides: `section.key=value`, the value in YAML; these win over `flags`.
        env: instead of the process's environment.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a value out of range.
    """
    env = os.environ if env is None else env
    if path is None and (named := env.get(_ENV_CONFIG_FILE)):
        path = Path(named)
    tree = _read_file(path) if path is not None else {}
    return parse_config(tree, flags=flags, overrides=overrides, env=env)


def parse_config(
    tree: Mapping[str, Any],
    *,
    flags: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> ClusterConfig:
    """As `load_config`, from an already parsed tree."""
    env = os.environ if env is None else env
    merged = _copied(tree)
    for name, value in sorted(env.items()):
        if name.startswith(ENV_PREFIX) and name not in (_ENV_CONFIG_FILE, _ENV_API_KEY):
            keys = name.removeprefix(ENV_PREFIX).lower().split("__")
            _set(merged, keys, _parsed(value, name), name)
    for name, flag in (flags or {}).items():
        if flag is not None:
            _set(merged, name.split("."), flag, name)
    for override in overrides:
        name, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"{override!r} is not of the form section.key=value")
        _set(merged, name.split("."), _parsed(value, name), name)
    try:
        config = ClusterConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error
    if not config.tenancy.keys and env.get(_ENV_HA_PROXY) == "1":
        raise ConfigError(
            f"tenancy.keys is empty: without API keys only this machine is answered, and {_ENV_HA_PROXY}=1 "
            "hides from the Gateways who asks"
        )
    return config


def client_api_key(env: Mapping[str, str] | None = None) -> str | None:
    """The key that commands send to a running cluster unless told another: PANDO_API_KEY."""
    return (os.environ if env is None else env).get(_ENV_API_KEY) or None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a mapping, not {type(document).__name__}")
    return _from_serve_config(document, path) if "applications" in document else document


def _from_serve_config(document: dict[str, Any], path: Path) -> dict[str, Any]:
    applications = document["applications"]
    if (
        not isinstance(applications, list)
        or len(applications) != 1
        or not isinstance(applications[0], dict)
    ):
        raise ConfigError(f"{path}: applications must hold exactly one application")
    tree = _copied(applications[0].get("args") or {})
    http, grpc = document.get("http_options") or {}, document.get("grpc_options") or {}
    listen = {
        "host": http.get("host"),
        "http_port": http.get("port"),
        "grpc_port": grpc.get("port"),
    }
    tree["listen"] = {key: value for key, value in listen.items() if value is not None}
    if name := applications[0].get("name"):
        tree["app_name"] = name
    return tree


def _parsed(value: str, name: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {value!r} is not YAML") from error


def _set(tree: dict[str, Any], keys: Sequence[str], value: Any, name: str) -> None:
    for key in keys[:-1]:
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{name}: {key} is not a section")
        tree = child
    tree[keys[-1]] = value


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copied(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _explain(error: ValidationError) -> str:
    """One line for each fault: the key's path, and what is wrong. Values of secrets never show."""
    lines: list[str] = []
    for fault in error.errors(include_url=False, include_input=True):
        key = ".".join(str(part) for part in fault["loc"]) or "configuration"
        message = fault["msg"].removeprefix("Value error, ")
        given = fault["input"]
        is_plain = isinstance(given, str | int | float | bool) and not _is_secret(key)
        if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            message = "there is no such key"
        elif is_plain:
            message = f"{message} (given: {given!r})"
        lines.append(f"{key}: {message}")
    return "\n".join(lines)


def _is_secret(key: str) -> bool:
    last = key.rpartition(".")[2]
    return last in ("secret", "key", "key_sha256", "url")
