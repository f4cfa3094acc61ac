"""`pando cache`: how the KV caches are reused, and what more or less memory would make of it."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.cache_status import CacheStatus, Curve
from cluster.cli.cache_plot import plotted, save_png
from cluster.cli.cache_replay import REPLAY_SCALES, PolicyResult, known_policies, replay_policies
from cluster.cli.output import (
    Output,
    OutputOption,
    console,
    expected_failures,
    fail,
    percent,
    plain,
    show_json,
    show_table,
)
from cluster.cli.status import DEFAULT_URL, UrlOption
from cluster.client import Client
from cluster.config import client_api_key
from cluster.status import ClusterStatus

ApiKeyOption = Annotated[
    str | None, typer.Option("--api-key", help="An operator's key; else PANDO_API_KEY.")
]
_COLUMNS = ("lookups of", "1/2x", "1x", "2x", "4x", "now", "lookups")
_SCALES = (0.5, 1.0, 2.0, 4.0)
_TIMEOUT_S = 30.0
_GIB = 2**30

cache_app = typer.Typer(invoke_without_command=True, help="How the KV caches are reused.")


@cache_app.callback()
def cache(
    context: typer.Context,
    url: UrlOption = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Replay the last prompts under every policy.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write the curves to this PNG.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show what the pools hold and hit, and what twice or half the memory would change."""
    if context.invoked_subcommand is not None:
        return
    with expected_failures("cache"), _client(url, api_key) as client:
        now, cluster = client.cache(), client.status()
        results = _replayed(client) if replay else None
        if plot is not None:
            save_png(now, plot)
    if output is Output.JSON:
        replayed = None if results is None else [plain(asdict(result)) for result in results]
        show_json(now.model_dump() | {"replay": replayed})
        return
    _show(now, cluster)
    if results is not None:
        _show_replay(results)


@cache_app.command()
def flush(
    url: UrlOption = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Have every replica forget every cached prefix. Running requests go on."""
    if not is_sure:
        typer.confirm(f"Forget every cached prefix on every replica behind {url}?", abort=True)
    with expected_failures("cache flush"), _client(url, api_key) as client:
        flushed = client.flush_caches()
    if flushed.num_replicas == 0 or flushed.num_cleared < flushed.num_replicas:
        fail(
            "cache flush",
            f"{flushed.num_cleared} of {flushed.num_replicas} replicas said in time that they have",
        )
    if output is Output.JSON:
        show_json(flushed.model_dump())
    else:
        console().print(f"Forgotten on {flushed.num_cleared} replicas.")


def _client(url: str, api_key: str | None) -> Client:
    return Client(url, api_key or client_api_key(), timeout_s=_TIMEOUT_S)


def _replayed(client: Client) -> list[PolicyResult]:
    logs = client.cache_logs().replicas
    with Console(stderr=True).status("") as spinner:
        return replay_policies(logs, known_policies(), lambda name: spinner.update(name))


def _show(now: CacheStatus, cluster: ClusterStatus) -> None:
    console().print("\n".join((*_pool_lines(now, cluster), "")))
    curves = [("all", now.overall), *((tenant.name, tenant) for tenant in now.tenants)]
    show_table(_COLUMNS, [_row(now, *named) for named in curves], _COLUMNS[1:])
    console().print("\n".join(("", *_conclusions(now), "", *plotted(now))))


def _row(now: CacheStatus, name: str, curve: Curve) -> list[str]:
    predicted = [percent(now.at(curve, scale)) for scale in _SCALES]
    return [name, *predicted, percent(curve.measured), f"{curve.num_lookups:,}"]


def _pool_lines(now: CacheStatus, cluster: ClusterStatus) -> Iterator[str]:
    id_to_status = {replica.replica_id: replica for replica in cluster.replicas}
    if not now.replicas:
        yield "no replica answers"
    for replica in now.replicas:
        status = id_to_status.get(replica.replica_id)
        use = (
            f", {percent(status.used_share)} used, {percent(status.cached_share)} cached"
            if status
            else ""
        )
        yield (
            f"{replica.replica_id}  {replica.num_blocks:,} blocks of {replica.block_size} tokens, "
            f"{replica.num_bytes / _GIB:.2f} GiB{use}; last {replica.covered_s / 60:.0f} min, "
            f"1 block in {replica.weight} followed"
        )


def _conclusions(now: CacheStatus) -> Iterator[str]:
    if now.overall.num_lookups == 0:
        yield "Nothing was looked up yet."
        return
    tokens = now.lookup_tokens_per_hour
    here, half, twice = (now.at(now.overall, scale) for scale in (1.0, 0.5, 2.0))
    yield (
        f"Twice the memory would answer {percent(twice - here)} more of the lookups: "
        f"{(twice - here) * tokens:,.0f} prompt tokens an hour not computed again."
    )
    yield f"Half of it would answer {percent(here - half)} less: {(here - half) * tokens:,.0f} tokens an hour."
    yield "Predicted for least-recently-used eviction; `now` is what the pools as they are have answered."


def _show_replay(results: Sequence[PolicyResult]) -> None:
    columns = ("policy", *(f"{scale:g}x" for scale in REPLAY_SCALES))
    rows = [[r.policy, *(f"{ratio * 100:.1f}%" for ratio in r.hit_ratios)] for r in results]
    console().print("\nThe last prompts again, from empty pools:")
    show_table(columns, rows, columns[1:])
