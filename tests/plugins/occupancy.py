"""How many blocks of a kernel a multiprocessor holds at once: the rules of NVIDIA's ``cuda_occupancy.h``, which
Triton's wheel carries (the test compiles it and compares), with the limits of the CUDA C++ Programming Guide, "Compute
Capabilities", table "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
REGISTERS = 65_536  # of a multiprocessor, in every capability below


@dataclass(frozen=True)
class Limits:
    """Of one multiprocessor; ``shared`` in bytes, ``reserved``: what the driver takes of it for each block."""

    warps: int
    blocks: int
    shared: int
    reserved: int = KIB


LIMITS = {
    (7, 5): Limits(32, 16, 64 * KIB, 0),
    (8, 0): Limits(64, 32, 164 * KIB),
    (8, 6): Limits(48, 16, 100 * KIB),
    (8, 9): Limits(48, 24, 100 * KIB),
    (9, 0): Limits(64, 32, 228 * KIB),
    (10, 0): Limits(64, 32, 228 * KIB),
    (12, 0): Limits(48, 24, 100 * KIB),
}


def blocks(capability: tuple[int, int], warps: int, registers: int, shared: int) -> int:
    """Blocks of ``warps`` warps on one multiprocessor at once; ``registers`` a thread, ``shared`` bytes a block.

    Registers are given to warps by 256, from a fourth of the registers for each of the four schedulers; shared memory
    to blocks by 128 bytes (7.5: 256).
    """
    limits = LIMITS[capability]
    unit = 128 if capability >= (8, 0) else 256
    by_warp = -(-registers * 32 // 256) * 256
    fitting = REGISTERS // 4 // by_warp * 4
    taken = -(-(shared + limits.reserved) // unit) * unit
    return min(
        limits.blocks, limits.warps // warps, fitting // warps, limits.shared // taken if taken else limits.blocks
    )


def occupancy(capability: tuple[int, int], warps: int, registers: int, shared: int) -> float:
    """The share of the warps that a multiprocessor can hold."""
    return blocks(capability, warps, registers, shared) * warps / LIMITS[capability].warps
