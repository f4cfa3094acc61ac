"""`pando config`: what the configuration comes to."""

from pathlib import Path
from typing import Annotated

import typer
import yaml

from cluster.cli.output import Output, OutputOption, console, expected_failures, show_json
from cluster.config import ClusterConfig, load_config

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="YAML: Pando's tree, or a Ray Serve config.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Any key: section.key=value; may be repeated.")
]
config_app = typer.Typer(no_args_is_help=True, help="The configuration.")


@config_app.callback()
def _group() -> None:
    """The configuration."""


@config_app.command()
def show(
    config: ConfigOption = None, set_: SetOption = None, output: OutputOption = Output.TEXT
) -> None:
    """Print every key and its value, as file, environment and flags make them; secrets are masked."""
    with expected_failures("config show"):
        tree = load_config(config, overrides=set_ or [])
    if output is Output.JSON:
        show_json(tree.dump())
    else:
        console().print(as_yaml(tree), end="")


def as_yaml(config: ClusterConfig) -> str:
    """A file that `--config` takes, but for the secrets."""
    return yaml.safe_dump(config.dump(), sort_keys=False, allow_unicode=True)
