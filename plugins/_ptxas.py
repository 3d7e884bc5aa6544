"""Run triton's ptxas on a kernel's PTX. The ptxas that a GPU's driver contains may have another version."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Limits of registers per thread. Above each limit, fewer warps fit on a multiprocessor.
_STEPS = (40, 48, 64, 80, 96, 128, 168, 255)


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel.

    Attributes:
        registers: registers per thread.
        spilled: bytes of registers that are stored to and loaded from memory.
        shared: bytes of shared memory per block.
    """

    registers: int
    spilled: int
    shared: int


def assemble(ptx: str, capability: tuple[int, int]) -> Resources:
    """Assemble PTX.

    Returns:
        resources of the kernel.

    Raises:
        CalledProcessError: ptxas refuses the PTX; the error contains ptxas's message.
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
    """Allow the kernel more registers if ptxas would otherwise spill a few bytes to stay below one of the limits in
    `_STEPS`.

    Returns:
        PTX with a higher limit of registers; the PTX unchanged if no limit avoids the spills.
    """
    found = assemble(ptx, capability)
    threads = int(re.findall(r"\.reqntid (\d+)", ptx)[0])
    for most in _STEPS:
        if found.spilled and found.registers <= most and most * threads <= 65_536:
            allowed = re.sub(r"(\.reqntid \d+)", rf"\1\n.maxnreg {most}", ptx)
            if not assemble(allowed, capability).spilled:
                return allowed
    return ptx
