"""The `pando` command. No verb imports torch or ray before it needs them."""

from importlib import metadata
from typing import Annotated

import typer

from cluster.cli.cache import cache_app
from cluster.cli.config import config_app
from cluster.cli.demo import demo
from cluster.cli.doctor import doctor
from cluster.cli.serve import serve
from cluster.cli.status import status

app = typer.Typer(
    name="pando",
    help="Multi-tenant LLM serving on Ray: replicas that share one tree of prompt prefixes.",
    no_args_is_help=True,
    # Local variables hold keys.
    pretty_exceptions_enable=False,
)


def _show_version(is_wanted: bool) -> None:
    if not is_wanted:
        return
    try:
        print(f"pando {metadata.version('pando')}")
    except metadata.PackageNotFoundError:  # run from a bare checkout
        print("pando, version unknown: it is not installed")
    raise typer.Exit


@app.callback()
def _pando(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


app.command()(serve)
app.command()(demo)
app.command()(status)
app.command()(doctor)
app.add_typer(cache_app, name="cache")
app.add_typer(config_app, name="config")

if __name__ == "__main__":
    app()
