"""The sizes at which a region is asked and judged: its symbolic dims get some, and so do large static dims that it
treats place by place.

A norm of (64, 256, 56, 56) over the channels is the same function at each of its 64 · 56 · 56 places, so a few of them
show what it computes. An axis of x is loose, and gets two small sizes in turn like a dynamic one, where all of this
holds:

- the region reads x alone and no shapes, so that nothing but its constants can know the static size;
- it can be evaluated at a small size of that axis: no constant (gamma, the shape of a Reshape) holds the static one;
- where one element of x changes, y changes at no other place along that axis: nothing is summed up over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from ..evaluate import evaluate
from ..evaluate.budget import affordable
from ..graphs.region import Bound, EvaluationFailed, Region, assignments, concrete

_LARGE = 2**16  # elements of x up to which static sizes are left as they are
_LONG = 8  # an axis up to this is left as it is
_FEW = (2, 3)  # in place of a longer one; never 1, which would broadcast
_TRIAL = 3  # while it is not known yet what is normalized: of two elements x̂ is ±1 and depends on neither


def bindings(region: Region, loose: tuple[int, ...] | None = None) -> Iterator[tuple[Bound, tuple[int, ...]]]:
    """The region bound to sizes that suit it, with x's concrete shape.

    ``loose``: the axes of x whose static size is replaced, those of `loose_axes` where it is None.
    """
    any_size = loose is not None
    loose = loose_axes(region) if loose is None else loose
    tries = assignments(region.symbols, region.graph.shape(region.leaves[0]))
    for turn, small in enumerate(tries * 2 if loose and len(tries) == 1 else tries):
        sizes, size = _wide_enough(region, small)
        if size is None:
            return
        try:
            with evaluate.quiet():
                few = {a: _FEW[(turn + i) % len(_FEW)] for i, a in enumerate(loose)}
                taken = tuple(few.get(a, n) for a, n in enumerate(size))
                if any_size or affordable(taken):
                    yield region.bind(sizes), taken
        except EvaluationFailed:
            continue


def _wide_enough(region: Region, sizes: Mapping[str, int]) -> tuple[Mapping[str, int], tuple[int, ...] | None]:
    """``sizes``, or larger ones where x has next to no places at them: a waveform of 5 samples leaves -1 behind two
    convolutions."""
    dims = region.graph.shape(region.leaves[0]) or ()
    for factor in (1, 8, 64, 512):
        larger = {name: factor * n for name, n in sizes.items()}
        size = concrete(region.graph, region.leaves[0], larger)
        if size is None or all(n > 1 for n, d in zip(size, dims, strict=True) if isinstance(d, str) and d not in sizes):
            break
    return larger, size


def loose_axes(region: Region) -> tuple[int, ...]:
    """The axes of x, the first leaf, whose static size says nothing about what the region computes."""
    graph = region.graph
    if len(region.leaves) > 1 or region.shape_leaves or any(n.op in ("Shape", "Size") for n in region.nodes):
        return ()
    shape = graph.shape(region.leaves[0]) or ()
    long = [a for a, n in enumerate(shape) if isinstance(n, int) and n > _LONG]
    for bound, size in bindings(region, ()):
        if not long or math.prod(size) <= _LARGE:
            return ()
        key = ("loose", region.template)
        if key not in graph.memo:
            graph.memo[key] = _place_by_place(bound, size, long)
        axes = graph.memo[key]
        assert isinstance(axes, tuple)
        return axes
    return ()


def _place_by_place(bound: Bound, size: tuple[int, ...], long: list[int]) -> tuple[int, ...]:
    loose: tuple[int, ...] = ()
    for axis in long:
        if not affordable(_tried(size, (*loose, axis))):
            continue
        if _asked(bound, np.zeros(_tried(size, (*loose, axis)))) is not None:
            loose = (*loose, axis)
    if not loose:
        return ()
    x = np.random.default_rng(17).uniform(0.5, 1.5, _tried(size, loose))
    still = _asked(bound, x)
    assert still is not None
    alone = set(loose)
    for place in (0, x.size - 1):
        moved = x.copy()
        moved.flat[place] += 7.0
        other = _asked(bound, moved)
        assert other is not None
        changed = np.argwhere(~((other == still) | (np.isnan(other) & np.isnan(still))))
        alone -= {a for a in loose if (changed[:, a] != np.unravel_index(place, x.shape)[a]).any()}
    return tuple(sorted(alone))


def _asked(bound: Bound, x: np.ndarray) -> np.ndarray | None:
    """The region's value, None where it has none of x's shape."""
    try:
        with evaluate.quiet():
            y = bound.run([x])
    except EvaluationFailed:
        return None
    return y if y.shape == x.shape else None


def _tried(size: tuple[int, ...], loose: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_TRIAL if a in loose else n for a, n in enumerate(size))
