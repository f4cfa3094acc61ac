"""`python -m bench.kernel_table`: compiles every GPU kernel form and writes the table in docs/kernels.md."""

import argparse
import os
import sys
from pathlib import Path

from bench.kernel_table.compiling import compiled_rows
from bench.kernel_table.forms import forms
from bench.kernel_table.table import (
    difference,
    missing_lines,
    replace_table,
    table_text,
)

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def main() -> int:
    """1 when the page differs under --check, or a form must not ship."""
    options = _options()
    named = [i for i, form in enumerate(forms()) if options.only in form.full_name]
    rows = compiled_rows(named[:: options.every], options.jobs)
    for fault in (faults := [fault for row in rows for fault in row.faults()]):
        print(fault, file=sys.stderr)
    page = options.page.read_text(encoding="utf-8")
    if not options.check:
        options.page.write_text(replace_table(page, table_text(rows)), encoding="utf-8")
        return 1 if faults else 0
    is_whole = options.every == 1 and not options.only
    if is_whole:
        found = difference(page, replace_table(page, table_text(rows)))
    else:
        found = missing_lines(page, rows)
    print(found or f"{len(rows)} forms are as {options.page.name} says.")
    return 1 if faults or found else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kernel_table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="check each N-th form")
    parser.add_argument("--only", default="", metavar="TEXT", help="check forms named so")
    parser.add_argument("--page", type=Path, default=_PAGE, help="default: docs/kernels.md")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes; default: all cores",
    )
    options = parser.parse_args()
    if not options.check and (options.every != 1 or options.only):
        parser.error("--every and --only go with --check: the page holds the whole table")
    if options.every < 1:
        parser.error("--every must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
