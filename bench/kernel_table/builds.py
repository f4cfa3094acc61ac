"""Compiles kernels for GPUs that are not there.

The operations are called as the engine calls them, with tensors that have a shape and no memory. Triton is
told of a device of the wanted kind, compiles what it would launch, and launches nothing. So what is measured
is what ships: there is no second list of types and sizes that could differ from the launches'.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class _AbsentDevice:
    """As much of a Triton driver as compiling asks for."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def gpu_target(arch: int) -> GPUTarget:
    """Of compute capability arch / 10."""
    return GPUTarget("cuda", arch, 32)


@contextmanager
def empty_cache() -> Iterator[None]:
    """Everything inside is compiled anew, and nothing of it is kept."""
    with TemporaryDirectory() as directory, triton.knobs.cache.scope():
        triton.knobs.cache.dir = directory
        yield


def builds_of_call(call: Callable[[], object], arch: int) -> list[CompiledKernel]:
    """The kernels that `call` would launch, in order."""
    built: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(
        kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> Any:
        built.append(run(kernel, *args, grid=grid, warmup=True, **options))
        return built[-1]

    JITFunction.run = compile_only
    driver.set_active(_AbsentDevice(gpu_target(arch)))
    try:
        call()
    finally:
        JITFunction.run = run
    return built


def build_of_source(
    source: ASTSource, arch: int, options: Mapping[str, int | None]
) -> CompiledKernel:
    """One kernel from its parameters' types."""
    return triton.compile(source, target=gpu_target(arch), options=dict(options))
