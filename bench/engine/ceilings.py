"""`python -m bench.engine.ceilings`: what the machine gives to a program that does nothing else, as JSON."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter

import torch
from torch.nn import functional

_NUM_READ_BYTES = 512 << 20
_SIZE = 2048
_NUM_TRIES = 5


@dataclass(frozen=True)
class Ceilings:
    """Attributes:
    read_bytes_per_s: of memory, by a sum over 512 MiB.
    fp32_flops, bf16_flops: multiply-adds count as two, by a square matrix product, by torch's default library
        or oneDNN, whichever is faster.
    """

    read_bytes_per_s: float
    fp32_flops: float
    bf16_flops: float


def measure(num_threads: int, *, size: int = _SIZE, read_bytes: int = _NUM_READ_BYTES) -> Ceilings:
    """The best of five tries each: a ceiling is what was reached at all."""
    torch.set_num_threads(num_threads)
    data = torch.rand(read_bytes // 4)
    reads = read_bytes / _best_s(lambda: data.sum())
    return Ceilings(reads, _matmul_flops(size, torch.float32), _matmul_flops(size, torch.bfloat16))


def _matmul_flops(size: int, dtype: torch.dtype) -> float:
    left, right = torch.randn(2, size, size).to(dtype).unbind()
    seconds = _best_s(lambda: functional.linear(left, right))
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(right, size)
        linear = torch.ops.mkldnn._linear_pointwise
        seconds = min(seconds, _best_s(lambda: linear(left, packed, None, "none", [], "")))
    return 2 * size**3 / seconds


def _best_s(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_NUM_TRIES):
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    print(json.dumps(asdict(measure(parser.parse_args().threads))))
