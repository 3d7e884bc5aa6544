"""Rounds numbers below the smallest normal one as a type does: to one spacing there, zero among it.

Relative roundings alone leave 1e-60 and 1e-90 in order. In float32 both are 0, so either may come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtypes import UNIT_ROUNDOFF


@dataclass(frozen=True)
class _SubnormalRange:
    """The smallest normal number of a type, and the spacings below it, by the kernels that there are.

    They are that of subnormal numbers, and ``normal`` itself where these become 0.
    """

    normal: float
    spacings: tuple[float, ...]


# By the unit roundoff.
_SMALL = {
    UNIT_ROUNDOFF["float32"]: _SubnormalRange(2.0**-126, (2.0**-149, 2.0**-126)),
    UNIT_ROUNDOFF["float16"]: _SubnormalRange(2.0**-14, (2.0**-24,)),
    UNIT_ROUNDOFF["bfloat16"]: _SubnormalRange(2.0**-126, (2.0**-133, 2.0**-126)),
}


def round_underflow(values: np.ndarray, unit: float, rng: np.random.Generator) -> None:
    """Round the float64 ``values`` that a type's normal numbers do not reach, up or down at random, in place.

    A number keeps its sign, and its value on average. ``unit``: the type's unit roundoff.
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
