"""The table of what the compiler made, as Markdown between two marks of a page."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import triton

from bench.kernel_table.forms import Form
from bench.kernel_table.machine_code import MachineCode, read_machine_code
from kernels.gpu.traffic import Traffic

ARCHS = (80, 90, 100)
# What one block may use of a multiprocessor's shared memory (CUDA C++ Programming Guide, compute capabilities).
ARCH_TO_SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
BEGIN_MARK = "<!-- table: python -m bench.kernel_table -->"
END_MARK = "<!-- end of table -->"
_HEADER = (
    "| form | registers | spills | shared KiB | 128-bit loads | 128-bit stores | tensor core | bytes |\n"
    "|---|---|---|---|---|---|---|---|"
)
# Tiles are chosen for Hopper and Blackwell; what an Ampere device keeps in memory costs it time, not rightness.
ARCHS_THAT_MAY_SPILL = (80,)


@dataclass(frozen=True)
class Build:
    code: MachineCode
    shared_bytes: int


@dataclass(frozen=True)
class Row:
    kernel: str
    name: str
    traffic: Traffic | None
    needs_tensor_core: bool
    arch_to_build: Mapping[int, Build]

    @property
    def line(self) -> str:
        builds = list(self.arch_to_build.values())
        codes = [build.code for build in builds]
        cells = [
            self.name,
            _joined(code.num_registers for code in codes),
            _joined(code.num_local for code in codes),
            _joined(round(build.shared_bytes / 1024) for build in builds),
            _joined(f"{code.num_wide_loads} of {code.num_loads}" for code in codes),
            _joined(f"{code.num_wide_stores} of {code.num_stores}" for code in codes),
            _joined(code.num_tensor_core for code in codes),
            "" if self.traffic is None else f"{self.traffic.ratio:.2f}",
        ]
        return f"| {' | '.join(cells)} |"

    def faults(self) -> list[str]:
        """Why this form must not ship, one line each."""
        found = []
        for arch, build in self.arch_to_build.items():
            where = f"{self.kernel} {self.name} on sm_{arch}"
            if build.code.has_spills and arch not in ARCHS_THAT_MAY_SPILL:
                found.append(f"{where}: spills registers")
            if build.shared_bytes > ARCH_TO_SHARED_LIMIT[arch]:
                found.append(f"{where}: {build.shared_bytes} bytes of shared memory do not fit")
            if self.needs_tensor_core and build.code.num_tensor_core == 0:
                found.append(f"{where}: no tensor-core instruction")
        return found


def _joined(values: Iterable[object]) -> str:
    """One value where all devices agree."""
    texts = [str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def build_row(form: Form) -> Row:
    """Compiles the form for every device of the table."""
    arch_to_build = {arch: _build(form, arch) for arch in ARCHS}
    return Row(form.kernel, form.name, form.traffic, form.needs_tensor_core, arch_to_build)


def _build(form: Form, arch: int) -> Build:
    kernel = form.build(arch)
    return Build(read_machine_code(kernel.asm["cubin"]), kernel.metadata.shared)


def table_text(rows: Sequence[Row]) -> str:
    """A heading and a table for each kernel, in the order of `rows`."""
    parts = [f"Compiled by Triton {triton.__version__} and its own ptxas."]
    for kernel, group in groupby(rows, key=lambda row: row.kernel):
        lines = "\n".join(row.line for row in group)
        parts.append(f"### `{kernel}`\n\n{_HEADER}\n{lines}")
    return "\n\n".join(parts)


def replace_table(page: str, table: str) -> str:
    """The page with `table` between the marks.

    Raises:
        ValueError: the page lacks a mark.
    """
    head, begin, rest = page.partition(BEGIN_MARK)
    _, end, tail = rest.partition(END_MARK)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN_MARK} and {END_MARK}")
    return f"{head}{begin}\n{table}\n{end}{tail}"


def difference(page: str, new_page: str) -> str:
    """A unified diff; empty when the pages are the same."""
    lines = difflib.unified_diff(
        page.splitlines(), new_page.splitlines(), "as written", "as compiled", lineterm="", n=0
    )
    return "\n".join(lines)


def missing_lines(page: str, rows: Iterable[Row]) -> str:
    """The lines of `rows` that the page does not hold, as a diff without its other side."""
    written = set(page.splitlines())
    return "\n".join(f"+{row.line}" for row in rows if row.line not in written)
