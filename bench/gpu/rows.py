"""What the check's stages write down, one row a figure, kept as they come so that a late failure loses nothing."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["ok", "missed", "failed", ""]


@dataclass(frozen=True)
class Row:
    """One figure, or why there is none.

    Attributes:
        value: in `unit`; None for a fact or a failure, which `note` holds.
        share: of what the device was measured to give, or a ratio to a bound.
        target: what `share` should be at least, or at most where `is_limit`.
    """

    stage: str
    what: str
    value: float | None = None
    unit: str = ""
    share: float | None = None
    target: float | None = None
    is_limit: bool = False
    note: str = ""
    has_failed: bool = False

    @property
    def verdict(self) -> Verdict:
        if self.has_failed:
            return "failed"
        if self.share is None or self.target is None:
            return ""
        is_met = self.share <= self.target if self.is_limit else self.share >= self.target
        return "ok" if is_met else "missed"


class Ledger:
    """Rows of one stage in a file, complete after every row.

    Args:
        path: written anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[Row] = []
        self._save()

    def add(self, row: Row) -> None:
        self._rows.append(row)
        self._save()
        print(_line(row), flush=True)

    def _save(self) -> None:
        self._path.write_text(json.dumps([asdict(row) for row in self._rows]))


def read_rows(path: Path) -> list[Row]:
    """What a stage wrote; nothing when it wrote nothing."""
    if not path.exists():
        return []
    return [Row(**each) for each in json.loads(path.read_text())]


def find_value(rows: Sequence[Row], what: str) -> float | None:
    return next((row.value for row in rows if row.what == what), None)


def as_markdown(rows: Sequence[Row]) -> str:
    """One table; `share` in percent where more is better, as a ratio where it is a limit."""
    lines = [
        "| stage | what | measured | of the most | target | verdict | note |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = (row.stage, row.what, _measured(row), _share(row), _target(row), row.verdict)
        note = row.note.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {' | '.join(cells)} | {note} |")
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    parts = (f"[{row.stage}]", row.what, _measured(row), _share(row), row.verdict, row.note)
    return " ".join(part for part in parts if part)


def _measured(row: Row) -> str:
    return "" if row.value is None else f"{row.value:,.4g} {row.unit}".strip()


def _share(row: Row) -> str:
    if row.share is None:
        return ""
    return f"{row.share:.2f} ×" if row.is_limit else f"{row.share * 100:.0f} %"


def _target(row: Row) -> str:
    if row.target is None:
        return ""
    return f"≤ {row.target:g} ×" if row.is_limit else f"≥ {row.target * 100:.0f} %"
