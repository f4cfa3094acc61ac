"""Results as people and programs read them: plain-text tables, JSON, and PNG charts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cell = str | int | float | bool | None
Points = list[tuple[Cell, float]]
Format = Literal["text", "count", "percent", "ratio", "number", "seconds"]
_FORMAT_TO_SCALE = {"percent": (100, ", %"), "seconds": (1000, ", ms")}


@dataclass(frozen=True, slots=True)
class Column:
    """`key` names it in JSON, `heading` on paper."""

    key: str
    heading: str
    format: Format = "text"


@dataclass(frozen=True, slots=True)
class Chart:
    """Column `y` over column `x`, a line (or a group of bars) for each distinct value of the columns `by`."""

    x: str
    y: tuple[str, ...]
    by: tuple[str, ...] = ()
    kind: Literal["lines", "bars"] = "lines"
    is_log_x: bool = False
    is_log_y: bool = False
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """One table of results.

    Attributes:
        name: of its files.
        notes: what a reader must know to read it, and whether the goals were met.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    chart: Chart | None = None

    def column(self, key: str) -> list[Cell]:
        index = [column.key for column in self.columns].index(key)
        return [row[index] for row in self.rows]


def as_text(table: Table) -> str:
    """Columns under headings; numbers to the right, words to the left."""
    cells = [
        [_shown(cell, column.format) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    headings = [column.heading for column in table.columns]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    lines = [table.title, ""]
    for row in [headings, ["─" * width for width in widths], *cells]:
        padded = (
            text.ljust(width) if column.format == "text" else text.rjust(width)
            for text, width, column in zip(row, widths, table.columns, strict=True)
        )
        lines.append("  " + "  ".join(padded).rstrip())
    return "\n".join([*lines, "", *(f"  {note}" for note in table.notes)]).rstrip() + "\n"


def _shown(cell: Cell, style: Format) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return cell
    match style:
        case "percent":
            return f"{cell * 100:.2f} %"
        case "ratio":
            return f"{cell:.3f}"
        case "number":
            return f"{cell:,.1f}"
        case "seconds":
            return f"{cell * 1000:,.3f} ms"
        case _:
            return f"{cell:,}" if isinstance(cell, int) else f"{cell:g}"


def save(table: Table, folder: Path, made: Mapping[str, str]) -> None:
    """Write NAME.txt, NAME.json and, where there is a chart, NAME.png.

    Args:
        made: where, when and by which command the figures were made; goes into the JSON.
    """
    keys = [column.key for column in table.columns]
    content = {
        "title": table.title,
        "made": dict(made),
        "notes": list(table.notes),
        "rows": [dict(zip(keys, row, strict=True)) for row in table.rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{table.name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False))
    (folder / f"{table.name}.txt").write_text(as_text(table))
    if table.chart is not None:
        _save_chart(table, table.chart, folder / f"{table.name}.png")


def _save_chart(table: Table, chart: Chart, path: Path) -> None:
    from matplotlib.figure import Figure  # only a developer's machine has it

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    key_to_column = {column.key: column for column in table.columns}
    scale, unit = _FORMAT_TO_SCALE.get(key_to_column[chart.y[0]].format, (1, ""))
    label_to_points = _series(table, chart)
    if chart.kind == "bars":
        ticks = list(dict.fromkeys(table.column(chart.x)))
        _draw_bars(axes, ticks, label_to_points, scale)
        shown = [_shown(tick, key_to_column[chart.x].format) for tick in ticks]
        axes.set_xticks(range(len(ticks)), shown)
    else:
        for label, points in label_to_points.items():
            places = [float(x) for x, _ in points if isinstance(x, int | float)]
            axes.plot(places, [scale * y for _, y in points], "o-", label=label)
    if chart.is_log_x:
        axes.set_xscale("log")
    if chart.is_log_y:
        axes.set_yscale("log")
    if chart.limit is not None:
        axes.axhline(scale * chart.limit, color="black", linestyle=":", linewidth=1)
    axes.set_xlabel(key_to_column[chart.x].heading)
    axes.set_ylabel(key_to_column[chart.y[0]].heading + unit)
    axes.set_title(table.title, fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=120)


def _draw_bars(
    axes: "Axes", ticks: list[Cell], label_to_points: Mapping[str, Points], scale: float
) -> None:
    """Side by side at each tick, a bar for every label."""
    width = 0.8 / len(label_to_points)
    for i, (label, points) in enumerate(label_to_points.items()):
        shift = (i - (len(label_to_points) - 1) / 2) * width
        places = [ticks.index(x) + shift for x, _ in points]
        axes.bar(places, [scale * y for _, y in points], width, label=label)


def _series(table: Table, chart: Chart) -> dict[str, Points]:
    """Label → its points, in the table's order; rows without a number are left out."""
    key_to_column = {column.key: column for column in table.columns}
    label_to_points: dict[str, Points] = {}
    for y in chart.y:
        groups: Sequence[list[Cell]] = [table.column(key) for key in chart.by]
        for i, (x, height) in enumerate(zip(table.column(chart.x), table.column(y), strict=True)):
            if not isinstance(height, int | float):
                continue
            parts = [
                f"{key_to_column[key].heading} {_shown(group[i], key_to_column[key].format)}"
                for key, group in zip(chart.by, groups, strict=True)
            ]
            parts += [key_to_column[y].heading] if len(chart.y) > 1 else []
            label_to_points.setdefault(", ".join(parts), []).append((x, height))
    return label_to_points
