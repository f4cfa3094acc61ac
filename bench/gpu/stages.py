"""Runs the check's stages one after the other, each in a process of its own and within a time of its own.

A stage that crashes or overruns loses its own later rows and nothing else. Standard library alone.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import IO

from bench.gpu.rows import Row, as_markdown, read_rows

_ROOT = Path(__file__).resolve().parents[2]
# What is left for writing the files.
_RESERVE_S = 5.0
_KILL_GRACE_S = 5.0


@dataclass(frozen=True)
class Stage:
    """Attributes:
    module: run as a program with the rows' file, the folder of all stages' rows and `--dry-run`.
    limit_s: the most it may take; less when the whole budget is nearly spent.
    """

    name: str
    module: str
    limit_s: float


# What is worth most comes first.
STAGES = (
    Stage("device", "bench.gpu.device_facts", 40),
    Stage("ceilings", "bench.gpu.device_ceilings", 50),
    Stage("tests", "bench.gpu.device_tests", 110),
    Stage("attention", "bench.gpu.attention_rates", 100),
    Stage("engine", "bench.gpu.engine_rates", 150),
    Stage("kernels", "bench.gpu.kernel_rates", 70),
)


def main(arguments: Sequence[str]) -> int:
    """0 when every stage ran to its end; targets that were missed are no failure."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    begin_s = monotonic()
    with tempfile.TemporaryDirectory() as folder, (options.out / "check.log").open("w") as log:
        for stage in STAGES:
            if options.only and stage.name not in options.only:
                continue
            left_s = options.budget_s - _RESERVE_S - (monotonic() - begin_s)
            rows += run_stage(stage, Path(folder), left_s, options.dry_run, log)
            write_report(rows, options.out, monotonic() - begin_s, options.dry_run)
    print(as_markdown(rows))
    print(f"{monotonic() - begin_s:.0f} s; files are in {options.out}")
    return 1 if any(row.has_failed for row in rows) else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/gpu/check", description=__doc__)
    out = os.environ.get("OUT") or Path(tempfile.gettempdir()) / "pando-gpu-check"
    parser.add_argument("--out", type=Path, default=Path(out), help="default: $OUT")
    parser.add_argument("--budget-s", type=float, default=450.0, help="for everything")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--only", nargs="+", choices=[stage.name for stage in STAGES])
    return parser.parse_args(arguments)


def run_stage(stage: Stage, folder: Path, left_s: float, is_dry: bool, log: IO[str]) -> list[Row]:
    """The stage's rows, with one more when it failed."""
    limit_s = min(stage.limit_s, left_s)
    if limit_s <= 0:
        return [_failure(stage, "no time was left")]
    path = folder / f"{stage.name}.json"
    command = [sys.executable, "-m", stage.module, str(path), str(folder)]
    command += ["--dry-run"] if is_dry else []
    begin_s = monotonic()
    print(f"== {stage.name}, at most {limit_s:.0f} s", flush=True)
    log.write(f"== {stage.name}\n")
    log.flush()
    # For a dry run's kernels; Triton reads it when it is imported, and torch may import Triton. Their
    # tensors are so small that threads would only wait for each other.
    interpreted = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if is_dry else {}
    trouble = _run(command, limit_s, log, interpreted)
    log.write(f"== {stage.name}: {monotonic() - begin_s:.1f} s\n")
    rows = read_rows(path)
    return rows if trouble is None else [*rows, _failure(stage, trouble)]


def _run(
    command: list[str], limit_s: float, log: IO[str], environment: dict[str, str]
) -> str | None:
    """What went wrong, if anything did."""
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _stop(process)
        return f"stopped after its {limit_s:.0f} s"
    return None if code == 0 else f"ended with exit status {code}; see check.log"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """It and what it started, which share a session of their own."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_KILL_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failure(stage: Stage, note: str) -> Row:
    return Row(stage.name, "the stage", note=note, has_failed=True)


def write_report(rows: list[Row], out: Path, seconds: float, is_dry: bool) -> None:
    """check.json and check.md, over what an earlier stage left there."""
    content = {
        "is_dry_run": is_dry,
        "seconds": round(seconds, 1),
        "rows": [{**asdict(row), "verdict": row.verdict} for row in rows],
    }
    (out / "check.json").write_text(json.dumps(content, indent=1, ensure_ascii=False))
    heading = "A dry run on the CPU: the figures mean nothing.\n\n" if is_dry else ""
    (out / "check.md").write_text(heading + as_markdown(rows))
