"""`pytest tests/gpu` with settings that ask for pytest alone; in Triton's interpreter in a dry run."""

import re
import subprocess
import sys
from pathlib import Path

from bench.gpu.rows import Row
from bench.gpu.stage import Context, run_stage

_ROOT = Path(__file__).resolve().parents[2]
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def run(context: Context) -> None:
    command = [
        *(sys.executable, "-m", "pytest", "tests/gpu"),
        *("-c", "bench/gpu/pytest.ini", "--rootdir", ".", "--noconftest"),
        *("-p", "no:cacheprovider"),
    ]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    print(done.stdout + done.stderr)
    counts = {word: int(number) for number, word in _COUNT.findall(_last_line(done.stdout))}
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            context.ledger.add(Row(context.stage, line[:200], has_failed=True))
    note = ", ".join(f"{number} {word}" for word, number in counts.items())
    has_failed = done.returncode != 0 or counts.get("passed", 0) == 0
    context.ledger.add(
        Row(
            context.stage,
            "tests that passed",
            float(counts.get("passed", 0)),
            note=note or f"pytest ended with {done.returncode}; see check.log",
            has_failed=has_failed,
        )
    )


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


if __name__ == "__main__":
    run_stage("tests", run, sys.argv[1:])
