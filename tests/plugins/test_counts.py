"""Counted and not timed: how wide the accesses are that a kernel issues, its registers, spills and occupancy."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from normdeploy_plugins._aot import FP8_SINCE
from normdeploy_plugins._launch import ITEMSIZE, row_tiles
from normdeploy_plugins._ptxas import assemble
from normdeploy_plugins.ops import BY_NAME

from . import counted
from .bindings.cases import SIZES, Case, cases, one_type
from .cases import ROW_OPS
from .emulated import Unknown
from .occupancy import LIMITS, blocks
from .usual import EPS, GROUPS, LN

pytestmark = pytest.mark.usefixtures("cache")

# ------------------------------------------------------------------ occupancy

CALCULATOR = r"""
#include <cstdio>
#include "cuda_occupancy.h"
int main() {
    int major, minor, warps, held, shared, registers, dynamic, reserved;
    while (scanf("%d%d%d%d%d%d%d%d", &major, &minor, &held, &shared, &reserved, &warps, &registers, &dynamic) == 8) {
        cudaOccDeviceProp device = {};
        device.computeMajor = major, device.computeMinor = minor, device.maxThreadsPerBlock = 1024;
        device.maxThreadsPerMultiprocessor = held * 32, device.regsPerBlock = device.regsPerMultiprocessor = 65536;
        device.warpSize = 32, device.sharedMemPerMultiprocessor = shared, device.numSms = 1;
        device.sharedMemPerBlock = 49152, device.sharedMemPerBlockOptin = shared - reserved;
        device.reservedSharedMemPerBlock = reserved;
        cudaOccFuncAttributes function = {};
        function.maxThreadsPerBlock = 1024, function.numRegs = registers;
        function.maxDynamicSharedSizeBytes = shared - reserved;
        cudaOccDeviceState state = {};
        state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        cudaOccResult result;
        int failed = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &function, &state, warps * 32, dynamic);
        printf("%d\n", failed ? -failed : result.activeBlocksPerMultiprocessor);
    }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++, which compiles NVIDIA's calculator, is not here")
def test_occupancy_is_what_nvidias_calculator_says(tmp_path: Path) -> None:
    tool, source = tmp_path / "calculator", tmp_path / "calculator.cpp"
    source.write_text(CALCULATOR)
    headers = Path(triton.__file__).parent / "backends/nvidia/include"
    subprocess.run(["g++", "-w", f"-I{headers}", str(source), "-o", str(tool)], check=True)
    asked = [
        (capability, warps, registers, shared)
        for capability in LIMITS
        for warps in (1, 2, 4, 8, 16, 32)
        for registers in (16, 30, 32, 40, 48, 51, 64, 65, 80, 96, 128, 168, 255)
        for shared in (0, 64, 4096, 16_384, 40_000)
    ]
    lines = [
        f"{c[0]} {c[1]} {LIMITS[c].warps} {LIMITS[c].shared} {LIMITS[c].reserved} {w} {r} {s}" for c, w, r, s in asked
    ]
    told = subprocess.run([str(tool)], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    theirs = [int(line) for line in told.split()]
    wrong = [(one, n) for one, n in zip(asked, theirs, strict=True) if blocks(*one) != n]
    assert not wrong, f"{len(wrong)} of {len(asked)}, {wrong[:5]}"


# ------------------------------------------------------------------ widths


DYNAMIC = [case for case in cases() if case.dynamic and one_type(case)]


def widest(case: Case) -> int:
    """The first tactic; but of 32 groups of 10 channels beside each other, 20 bytes, the first that takes several."""
    op, inputs, attributes = case.call(unknown=Unknown())
    packs = [tile.pack for tile in op.tiles(inputs, attributes)]
    return packs.index(max(packs))


@pytest.mark.parametrize("case", [c for c in DYNAMIC if c.types[0] != "bf16"], ids=str)
def test_dynamic_rows_of_16_bytes_are_moved_by_16_bytes(case: Case) -> None:
    """Every extent is a multiple of 8, and is known only when the kernel runs."""
    made = counted.kernel(case, tactic=widest(case))
    rows = (
        made.tile.rows if case.call(counted.WIDE)[0].name in ROW_OPS else 1
    )  # of the others a program has one, or takes no first element
    narrow = counted.issued(case, made).narrow(ITEMSIZE[case.types[0]], made.compiled.warps * rows)
    if (case.op, case.layout) == ("NormStatistics", "NHWC"):  # has no tactic for several groups
        assert {key[2] for key in narrow} == {2 * ITEMSIZE[case.types[0]]}
    else:
        assert not narrow


@pytest.mark.parametrize("case", [c for c in DYNAMIC if c.types[0] == "fp16"], ids=str)
def test_dynamic_sizes_leave_room_for_other_warps(case: Case) -> None:
    """No spill, and half of the warps that a multiprocessor can hold, of 8 elements a thread, or fewer of more: below,
    too few bytes are under way."""
    made = counted.kernel(case)
    registers, spilled, share = made.resources((9, 0))
    assert spilled == 0
    assert share * made.each >= 4, registers


# ------------------------------------------------------------------ sizes that had a cost of their own


def static(op: str, shape: tuple[int, ...], attributes: dict[str, Any], dtype: str = "fp16") -> Case:
    channels = shape[-1:] if len(shape) == 2 or attributes.get("channels_last") else shape[1:2]
    count = len(BY_NAME[op].inputs)
    return Case(op, "", (shape, *(channels,) * (count - 1)), (dtype,) * count, attributes)


@pytest.mark.parametrize("n", [5120, 10_240])
def test_rows_that_are_no_power_of_2_have_a_tactic_without_idle_lanes(n: int) -> None:
    """The tile of 8,192 for 5,120 elements has 37 % that do nothing but be issued. Read in pieces, a row issues 30 %
    fewer instructions than in one tile of 32 warps, and fewer than in one of any other number of warps; as many threads
    or more are resident."""
    case = static("LayerNorm", (4, n), LN)
    _, inputs, attributes = case.call()
    tiles = BY_NAME["LayerNorm"].tiles(inputs, attributes)
    kernels = [counted.kernel(case, tactic=tactic) for tactic in range(len(tiles))]
    issued = [counted.issued(case, kernel).instructions for kernel in kernels]
    resident = [kernel.resources((9, 0))[2] for kernel in kernels]
    whole = [i for i, tile in enumerate(tiles) if not tile.loop]
    pieces = min((i for i, tile in enumerate(tiles) if tile.loop), key=lambda i: issued[i])
    (widest,) = (i for i in whole if tiles[i].warps == 32)
    assert issued[pieces] < 0.7 * issued[widest]
    assert issued[pieces] < min(issued[i] for i in whole)
    assert resident[pieces] >= max(resident[i] for i in whole)


def test_rows_of_16384_have_a_tactic_of_which_several_blocks_fit() -> None:
    """A block of 32 warps with 46 registers is alone on a multiprocessor: while it stores, nothing is loaded."""
    case = static("LayerNorm", (4, 16_384), LN)
    looped = counted.kernel(case, tactic=len(row_tiles(16_384)) - 1)
    registers, _, _ = looped.resources((9, 0))
    assert blocks((9, 0), looped.compiled.warps, registers, looped.compiled.shared) >= 2


@pytest.mark.parametrize(
    ("op", "attributes"), [("GroupNormSiLU", GROUPS), ("ScaleShift", {"axis": 1, "activation": "silu"})]
)
@pytest.mark.parametrize(("channels", "side"), [(1024, 7), (512, 14), (2048, 7)])
def test_small_images_are_moved_by_16_bytes(op: str, attributes: dict[str, Any], channels: int, side: int) -> None:
    """7 · 7 is no multiple of 8, nor 14 · 14; a group's 32 · 49 is, and a sample."""
    case = static(op, (2, channels, side, side), attributes)
    made = counted.kernel(case)
    assert not counted.issued(case, made).narrow(2, made.compiled.warps * made.tile.rows)
    assert made.resources((9, 0))[2] >= 0.5


def test_rows_of_an_odd_length_leave_room_for_other_warps() -> None:
    """Each element has an address of its own: with 2,048 elements to 4 warps that took 150 registers."""
    registers, spilled, share = counted.kernel(static("InstanceNorm", (2, 64, 7, 7), EPS)).resources((9, 0))
    assert spilled == 0
    assert share >= 0.5, registers


def test_registers_are_allowed_by_name_where_ptxas_would_spill() -> None:
    case = next(c for c in DYNAMIC if c.op == "InstanceNorm" and c.types[0] == "fp16")
    made = counted.kernel(case, tactic=2)
    assert (made.tile.block, made.tile.warps) == (8192, 16)
    without = re.sub(r"\.maxnreg \d+\n", "", made.compiled.ptx)
    assert assemble(without, (9, 0)).spilled > 0
    assert assemble(made.compiled.ptx, (9, 0)).spilled == 0


# ------------------------------------------------------------------ every kernel for every GPU


FOR_EACH = [
    pytest.param(case, c, id=f"{case}-{c[0]}.{c[1]}")
    for case in cases()
    for c in LIMITS
    if c >= (FP8_SINCE if case.attributes.get("to") == "fp8" else (8, 0))
]


@pytest.mark.kernels
@pytest.mark.parametrize(("case", "capability"), FOR_EACH)
def test_no_tactic_spills(case: Case, capability: tuple[int, int]) -> None:
    op, inputs, attributes = case.call(unknown=Unknown()) if case.dynamic else case.call(SIZES[0])
    for tactic in range(len(op.tiles(inputs, attributes))):
        made = counted.kernel(case, capability, tactic, SIZES[0])
        registers, spilled, share = made.resources(capability)
        assert spilled == 0, tactic
        assert tactic or share * made.each >= 3.6, registers
