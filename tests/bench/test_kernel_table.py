"""The page on kernels says what the compiler makes of them."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from bench.kernel_table.machine_code import MachineCode, count_instructions
from bench.kernel_table.table import (
    BEGIN_MARK,
    END_MARK,
    Build,
    Row,
    difference,
    missing_lines,
    replace_table,
    table_text,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "kernels.md"
CODE = MachineCode(40, 0, 0, 5, 4, 2, 2, 0, 8)


def make_row(code: MachineCode = CODE, shared_bytes: int = 1024) -> Row:
    builds = {arch: Build(CODE, 1024) for arch in (80, 90)} | {100: Build(code, shared_bytes)}
    return Row("op", "of a size", None, True, builds)


def run_table(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process without the interpreter that other tests may have asked for."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "bench.kernel_table", "--check", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_page_lists_every_form_that_ships_in_order() -> None:
    listed = re.findall(r"^### `(.+)`$|^\| ([^|]+?) \| \d", PAGE.read_text(), re.MULTILINE)
    kernel, written = "", []
    for heading, name in listed:
        kernel = heading or kernel
        if name:
            written.append((kernel, name))
    code = "from bench.kernel_table.forms import forms\nfor f in forms(): print(f.kernel, f.name, sep='\\t')"
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    ships = [tuple(line.split("\t")) for line in output.splitlines()]
    assert written == ships
    assert len(set(ships)) == len(ships)
    assert len({kernel for kernel, _ in ships}) == len(list(groupby(ships, lambda form: form[0])))


def test_what_the_page_says_may_ship() -> None:
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if " of " in line]
    rows = [[cell.strip() for cell in row] for row in rows if len(row) == 10]
    assert len(rows) > 50
    # sm_80, the first of three where they differ, may spill.
    assert [row[1] for row in rows if not (row[3] == "0" or row[3].endswith("/ 0 / 0"))] == []


def test_a_sample_of_the_table_is_what_the_compiler_makes_today() -> None:
    result = run_table("--every", "23")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_table_is_what_the_compiler_makes_today() -> None:
    result = run_table()
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_page_that_says_otherwise_is_found_out(tmp_path: Path) -> None:
    page = tmp_path / "kernels.md"
    line = next(
        line for line in PAGE.read_text().splitlines() if line.startswith("| 14336, bf16 |")
    )
    page.write_text(PAGE.read_text().replace(line, line.replace("| 0 |", "| 2 |", 1)))
    result = run_table("--only", "silu_mul", "--page", str(page))
    assert result.returncode == 1
    assert f"+{line}" in result.stdout


ASSEMBLY = """
\tFunction : kernel
        /*0000*/                   LDC R1, c[0x0][0x37c] ;     /* 0x0000df00ff017b82 */
                                                               /* 0x000e220000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR8][R14.64] ;     /* 0x000000080e048981 */
        /*0020*/                   LDG.E.U16 R13, desc[UR8][R16.64] ;    /* 0x00000008100d7981 */
        /*0030*/             @!UP0 LDGSTS.E.BYPASS.128 [R3], desc[UR8][R2.64] ; /* 0x0 */
        /*0040*/                   STG.E.64 desc[UR8][R2.64], R4 ;       /* 0x0000000402001986 */
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12] ; /* 0x0 */
        /*0060*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ; /* 0x0 */
        /*0070*/                   UBLKCP.S.G [UR4], [UR6], UR8 ; /* 0x0 */
        /*10080*/              @P1 STL.64 [R1+0x8], R2 ;       /* 0x0 */
        /*10090*/                  LDL.LU R2, [R1] ;           /* 0x0 */
"""
USAGE = " Function kernel:\n  REG:68 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:576 TEXTURE:0\n"


def test_instructions_are_told_apart() -> None:
    assert count_instructions(ASSEMBLY, USAGE) == MachineCode(
        num_registers=68,
        stack_bytes=16,
        num_local=2,
        num_loads=3,
        num_wide_loads=2,
        num_stores=1,
        num_wide_stores=0,
        num_bulk_copies=1,
        num_tensor_core=2,
    )
    with pytest.raises(ValueError, match="no machine code"):
        count_instructions("", USAGE)


def test_a_form_that_spills_or_does_not_fit_or_multiplies_slowly_must_not_ship() -> None:
    assert make_row().faults() == []
    (spill,) = make_row(replace(CODE, num_local=1, stack_bytes=8)).faults()
    assert spill == "op of a size on sm_100: spills registers"
    (size,) = make_row(shared_bytes=228 * 1024).faults()
    assert "shared memory" in size
    (slow,) = make_row(replace(CODE, num_tensor_core=0)).faults()
    assert "no tensor-core instruction" in slow


def test_the_table_is_put_between_the_marks_and_nowhere_else() -> None:
    rows = [make_row(), replace(make_row(replace(CODE, num_registers=48)), kernel="other")]
    page = f"before\n{BEGIN_MARK}\nold\n{END_MARK}\nafter\n"
    new_page = replace_table(page, table_text(rows))
    assert new_page.startswith("before\n") and new_page.endswith(f"{END_MARK}\nafter\n")
    assert "old" not in new_page
    assert "| of a size | 40 | 0 | 1 | 4 of 5 | 2 of 2 | 8 |  |" in new_page
    assert "| of a size | 40 / 40 / 48 | 0 |" in new_page
    assert difference(new_page, replace_table(new_page, table_text(rows))) == ""
    assert missing_lines(new_page, rows) == ""
    assert "+| of a size" in missing_lines(page, rows)
    with pytest.raises(ValueError, match="page needs"):
        replace_table("no marks", "table")
