"""deploy/Dockerfile through hadolint, every note of it an error."""

import subprocess
import sys
from pathlib import Path

from strict_schema import DEPLOY

HADOLINT = Path(sys.executable).with_name("hadolint")


def _lint(text: str) -> subprocess.CompletedProcess[str]:
    command = [HADOLINT, "--no-color", "--failure-threshold", "style", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_passes_hadolint() -> None:
    result = _lint((DEPLOY / "Dockerfile").read_text())
    assert result.returncode == 0, result.stdout


def test_a_misspelt_instruction_fails() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert "WORKDIR" in text
    assert _lint(text.replace("WORKDIR", "WORKDIRR", 1)).returncode != 0


def test_what_it_copies_is_there_and_let_through() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    sources = [s for line in lines if line.startswith("COPY ") for s in line.split()[1:-1]]
    let_through = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert "pyproject.toml" in sources
    assert [s for s in sources if f"!{s}" not in let_through] == []
    assert [s for s in sources if not (DEPLOY.parent / s).exists()] == []
