"""Pins, scripts and metadata: what a newcomer's first minute rests on."""

import os
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [ROOT / "scripts" / name for name in ("serve", "test", "check", "setup")]
PIN = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.!]+)(?: ; sys_platform == \S+)?"
)


def pins() -> dict[str, str]:
    name_to_version: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        pin = PIN.fullmatch(line)
        assert pin, f"constraints.txt: not an exact pin from a public index: {line}"
        name_to_version[canonicalize_name(pin["name"])] = pin["version"]
    return name_to_version


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [Requirement(line) for line in lines]


def test_every_requirement_has_a_lower_bound_and_a_pin_that_keeps_it() -> None:
    name_to_version = pins()
    for requirement in requirements():
        assert str(requirement.specifier).startswith(">="), requirement
        version = name_to_version.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"


def test_the_pins_fit_a_cuda_machine_as_well() -> None:
    name_to_version = pins()
    # What the CUDA build of torch 2.13.0 asks for; a CPU build asks for none and takes any.
    assert (name_to_version["torch"], name_to_version["triton"]) == ("2.13.0", "3.7.1")


def test_nothing_brings_in_the_namesake_of_kernels() -> None:
    assert "kernels" not in pins()


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_are_short_and_strict(script: Path) -> None:
    lines = script.read_text().splitlines()
    assert len(lines) < 25
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert os.access(script, os.X_OK)
