"""What the stages' programs share: where they run, how large, and against which ceilings."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.gpu.rows import Ledger, Row, find_value, read_rows
from bench.gpu.timing import Timer
from kernels import dispatch

COPY_RATE, MATMUL_RATE = "copy", "bf16 matrix product"


@dataclass(frozen=True)
class Context:
    """Attributes:
    is_dry: tiny sizes on the CPU, through the same lines.
    copy_bytes_per_s, matmul_flops: what the ceilings' stage measured, if it did.
    """

    stage: str
    is_dry: bool
    device: torch.device
    ledger: Ledger
    timer: Timer
    copy_bytes_per_s: float | None
    matmul_flops: float | None

    def add(
        self,
        what: str,
        value: float,
        unit: str,
        share: float | None = None,
        target: float | None = None,
        *,
        is_limit: bool = False,
        note: str = "",
    ) -> None:
        """A figure; see `Row`."""
        self.ledger.add(Row(self.stage, what, value, unit, share, target, is_limit, note))

    def copy_share(self, bytes_per_s: float) -> float | None:
        return None if self.copy_bytes_per_s is None else bytes_per_s / self.copy_bytes_per_s

    def matmul_share(self, flops: float) -> float | None:
        return None if self.matmul_flops is None else flops / self.matmul_flops

    @contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """A failure in the block becomes a row, and the stage goes on with the next figure.

        After a fault on the device nothing else will run in this process; the next figures then fail quickly.
        """
        try:
            yield
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            note = f"{type(error).__name__}: {error}"[:200]
            self.ledger.add(Row(self.stage, what, note=note, has_failed=True))


def interpret_kernels() -> None:
    """From now on the CPU runs the kernels of a GPU, in Triton's interpreter: slow, and the same code.

    Its products of bf16 numbers are wrong, so nothing computed in bf16 may be compared with anything.
    """
    # Triton decides when it is imported, so this must have been set before.
    assert os.environ.get("TRITON_INTERPRET") == "1"
    from kernels.gpu.backend import CudaBackend

    np.seterr(all="ignore")  # a device overflows without a word
    dispatch.install("cpu", CudaBackend())


def run_stage(stage: str, run: Callable[[Context], None], arguments: Sequence[str]) -> None:
    """A stage's `main`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path, help="file for the rows")
    parser.add_argument("folder", type=Path, help="of the rows of the stages before")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device("cpu" if options.dry_run else "cuda")
    if options.dry_run:
        interpret_kernels()
    torch.manual_seed(0)
    known = read_rows(options.folder / "ceilings.json")
    copy, matmul = find_value(known, COPY_RATE), find_value(known, MATMUL_RATE)
    context = Context(
        stage=stage,
        is_dry=options.dry_run,
        device=device,
        ledger=Ledger(options.path),
        timer=Timer(device, num_rounds=1 if options.dry_run else 7),
        copy_bytes_per_s=None if copy is None else copy * 1e9,
        matmul_flops=None if matmul is None else matmul * 1e12,
    )
    with torch.inference_mode():
        run(context)
