"""Run the ptxas that triton ships on a kernel's PTX. A driver has its own ptxas, of another version."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Registers a thread; above each, fewer warps fit on a multiprocessor.
_STEPS = (40, 48, 64, 80, 96, 128, 168, 255)


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel.

    Attributes:
        registers: per thread.
        spilled: bytes stored and loaded.
        shared: bytes a block.
    """

    registers: int
    spilled: int
    shared: int


def assemble(ptx: str, capability: tuple[int, int]) -> Resources:
    """Assemble PTX.

    Returns:
        resources of the kernel.

    Raises:
        CalledProcessError: ptxas refuses the PTX; has its message.
    """
    from triton import knobs

    architecture = 10 * capability[0] + capability[1]
    tool = knobs.nvidia.ptxas_blackwell if architecture >= 100 else knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        out = ["-o", str(source.with_suffix(".cubin"))]
        command = [tool.path, "-v", f"--gpu-name=sm_{architecture}", str(source), *out]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", told)
    spills = re.findall(r"(\d+) bytes spill", told)
    shared = re.search(r"(\d+) bytes smem", told)
    assert registers is not None, told
    return Resources(int(registers.group(1)), sum(map(int, spills)), int(shared.group(1)) if shared else 0)


def without_spills(ptx: str, capability: tuple[int, int]) -> str:
    """Allow the kernel more registers if ptxas would spill a few bytes rather than exceed the next lower step.

    Returns:
        PTX with a limit of registers; unchanged if no limit helps.
    """
    found = assemble(ptx, capability)
    threads = int(re.findall(r"\.reqntid (\d+)", ptx)[0])
    for most in _STEPS:
        if found.spilled and found.registers <= most and most * threads <= 65_536:
            allowed = re.sub(r"(\.reqntid \d+)", rf"\1\n.maxnreg {most}", ptx)
            if not assemble(allowed, capability).spilled:
                return allowed
    return ptx
