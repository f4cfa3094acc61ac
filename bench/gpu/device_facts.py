"""Which device and which software this is."""

import platform
import shutil
import subprocess
import sys
from importlib import metadata

import torch

from bench.gpu.rows import Row
from bench.gpu.stage import Context, run_stage

_QUERY = "name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit"


def run(context: Context) -> None:
    facts = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "numpy"):
        with context.going_on(name):
            facts[name] = metadata.version(name)
    if context.device.type == "cuda":
        properties = torch.cuda.get_device_properties(context.device)
        facts["device"] = (
            f"{properties.name}, capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors, "
            f"{properties.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}"
        )
    else:
        facts["device"] = "no GPU in a dry run"
    if shutil.which("nvidia-smi"):
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
        facts[f"nvidia-smi {_QUERY}"] = done.stdout.strip()
    for what, note in facts.items():
        context.ledger.add(Row(context.stage, what, note=note))


if __name__ == "__main__":
    run_stage("device", run, sys.argv[1:])
