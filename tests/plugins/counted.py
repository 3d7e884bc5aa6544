"""What a kernel costs, counted and not timed: what it issues in the emulator, by the width of each access, and the
registers, spills and occupancy that ptxas's words come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from normdeploy_plugins._aot import Compiled, compile_launch
from normdeploy_plugins._launch import Launch, Tensor, Tile
from normdeploy_plugins._ptxas import assemble
from normdeploy_plugins.ops import BY_NAME

from . import emulator
from .bindings.cases import SIZES, Case
from .emulated import GAP, Unknown, storage
from .occupancy import occupancy

# the dynamic sizes where every extent is a multiple of 8, and the same with none of them
WIDE = {"b": 2, "s": 16, "h": 8, "w": 24, "c": 1024, "g": 64}
ODD = {"b": 2, "s": 15, "h": 7, "w": 23, "c": 1023, "g": 64}
LARGE = ("x", "residual", "y", "sum")  # what a kernel reads and writes once for each element


@dataclass(frozen=True)
class Kernel:
    """A tactic of one op, compiled; ``launch`` is that of ``sizes``."""

    compiled: Compiled
    launch: Launch
    tile: Tile
    tensors: list[Tensor]  # inputs, then outputs

    @property
    def each(self) -> int:
        """Elements a thread."""
        return max(1, self.tile.rows * self.tile.block // (32 * self.tile.warps))

    def resources(self, capability: tuple[int, int]) -> tuple[int, int, float]:
        """Registers a thread, bytes spilled, and the share of a multiprocessor's warps."""
        made, warps = assemble(self.compiled.ptx, capability), self.compiled.warps
        return made.registers, made.spilled, occupancy(capability, warps, made.registers, self.compiled.shared)


def kernel(case: Case, capability: tuple[int, int] = (9, 0), tactic: int = 0, sizes: Any = WIDE) -> Kernel:
    """As TensorRT would have it: compiled without the numbers that depend on a dynamic size, launched with them."""
    op, inputs, attributes = case.call(sizes)
    tile = op.tiles(case.call(unknown=Unknown())[1] if case.dynamic else inputs, attributes)[tactic]
    launch, results = op.launch(inputs, attributes, tile), op.output_tensors(inputs, attributes)
    # what another set of sizes changes is not known when the kernel is compiled
    others = op.launch(case.call(SIZES[1] | {"b": 3})[1], attributes, tile).scalars
    known = {name: n if others[name] == n else Unknown() for name, n in launch.scalars.items()}
    unsized = replace(launch, scalars=known)
    return Kernel(compile_launch(op, unsized, inputs, results, capability), launch, tile, [*inputs, *results])


@dataclass(frozen=True)
class Issued:
    """By some blocks: ``accesses`` of warps by (tensor, "ld" or "st", bytes a thread), and all instructions."""

    accesses: Mapping[tuple[str, str, int], int]
    instructions: int
    quantized: bool = False

    def narrow(self, itemsize: int, rows: int) -> dict[tuple[str, str, int], int]:
        """The accesses of large tensors that are not of 16 bytes, but for ``rows`` looks at a row's first element. What
        is quantized is stored by as many elements as 16 bytes of x hold, or more."""
        least = {"y": 16 // itemsize} if self.quantized else {}
        wrong = {k: n for k, n in self.accesses.items() if k[0] in LARGE and k[2] < least.get(k[0], 16)}
        first = (("x", "ld", itemsize), ("residual", "ld", itemsize))
        return {k: n for k, n in wrong.items() if k not in first or n > rows}


def issued(case: Case, made: Kernel, blocks: Sequence[int] = (0,)) -> Issued:
    """What these blocks issue, over data of ones."""
    op, counts = BY_NAME[case.op], emulator.Counts()
    arrays = [np.ones(t.shape, storage(t.dtype)).reshape(-1).view(np.uint8) for t in made.tensors]
    buffers = [emulator.Buffer(GAP * (i + 1), a) for i, a in enumerate(arrays)]
    for buffer in buffers[len(op.inputs) :]:
        buffer.written = np.zeros(len(buffer.data), np.uint8)
        buffer.data[:] = 0
    pointers = [b.base for b in buffers]
    scalars = [made.launch.scalars[name] for name in made.compiled.arguments]
    arguments = [*pointers[: len(op.inputs)], *scalars, *pointers[len(op.inputs) :]]
    emulator.run(made.compiled.ptx, arguments, blocks, emulator.Memory(buffers, counts), made.compiled.shared)
    names = (*op.inputs, *op.outputs)
    found = Counter({(names[i], kind, width): n for (i, kind, width), n in counts.accesses.items()})
    return Issued(found, counts.instructions, "Q" in op.types)
