"""Counted and not timed: how wide the accesses are that a kernel issues, its registers, spills and occupancy."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import triton
from normdeploy_plugins._launch import ITEMSIZE
from normdeploy_plugins.ops import BY_NAME

from . import counted
from .bindings.cases import Case, cases
from .cases import ROW_OPS
from .emulated import Unknown
from .occupancy import LIMITS, blocks

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


def one_type(case: Case) -> bool:
    """Whether parameters have the data's type."""
    return {case.types[0]} >= {t for t, kind in zip(case.types, BY_NAME[case.op].types, strict=False) if kind != "F"}


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
    """No spill, and half of the warps that a multiprocessor can hold: below, too few bytes are under way."""
    made = counted.kernel(case)
    registers, spilled, share = made.resources((9, 0))
    assert spilled == 0
    assert share >= 0.5, registers
