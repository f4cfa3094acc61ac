"""`pando status`: the replicas, the prefix index and the router of a running cluster."""

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from cluster.cli.output import (
    Output,
    OutputOption,
    console,
    drawn_table,
    expected_failures,
    percent,
    plain,
    show_json,
    show_table,
)
from cluster.client import Client
from cluster.config import client_api_key
from cluster.status import ClusterStatus, ReplicaStatus

DEFAULT_URL = "http://127.0.0.1:8000"
UrlOption = Annotated[str, typer.Option("--url", help="Where the cluster answers HTTP.")]
# Short, so that a row with the longest usual values fits into 80 characters.
_COLUMNS = (
    "replica", "epoch", "device", "kv", "run", "wait", "pool", "cached", "hits", "requests",
)  # fmt: skip
_NUMBERS = _COLUMNS[4:]
_STATUS_TIMEOUT_S = 10.0


def status(
    url: UrlOption = DEFAULT_URL,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="An operator's key; else PANDO_API_KEY.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between two looks.")
    ] = 2.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show replicas, prefix index and router of a running cluster."""
    with (
        expected_failures("status"),
        Client(url, api_key or client_api_key(), timeout_s=_STATUS_TIMEOUT_S) as client,
    ):
        if not watch:
            _show(client.status(), output, is_compact=False)
            return
        try:
            _watch(client, interval, output)
        except KeyboardInterrupt:
            return  # the way to end it


def _watch(client: Client, interval_s: float, output: Output) -> None:
    if output is Output.TEXT and console().is_terminal:
        with Live(_drawn(client.status()), console=console(), auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(_drawn(client.status()), refresh=True)
    while True:
        _show(client.status(), output, is_compact=True)
        time.sleep(interval_s)


def _show(now: ClusterStatus, output: Output, *, is_compact: bool) -> None:
    if output is Output.JSON:
        show_json(as_json(now), is_compact=is_compact)
        return
    show_table(_COLUMNS, _rows(now.replicas), _NUMBERS)
    console().print("\n".join(("", *_lines(now))))


def _drawn(now: ClusterStatus) -> Group:
    return Group(drawn_table(_COLUMNS, _rows(now.replicas), _NUMBERS), Text("\n".join(_lines(now))))


def as_json(now: ClusterStatus) -> dict[str, object]:
    """As the cluster said it, with the shares that the table shows."""
    replicas = [
        replica.model_dump()
        | plain(
            {
                "used_share": replica.used_share,
                "cached_share": replica.cached_share,
                "hit_rate": replica.hit_rate,
            }
        )
        for replica in now.replicas
    ]
    return now.model_dump() | {"replicas": replicas}


def _rows(replicas: Sequence[ReplicaStatus]) -> list[list[str]]:
    return [
        [
            replica.replica_id,
            replica.epoch_short,
            replica.device,
            replica.kv_dtype_shown,
            str(replica.num_running),
            str(replica.num_waiting),
            percent(replica.used_share),
            percent(replica.cached_share),
            percent(replica.hit_rate),
            str(replica.requests_total),
        ]
        for replica in replicas
    ]


def _lines(now: ClusterStatus) -> list[str]:
    index, router = now.index, now.router
    models = ", ".join(sorted({replica.model for replica in now.replicas})) or "no replica answers"
    lost = f", {router.replicas_lost_total} replicas lost" if router.replicas_lost_total else ""
    away = "" if index.is_connected else ", server away"
    routed, delivered = router.routed_hit_tokens_total, router.delivered_hit_tokens_total
    return [
        f"model   {models}",
        f"index   {index.mode}, {index.num_entries} entries{away}",
        f"router  {router.num_open} open, {router.decisions_total} decisions, "
        f"{router.retries_total} retries{lost}; hit tokens foreseen {routed}, delivered {delivered}",
    ]
