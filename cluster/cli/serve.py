"""`pando serve`: a whole cluster in the foreground, until Ctrl-C."""

import secrets
import shlex
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.config import ClusterConfig, ConfigError, load_config

DEMO_TENANTS = ("acme", "globex")
_QUESTION = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'


def serve(
    config: Annotated[
        Path | None, typer.Option(help="YAML: Pando's tree, or a Ray Serve config.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A hub id, a directory, or a .gguf file.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="How many replicas.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="auto or fp8_e4m3.")] = None,
    host: Annotated[str | None, typer.Option(help="Address for HTTP.")] = None,
    port: Annotated[int | None, typer.Option(help="Port for HTTP.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port for gRPC.")] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="redis:// or rediss://; without it an embedded Valkey runs.")
    ] = None,
    demo_tenants: Annotated[
        bool,
        typer.Option("--demo-tenants", help="Two tenants with keys demo-acme and demo-globex."),
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any key: section.key=value.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Deploy to this Ray cluster (`auto`) instead of a private one."),
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show the logs of every process.")] = False,
) -> None:
    """Run a cluster until Ctrl-C, then end exactly what was started."""
    flags: dict[str, object] = {
        "model.name": model,
        "model.kv_dtype": kv_dtype,
        "replicas.num_replicas": replicas,
        "listen.host": host,
        "listen.http_port": port,
        "listen.grpc_port": grpc_port,
        "index.url": redis_url,
    }
    if demo_tenants:
        flags |= _demo_tenancy()
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        tree = load_config(config, flags=flags, overrides=set_ or [])
        _run(tree, address, verbose)
    except KeyboardInterrupt:
        errors.print("interrupted")
        raise typer.Exit(130) from None
    except ConfigError as error:
        errors.print(f"pando serve: {error}", markup=False)
        raise typer.Exit(1) from None


def _run(config: ClusterConfig, address: str | None, is_verbose: bool) -> None:
    # Here and not above: these bring torch and ray along, which `pando --help` need not wait for.
    from cluster.local import ClusterError, running_cluster
    from workers.model_store import ModelUnavailable

    console = Console(soft_wrap=True, highlight=False)
    wanted = threading.Event()
    try:
        # Once, with a progress bar, instead of in every replica behind one.
        _fetch_model(config, console)
        console.print(f"starting {config.replicas.num_replicas} replicas …")
        with running_cluster(config, address=address, is_verbose=is_verbose):
            _end_on_signals(wanted)
            console.print(_ready(config), markup=False)
            wanted.wait()
            console.print("ending …")
    except (ClusterError, ModelUnavailable, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        Console(stderr=True, soft_wrap=True).print(f"pando serve: {error}", markup=False)
        raise typer.Exit(1) from None


def _fetch_model(config: ClusterConfig, console: Console) -> None:
    from workers.model_store import resolve_model
    from workers.models.spec import ModelSpec

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("looking for the model", total=None)

        def report(stage: str, done_bytes: int, total_bytes: int | None) -> None:
            bar.update(task, description=stage, completed=done_bytes, total=total_bytes)

        model_dir = resolve_model(
            config.model.name,
            revision=config.model.revision,
            cache_dir=config.model_cache_dir,
            progress=report,
        )
    # An architecture that no replica could run is refused before any starts.
    ModelSpec.from_dir(model_dir)


def _end_on_signals(wanted: threading.Event) -> None:
    def end(_signal: int, _frame: FrameType | None) -> None:
        wanted.set()

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)


def _demo_tenancy() -> dict[str, object]:
    keys = [
        {"tenant": name, "key": f"demo-{name}", "is_admin": name == DEMO_TENANTS[0]}
        for name in DEMO_TENANTS
    ]
    return {"tenancy.secret": secrets.token_hex(32), "tenancy.keys": keys}


def _ready(config: ClusterConfig) -> str:
    listen = config.listen
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    url = f"http://{host}:{listen.http_port}"
    pando = shlex.quote(sys.argv[0])
    key = ""
    if config.tenancy.keys:
        key = " -H 'Authorization: Bearer <your key>'"
        plain = config.tenancy.keys[0].key
        if plain is not None and plain.get_secret_value() == f"demo-{DEMO_TENANTS[0]}":
            key = f" -H 'Authorization: Bearer demo-{DEMO_TENANTS[0]}'"
    return f"""
Pando is ready: {config.replicas.num_replicas} replicas of {config.model.name}
  HTTP  {url}/v1   (OpenAI-compatible)
  gRPC  {host}:{listen.grpc_port}   (pando.v1.Inference)

Try, in another terminal:
  curl -s {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{_QUESTION}'
  {pando} demo --url {url}

Ctrl-C ends it.
"""
