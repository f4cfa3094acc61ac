"""Tables on paper, in JSON and as charts, and the command that makes them."""

import json
from pathlib import Path

import pytest

from bench.kv_memory.__main__ import main
from bench.kv_memory.report import Chart, Column, Table, as_text, save

TABLE = Table(
    name="sizes",
    title="Sizes",
    columns=(
        Column("kind", "kind"),
        Column("count", "count", "count"),
        Column("share", "share", "percent"),
        Column("took_s", "took", "seconds"),
        Column("is_met", "met"),
    ),
    rows=(("small", 8, 0.5, 0.0125, True), ("large", 12_000, None, 1.5, None)),
    notes=("a note",),
    chart=Chart("count", ("share",), ("kind",), is_log_x=True, limit=0.25),
)


def test_text_is_aligned() -> None:
    assert as_text(TABLE).splitlines() == [
        "Sizes",
        "",
        "  kind    count    share          took  met",
        "  ─────  ──────  ───────  ────────────  ───",
        "  small       8  50.00 %     12.500 ms  yes",
        "  large  12,000        –  1,500.000 ms  –",
        "",
        "  a note",
    ]


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_files_hold_the_numbers(tmp_path: Path, kind: str) -> None:
    chart = Chart("count", ("share", "share"), ("kind",), kind=kind)  # type: ignore[arg-type]
    save(
        Table(TABLE.name, TABLE.title, TABLE.columns, TABLE.rows, chart=chart), tmp_path / "new", {}
    )
    content = json.loads((tmp_path / "new" / "sizes.json").read_text())
    assert content["rows"][0] == {
        "kind": "small", "count": 8, "share": 0.5, "took_s": 0.0125, "is_met": True,
    }  # fmt: skip
    assert content["rows"][1]["share"] is None
    assert (tmp_path / "new" / "sizes.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--only", "sharing", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    for name in ("samples", "beams"):
        assert (tmp_path / f"{name}.txt").read_text() in printed.out
        made = json.loads((tmp_path / f"{name}.json").read_text())["made"]
        assert made["command"].startswith("python -m bench.kv_memory --only sharing")
    assert "[1/1] sharing" in printed.err


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "wastes"]) == 2
    assert "unknown part 'wastes'; there are waste, sharing," in capsys.readouterr().err
