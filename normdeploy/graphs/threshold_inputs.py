"""Draw inputs at which a graph's constants take effect, and inputs with special numbers.

Normally distributed inputs seldom reach the range of a Clip from 5 to 9 or of a mask x > 100. So they can't distinguish
graphs that differ only in this range. `draw_threshold_values` draws each threshold
(`normdeploy.graphs.graph_thresholds`), the neighboring numbers in the input's type, and numbers further below and above
the threshold. `draw_special_values` draws −0, ±Inf, NaN and the smallest number.

The neighbors of 0 are subnormal. Processors multiply them many times more slowly than other numbers, so that a
convolution takes four times as long. If linear ops alone read an input, the smallest normal numbers are drawn instead.
In a sum, both are zero up to the smallest normal number times the weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from ..dtypes import is_float_dtype
from ..model import InputSpec
from .graph_thresholds import GraphThresholds

_LARGE = (2, 7, 127, 128, 255, 256, 2**15, 2**24 + 1, 2**31 - 1, -(2**31), 2**53 + 1)


def draw_threshold_values(
    spec: InputSpec, edges: GraphThresholds, rng: np.random.Generator, sizes: Mapping[str, int]
) -> np.ndarray:
    """Draw an input in which every second element is at, next to, below or above a threshold.

    A stated range is respected. Booleans and attention masks have no threshold and are drawn as usual.

    Args:
        edges: thresholds of the graph.
        sizes: sizes of named dims. A dim that is missing here gets its opt size.

    Returns: an array of the input's dtype.
    """
    values = spec.sample(rng, sizes)
    if spec.mask or not values.size or values.dtype.kind in "bSOU":
        return values
    if values.dtype.kind in "iu":
        pool = _integer_pool(spec, edges, values.dtype)
    else:
        pool = _float_pool(spec, edges, values.dtype)
    return _scatter_values(values, pool, rng, every=2)


def draw_special_values(spec: InputSpec, rng: np.random.Generator, sizes: Mapping[str, int]) -> np.ndarray:
    """Draw an input in which every eighth element is −0, ±Inf, NaN or the smallest number, and one row is Inf.

    The largest number is not included: whether its square overflows depends on rounding. Integer inputs, and inputs
    with a stated range, are drawn as usual, because they can't hold these numbers.

    Args:
        sizes: sizes of named dims. A dim that is missing here gets its opt size.

    Returns: an array of the input's dtype.
    """
    values = spec.sample(rng, sizes)
    if spec.range is not None or not values.size or not is_float_dtype(values.dtype):
        return values
    limits = ml_dtypes.finfo(values.dtype)
    pool = [-0.0, np.inf, np.nan, -np.inf, float(limits.smallest_subnormal)]
    values = _scatter_values(values, np.array(pool).astype(values.dtype), rng, every=8)
    if values.ndim > 1:
        values.reshape(-1, values.shape[-1])[0] = np.inf
    return values


def _scatter_values(values: np.ndarray, pool: np.ndarray, rng: np.random.Generator, every: int) -> np.ndarray:
    """Write the numbers of ``pool``, in random order, to random positions of ``values``."""
    if not pool.size:
        return values
    flat = values.reshape(-1)
    count = max(1, flat.size // every)
    places = rng.permutation(flat.size)[:count]
    flat[places] = np.resize(rng.permutation(pool), count)
    return flat.reshape(values.shape)


def _float_pool(spec: InputSpec, edges: GraphThresholds, dtype: np.dtype) -> np.ndarray:
    """Return the numbers at, next to and further from each threshold, in the input's dtype."""
    with np.errstate(all="ignore"):
        at = np.array(edges.for_input(spec.name) or (0.0,)).astype(dtype)
        near = [np.nextafter(at, np.array(side, dtype)) for side in (-np.inf, np.inf)]
        if spec.name in edges.summed and dtype == np.float32:
            least = np.finfo(dtype).smallest_normal
            near = [np.where(at == 0, sign * least, value) for sign, value in zip((-1, 1), near, strict=True)]
        apart = (np.abs(at.astype(np.float64)) / 8 + 0.25) * np.array([[-1.0], [1.0]])
        far = (at.astype(np.float64) + apart).astype(dtype).reshape(-1)
    pool = np.concatenate([at, *near, far, np.array([0.0, -0.0], dtype)])
    pool = pool[np.isfinite(pool.astype(np.float64))]
    if spec.range is None:
        return pool
    return pool[(pool.astype(np.float64) >= spec.range[0]) & (pool.astype(np.float64) <= spec.range[1])]


def _integer_pool(spec: InputSpec, edges: GraphThresholds, dtype: np.dtype) -> np.ndarray:
    """Return the integers at and next to each threshold.

    Large integers are added unless the input determines sizes or positions.
    """
    low, high = (int(n) for n in (np.iinfo(dtype).min, np.iinfo(dtype).max))
    at = {math.floor(v) for v in edges.for_input(spec.name) if abs(v) < 2**53}
    wanted = {0, 1, *(v + step for v in at for step in (-1, 0, 1, 2))}
    if spec.range is not None:
        low = max(low, math.ceil(spec.range[0]))
        high = min(high, math.ceil(spec.range[1]) - 1)
        wanted |= {low, high}
    elif (rows := edges.limits.get(spec.name)) is not None:
        low = max(low, rows.low)
        high = min(high, rows.high - 1)
        wanted |= {high // 2, high}
    elif spec.name in edges.sized:
        low = max(low, 0)
        high = 1
    else:
        wanted |= {low, high, -1, *_LARGE}
    return np.array(sorted(v for v in wanted if low <= v <= high), dtype=dtype)
