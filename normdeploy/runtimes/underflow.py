"""Round numbers below a dtype's smallest normal number as the dtype does: to multiples of one spacing, including zero.

With relative rounding errors alone, 1e-60 would stay larger than 1e-90. In float32 both numbers are 0, so a sort may
put either first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtypes import UNIT_ROUNDOFF


@dataclass(frozen=True)
class _SubnormalRange:
    """Smallest normal number of a dtype, and the spacings that kernels use below that number.

    Attributes:
        normal: the smallest normal number.
        spacings: the spacing of subnormal numbers, and ``normal`` itself, for kernels that flush subnormal numbers to
            0.
    """

    normal: float
    spacings: tuple[float, ...]


# Unit roundoff -> range.
_SMALL = {
    UNIT_ROUNDOFF["float32"]: _SubnormalRange(2.0**-126, (2.0**-149, 2.0**-126)),
    UNIT_ROUNDOFF["float16"]: _SubnormalRange(2.0**-14, (2.0**-24,)),
    UNIT_ROUNDOFF["bfloat16"]: _SubnormalRange(2.0**-126, (2.0**-133, 2.0**-126)),
}


def round_underflow(values: np.ndarray, unit: float, rng: np.random.Generator) -> None:
    """Round float64 values below a dtype's smallest normal number up or down at random, in place.

    The sign of a number does not change. On average over many draws, its value does not change either.

    Args:
        unit: the dtype's unit roundoff; nothing happens for a dtype without a listed range.
    """
    if (small := _SMALL.get(unit)) is None:
        return
    size = np.abs(values)
    below = (size < small.normal) & (size > 0)
    if not below.any():
        return
    spacing = small.spacings[rng.integers(len(small.spacings))]
    steps = np.floor(size[below] / spacing + rng.random(int(below.sum())))
    values[below] = np.copysign(spacing * steps, values[below])
