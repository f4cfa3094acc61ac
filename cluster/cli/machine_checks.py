"""Checks of the machine: Python, packages, GPU, disk, memory. Each changes nothing."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from cluster.cli.finding import GIB, Finding, Verdict
from cluster.config import ClusterConfig

MIN_PYTHON = (3, 11)
# Those whose insides we lean on: another version may start and then answer wrongly.
CHECKED_PACKAGES = ("torch", "ray", "triton", "transformers")
_GPU_TIMEOUT_S = 120.0
_MIN_DISK_BYTES = 1 * GIB
_MIN_MEMORY_BYTES = 1 * GIB
_DEFAULT_KV_GIB = 1.0  # what an engine takes on a CPU unless told otherwise
_REPLICA_OVERHEAD_BYTES = 512 * 2**20  # Python, torch and Ray, before any weight
# In a process of its own: a broken driver may crash, hang or talk.
_GPU_PROBE = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
total = [torch.cuda.get_device_properties(i).total_memory for i in range(len(names))]
print(json.dumps({"names": names, "total_bytes": total}))
"""


def check_python(version: Sequence[int] = sys.version_info[:3]) -> Finding:
    shown = ".".join(str(part) for part in version)
    if tuple(version[:2]) >= MIN_PYTHON:
        return Finding("python", Verdict.OK, shown)
    wanted = ".".join(str(part) for part in MIN_PYTHON)
    return Finding("python", Verdict.FAILED, shown, f"install Python {wanted} or newer")


def check_package(
    name: str,
    requirements: Sequence[str] | None,
    version_of: Callable[[str], str] = metadata.version,
) -> Finding:
    """Whether a package is there in a version that Pando asks for.

    Args:
        requirements: Pando's own; None where it is not installed as a distribution.
        version_of: raises PackageNotFoundError for one that is absent.
    """
    wanted = _requirement(name, requirements or ())
    is_needed = requirements is None or wanted is not None
    try:
        version = version_of(name)
    except metadata.PackageNotFoundError:
        if not is_needed:
            return Finding(name, Verdict.NOTE, "not installed, and not needed here")
        return Finding(name, Verdict.FAILED, "not installed", f"pip install '{wanted or name}'")
    if wanted is None:
        return Finding(name, Verdict.NOTE, f"{version}, not checked against what Pando asks for")
    if not wanted.specifier.contains(version, prereleases=True):
        return Finding(name, Verdict.FAILED, version, f"pip install '{name}{wanted.specifier}'")
    return Finding(name, Verdict.OK, version)


def own_requirements() -> list[str] | None:
    """What the installed Pando asks for; None when it runs from a bare checkout."""
    try:
        return metadata.requires("pando") or []
    except metadata.PackageNotFoundError:
        return None


def check_namesake(version_of: Callable[[str], str] = metadata.version) -> Finding:
    """The distribution `kernels` would be imported in place of Pando's device code."""
    try:
        version = version_of("kernels")
    except metadata.PackageNotFoundError:
        return Finding("kernels", Verdict.OK, "no other package of that name")
    found = f"the distribution 'kernels' {version} has the import name of Pando's device code"
    return Finding("kernels", Verdict.FAILED, found, "pip uninstall kernels")


def check_gpu(
    config: ClusterConfig, probe: Sequence[str] = (sys.executable, "-c", _GPU_PROBE)
) -> Finding:
    """Which GPUs torch sees; having none fails only where the configuration asks for one."""
    is_wanted = config.model.device == "cuda" or bool(config.replicas.num_gpus)
    missing = Verdict.FAILED if is_wanted else Verdict.NOTE
    advice = "install an NVIDIA driver, or set model.device=cpu and replicas.num_gpus=0"
    advice = advice if is_wanted else ""
    try:
        answer = subprocess.run(
            probe, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True
        )
        gpus = json.loads(answer.stdout.splitlines()[-1])
        shown = [
            f"{name} ({total / GIB:.0f} GiB)"
            for name, total in zip(gpus["names"], gpus["total_bytes"], strict=True)
        ]
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        return Finding("gpu", missing, f"torch cannot say: {last[:200]}", advice)
    except (subprocess.TimeoutExpired, OSError, ValueError, LookupError, TypeError) as error:
        return Finding("gpu", missing, f"torch cannot say: {type(error).__name__}", advice)
    if not shown:
        found = "torch sees none" if is_wanted else "none: replicas run on the CPU"
        return Finding("gpu", missing, found, advice)
    return Finding("gpu", Verdict.OK, ", ".join(shown))


def check_disk(
    config: ClusterConfig, free_bytes_of: Callable[[Path], int] | None = None
) -> Finding:
    """Room for models: where the cache is, or will be."""
    place = config.model_cache_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    free = free_bytes_of(place) if free_bytes_of else shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB free for models"
    if free < _MIN_DISK_BYTES:
        advice = "free some, or set cache_dir to a larger disk"
        return Finding("disk", Verdict.FAILED, found, advice)
    return Finding("disk", Verdict.OK, found)


def check_memory(
    config: ClusterConfig, weights_bytes: int | None, available_bytes: int | None
) -> Finding:
    """Whether CPU replicas fit. Weights count twice: 16-bit files are float32 on a CPU."""
    if available_bytes is None:
        return Finding("memory", Verdict.NOTE, "this system does not say how much is available")
    kv_bytes = int((config.engine.kv_memory_gib or _DEFAULT_KV_GIB) * GIB)
    each = _REPLICA_OVERHEAD_BYTES + kv_bytes + 2 * (weights_bytes or 0)
    needed = each * config.replicas.num_replicas
    found = f"{available_bytes / GIB:.1f} GiB available"
    if available_bytes < _MIN_MEMORY_BYTES:
        return Finding("memory", Verdict.FAILED, found, "end other programs")
    if config.model.device != "cuda" and available_bytes < needed:
        number = config.replicas.num_replicas
        found += f"; {number} CPU replicas may want {needed / GIB:.1f}"
        advice = "set engine.kv_memory_gib or replicas.num_replicas lower"
        return Finding("memory", Verdict.NOTE, found, advice)
    return Finding("memory", Verdict.OK, found)


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """What programs can still take, after Linux's own estimate; None elsewhere."""
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _requirement(name: str, requirements: Sequence[str]) -> Requirement | None:
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        is_here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name == name and is_here:
            return requirement
    return None
