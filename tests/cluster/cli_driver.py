"""Runs `pando` commands in this process, against a real Gateway on loopback with toy replicas behind it."""

import edge_path  # noqa: F401, I001 (before what it makes importable)
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from edge_fakes import FakeBackend, make_service, says
from edge_server import serving
from pydantic import SecretStr
from typer.testing import CliRunner

from cluster.cli.main import app
from kvstore.prefix_index.mirror import IndexMirror
from kvstore.prefix_index.options import IndexOptions
from router.options import TenancyOptions, TenantKey
from router.policy import RoutingPolicy
from router.ray_backend import RayBackend
from workers.protocol import ReplicaReport

DEMO_TENANCY = TenancyOptions(
    secret=SecretStr("s" * 32),
    keys=(
        TenantKey(tenant="acme", key=SecretStr("demo-acme"), is_admin=True),
        TenantKey(tenant="globex", key=SecretStr("demo-globex")),
    ),
)


class ReportingHandle:
    """A Serve handle whose every replica answers `broadcast` at once."""

    def __init__(self, reports: list[ReplicaReport]) -> None:
        self._reports = reports

    def options(self, **_: object) -> "ReportingHandle":
        return self

    def broadcast(self, _method: str, *_arguments: object) -> "ReportingHandle":
        return self

    async def results_async(self, **_: object) -> list[ReplicaReport]:
        return self._reports


class ReportingBackend(FakeBackend):
    """Toy replicas whose status is put together by the very code that a real Gateway runs."""

    async def status(self) -> dict[str, object]:
        handle: Any = ReportingHandle(await self.reports())
        follower: Any = SimpleNamespace(is_connected=True)
        policy = RoutingPolicy(IndexMirror(IndexOptions()))
        return await RayBackend(handle, policy, follower).status()


def toy_backend(**settings: Any) -> ReportingBackend:
    return ReportingBackend(says("nine in the morning"), max_model_len=8192, **settings)


@contextmanager
def gateway(
    backend: FakeBackend | None = None, tenancy: TenancyOptions | None = None
) -> Iterator[str]:
    with serving(make_service(backend or toy_backend(), tenancy=tenancy)) as url:
        yield url


@dataclass(frozen=True)
class Run:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def parsed(self) -> Any:
        return json.loads(self.stdout)


def pando(*args: str) -> Run:
    """One command. A failure that nobody expected is raised here."""
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    return Run(result.exit_code, result.stdout, result.stderr)


def failure_of(*args: str) -> str:
    """The one line that a command, expected to fail, has to say; nothing goes to stdout."""
    run = pando(*args)
    assert (run.exit_code, run.stdout) == (1, ""), run
    (line,) = run.stderr.splitlines()
    return line
