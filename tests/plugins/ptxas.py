"""The ptxas that triton ships: what it makes of a kernel's PTX."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from normdeploy_plugins._aot import Compiled


@dataclass(frozen=True)
class Resources:
    registers: int
    spilled: int  # bytes stored and loaded
    shared: int


def assemble(compiled: Compiled, capability: tuple[int, int]) -> Resources:
    """Raises CalledProcessError with ptxas's words where it refuses the PTX."""
    from triton import knobs

    architecture = 10 * capability[0] + capability[1]
    tool = knobs.nvidia.ptxas_blackwell if architecture >= 100 else knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.ptx)
        command = [
            tool.path,
            "-v",
            f"--gpu-name=sm_{architecture}",
            str(source),
            "-o",
            str(source.with_suffix(".cubin")),
        ]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", told)
    spills = re.findall(r"(\d+) bytes spill", told)
    shared = re.search(r"(\d+) bytes smem", told)
    assert registers is not None, told
    return Resources(int(registers.group(1)), sum(map(int, spills)), int(shared.group(1)) if shared else 0)
