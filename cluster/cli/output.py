"""How commands speak: tables for people, JSON for programs, failures as one line on stderr."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.client import ClientError
from cluster.config import ConfigError

_GAP = "  "


class Output(StrEnum):
    """What `--output` takes."""

    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="text or json.")]


def console() -> Console:
    """Standard output as it is now; long lines are left to the terminal."""
    return Console(soft_wrap=True, highlight=False, markup=False)


def show_json(value: object, *, is_compact: bool = False) -> None:
    """Print `value`; compact is one line, for a stream of them."""
    indent = None if is_compact else 2
    sys.stdout.write(json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    """Print a table: styled on a terminal, plain aligned columns elsewhere.

    Args:
        right: the columns to align to the right.
    """
    out = console()
    if out.is_terminal:
        out.print(drawn_table(columns, rows, right))
    else:
        out.print("\n".join(_aligned(columns, rows, right)))


def drawn_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> Table:
    # No frame: its characters are better spent on columns.
    table = Table(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    for row in rows:
        # Text and not str: a name in brackets is no markup.
        table.add_row(*(Text(cell) for cell in row))
    return table


def _aligned(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> Iterator[str]:
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        )
        yield _GAP.join(cells).rstrip()


def fail(verb: str, message: str) -> NoReturn:
    """Say on stderr what went wrong, one line for each fault, and end with exit code 1."""
    err = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for line in message.splitlines() or [""]:
        err.print(f"pando {verb}: {line}")
    raise typer.Exit(1)


@contextmanager
def expected_failures(verb: str) -> Iterator[None]:
    """Failures that are nobody's bug end the command in one line; all others keep their traceback."""
    try:
        yield
    except (ConfigError, ClientError) as error:
        fail(verb, str(error))


def percent(share: float) -> str:
    return f"{share * 100:.0f}%"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """For JSON: seconds and shares with four digits after the point, which is all they are good for."""
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
