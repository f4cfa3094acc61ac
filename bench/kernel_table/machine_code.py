"""What a compiled kernel's machine code holds."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import triton

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# An instruction's name follows its address: /*0a30*/  @!P0 LDG.E.128 R4, …
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", re.MULTILINE)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)")
_GLOBAL_LOAD = re.compile(r"LDG(STS)?\.")
_GLOBAL_STORE = re.compile(r"STG\.")
_BULK_COPY = re.compile(r"UBLKCP|UTMA(LDG|STG)")
_WIDE = re.compile(r"\.(128|256)\b")
_TENSOR_CORE = re.compile(r"(H|I|B|D|Q|O|HG|QG|IG)MMA\.|UTC\w*MMA")
_LOCAL = re.compile(r"(LDL|STL)(\.|$)")


@dataclass(frozen=True)
class MachineCode:
    """Counts of instructions, as they stand in the code and not as often as they run.

    Attributes:
        stack_bytes: a thread's own memory: arrays and spilled registers.
        num_local: loads and stores of that memory.
        num_bulk_copies: by the tensor memory accelerator.
        num_tensor_core: matrix products.
    """

    num_registers: int
    stack_bytes: int
    num_local: int
    num_loads: int
    num_wide_loads: int
    num_stores: int
    num_wide_stores: int
    num_bulk_copies: int
    num_tensor_core: int

    @property
    def has_spills(self) -> bool:
        return self.stack_bytes > 0 or self.num_local > 0


def read_machine_code(cubin: bytes) -> MachineCode:
    """Disassembles with the tools that Triton ships."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.cubin"
        file.write_bytes(cubin)
        return count_instructions(_dump(file, "-sass"), _dump(file, "-res-usage"))


def _dump(file: Path, what: str) -> str:
    return subprocess.run(
        [_CUOBJDUMP, what, file], check=True, capture_output=True, text=True
    ).stdout


def count_instructions(assembly: str, resources: str) -> MachineCode:
    """From what `cuobjdump -sass` and `cuobjdump -res-usage` print.

    Raises:
        ValueError: that holds no instructions, or no registers.
    """
    names = _INSTRUCTION.findall(assembly)
    usage = _RESOURCES.search(resources)
    if not names or usage is None:
        raise ValueError("no machine code found in the disassembly")
    registers, stack_bytes, local_bytes = map(int, usage.groups())
    loads = [name for name in names if _GLOBAL_LOAD.match(name)]
    stores = [name for name in names if _GLOBAL_STORE.match(name)]
    return MachineCode(
        num_registers=registers,
        stack_bytes=stack_bytes + local_bytes,
        num_local=sum(1 for name in names if _LOCAL.match(name)),
        num_loads=len(loads),
        num_wide_loads=sum(1 for name in loads if _WIDE.search(name)),
        num_stores=len(stores),
        num_wide_stores=sum(1 for name in stores if _WIDE.search(name)),
        num_bulk_copies=sum(1 for name in names if _BULK_COPY.match(name)),
        num_tensor_core=sum(1 for name in names if _TENSOR_CORE.match(name)),
    )
