"""Choose the sizes at which a region is evaluated to read it as a norm.

Symbolic dims need a size. Large static dims get a smaller size if the region computes the same function at each index
along them. For example, a norm of (64, 256, 56, 56) over the channels computes the same function at each of the 64 · 56
· 56 combinations of the other indices. A few of them therefore show the function. An axis of x is called loose if all
three conditions hold:

- The region reads no data but x, and no shapes. So only its constants can depend on the static size.
- The region can be evaluated at a small size of this axis. So no constant (gamma, the shape of a Reshape) has the
  static size.
- If one element of x changes, y changes only at the same index along this axis. So nothing is summed over the axis.

A loose axis gets two small sizes in turn, like a dynamic axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from ..evaluate import evaluator
from ..evaluate.evaluation_budget import is_affordable
from ..graphs.region import BoundRegion, EvaluationFailed, Region, concrete_shape, size_assignments

# If x has at most this number of elements, its static sizes are not changed.
_LARGE = 2**16
# An axis of at most this size is not changed.
_LONG = 8
# Sizes of a loose axis. Size 1 would broadcast, so it is not used.
_FEW = (2, 3)
# Size of an axis while the normalized axes are unknown. Size 2 would hide changes: the normalized values of two
# elements are always ±1.
_TRIAL = 3


def bound_regions(
    region: Region, loose: tuple[int, ...] | None = None
) -> Iterator[tuple[BoundRegion, tuple[int, ...]]]:
    """Bind a region to sizes at which it can be evaluated.

    Args:
        loose: axes of x whose static size is replaced; None to use `find_loose_axes`.

    Yields:
        the bound region and the concrete shape of x.
    """
    any_size = loose is not None
    if loose is None:
        loose = find_loose_axes(region)
    tries = size_assignments(region.symbols, region.graph.shape(region.leaves[0]))
    for turn, small in enumerate(tries * 2 if loose and len(tries) == 1 else tries):
        sizes, size = _enlarge_sizes(region, small)
        if size is None:
            return
        try:
            with evaluator.silence_numpy():
                few = {a: _FEW[(turn + i) % len(_FEW)] for i, a in enumerate(loose)}
                taken = tuple(few.get(a, n) for a, n in enumerate(size))
                if any_size or is_affordable(taken):
                    yield region.bind(sizes), taken
        except EvaluationFailed:
            continue


def _enlarge_sizes(region: Region, sizes: Mapping[str, int]) -> tuple[Mapping[str, int], tuple[int, ...] | None]:
    """Return ``sizes``, or larger sizes if x would have almost no elements.

    For example, a waveform of 5 samples would have −1 samples after two convolutions.
    """
    dims = region.graph.shape(region.leaves[0]) or ()
    for factor in (1, 8, 64, 512):
        larger = {name: factor * n for name, n in sizes.items()}
        size = concrete_shape(region.graph, region.leaves[0], larger)
        if size is None or all(n > 1 for n, d in zip(size, dims, strict=True) if isinstance(d, str) and d not in sizes):
            break
    return larger, size


def find_loose_axes(region: Region) -> tuple[int, ...]:
    """Find the loose axes of x, the first leaf. Their static size does not affect the region's function.

    Returns:
        the axes, sorted; empty if x has at most 2^16 elements, or if the region reads other data or shapes.
    """
    graph = region.graph
    if len(region.leaves) > 1 or region.shape_leaves or any(n.op in ("Shape", "Size") for n in region.nodes):
        return ()
    shape = graph.shape(region.leaves[0]) or ()
    long = [a for a, n in enumerate(shape) if isinstance(n, int) and n > _LONG]
    for bound, size in bound_regions(region, ()):
        if not long or math.prod(size) <= _LARGE:
            return ()
        key = ("loose", region.template)
        if key not in graph.memo:
            graph.memo[key] = _axes_computed_by_place(bound, size, long)
        axes = graph.memo[key]
        assert isinstance(axes, tuple)
        return axes
    return ()


def _axes_computed_by_place(bound: BoundRegion, size: tuple[int, ...], long: list[int]) -> tuple[int, ...]:
    """Return the ``long`` axes along which an element of x changes y only at its own index."""
    loose: tuple[int, ...] = ()
    for axis in long:
        if not is_affordable(_shrink_loose_axes(size, (*loose, axis))):
            continue
        if _evaluate_region(bound, np.zeros(_shrink_loose_axes(size, (*loose, axis)))) is not None:
            loose = (*loose, axis)
    if not loose:
        return ()
    x = np.random.default_rng(17).uniform(0.5, 1.5, _shrink_loose_axes(size, loose))
    still = _evaluate_region(bound, x)
    assert still is not None
    alone = set(loose)
    for place in (0, x.size - 1):
        moved = x.copy()
        moved.flat[place] += 7.0
        other = _evaluate_region(bound, moved)
        assert other is not None
        changed = np.argwhere(~((other == still) | (np.isnan(other) & np.isnan(still))))
        alone -= {a for a in loose if (changed[:, a] != np.unravel_index(place, x.shape)[a]).any()}
    return tuple(sorted(alone))


def _evaluate_region(bound: BoundRegion, x: np.ndarray) -> np.ndarray | None:
    """Return the region's value, or None if it can't be evaluated or its shape is not that of x."""
    try:
        with evaluator.silence_numpy():
            y = bound.run([x])
    except EvaluationFailed:
        return None
    if y.shape == x.shape:
        return y
    return None


def _shrink_loose_axes(size: tuple[int, ...], loose: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_TRIAL if a in loose else n for a, n in enumerate(size))
