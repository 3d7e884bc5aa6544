"""Inputs on which onnxruntime is asked what a rewrite costs in accuracy: one case a rewrite, every pattern of the
battery in some group.

What is proved does not rest on them (`normdeploy.proof`); they are chosen to show cancellation, small variances and
large numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..evaluate import evaluator
from ..evaluate.evaluation_budget import is_affordable
from ..graphs.region import BoundRegion, EvaluationFailed, concrete_shape, size_assignments
from ..recognition.norm_facts import Norm
from ..recognition.norm_fit import NormFit
from ..recognition.probe_sizes import bound_regions, find_loose_axes
from .certification import Rewrite


@dataclass(frozen=True)
class RoundingCase:
    """One input of the battery, laid out for a rewrite: leaf values, and the name of the pattern in each group."""

    leaves: tuple[np.ndarray, ...]
    names: tuple[str, ...]
    before: BoundRegion


Pattern = Callable[[np.random.Generator, int, float], np.ndarray]

# The battery: a name and what it makes of (generator, elements of the group, epsilon), each with its reason.
PATTERNS: dict[str, Pattern] = {
    "normal": lambda rng, n, e: rng.standard_normal(n),
    # x̂ is zero but for a lost epsilon (a power of two: its mean is exact)
    "constant": lambda rng, n, e: np.full(n, 0.5),
    # 0/0 where epsilon did not survive
    "zero": lambda rng, n, e: np.zeros(n),
    # cancellation
    "offset 1e3": lambda rng, n, e: 1e3 + rng.standard_normal(n),
    # the usual epsilons dominate
    "scale 1e-4": lambda rng, n, e: 1e-4 * rng.standard_normal(n),
    # and here this one counts, whatever it is
    "scale of epsilon": lambda rng, n, e: np.sqrt(e or 1e-12) * rng.standard_normal(n),
    # ddof
    "one-hot": lambda rng, n, e: np.eye(1, n, int(rng.integers(n)))[0],
    # near the limit of half precision
    "large 3e4": lambda rng, n, e: 3e4 * rng.uniform(-1, 1, n),
    "skewed": lambda rng, n, e: rng.standard_normal(n) ** 3 + np.arange(n) / n,
}


def norm_case(norm: Norm, rewrite: Rewrite) -> RoundingCase | None:
    """The battery at the first sizes that suit the norm; None where it can't be evaluated."""
    loose = find_loose_axes(norm.region)
    return _norm_case_at_sizes(norm, rewrite, loose) or (_norm_case_at_sizes(norm, rewrite, ()) if loose else None)


def _norm_case_at_sizes(norm: Norm, rewrite: Rewrite, loose: tuple[int, ...]) -> RoundingCase | None:
    rng = np.random.default_rng(11)
    for bound, size in bound_regions(norm.region, loose):
        try:
            after = rewrite.after.bind(bound.sizes)
            layout = norm.fit.resize(size)
            # the sizes may not suit each other
            if len(bound.sizes) > 1 or loose:
                with evaluator.silence_numpy():
                    others = [
                        np.zeros(concrete_shape(norm.region.graph, t, bound.sizes) or ())
                        for t in norm.region.leaves[1:]
                    ]
                    bound.run([np.zeros(size), *others])
                    after.run([np.zeros(size), *others])
        except (EvaluationFailed, ValueError):
            continue
        x, names = rounding_patterns(size, layout.axes, layout.split, layout.block, norm.epsilon)[0]
        others = [
            rng.standard_normal(concrete_shape(norm.region.graph, t, bound.sizes) or ()) for t in norm.region.leaves[1:]
        ]
        return RoundingCase((x, *others), names, bound)
    return None


def rounding_patterns(
    shape: tuple[int, ...], axes: tuple[int, ...], split: int | None, block: int, epsilon: float
) -> tuple[tuple[np.ndarray, tuple[str, ...]], ...]:
    """Every pattern in some group, for all norms that group alike: inputs of the shape, and the patterns of their
    groups."""
    # large ones are not kept
    made = _cached_patterns if math.prod(shape) <= _FEW else _cached_patterns.__wrapped__
    return made(shape, axes, split, block, epsilon)


@lru_cache(maxsize=8)
def _cached_patterns(
    shape: tuple[int, ...], axes: tuple[int, ...], split: int | None, block: int, epsilon: float
) -> tuple[tuple[np.ndarray, tuple[str, ...]], ...]:
    rng = np.random.default_rng(11)
    layout = NormFit(shape, axes, split, block, True, epsilon, np.ones(()), np.zeros(()))
    order = list(PATTERNS)
    n = layout.group_size
    groups = math.prod(shape) // n
    made: list[tuple[np.ndarray, tuple[str, ...]]] = []
    for start in range(0, len(order), groups):
        names = tuple(order[(start + g) % len(order)] for g in range(groups))
        # Of many groups the first ones are drawn, and the others are the same again.
        rows = np.array([PATTERNS[name](rng, n, epsilon) for name in names[: _GROUPS * len(order)]])
        x = layout.arrange_rows(np.resize(rows, (groups, n)))
        x.setflags(write=False)
        made.append((x, names))
    return tuple(made)


def fold_case(rewrite: Rewrite, windows: Sequence[tuple[int, ...] | None]) -> tuple[RoundingCase, float] | None:
    """A normal input for a fold, and the largest sum of magnitudes that an output adds up; None where none is
    affordable.

    ``windows``: for each leaf a shape that shows everything at less cost (a convolution's window); the file's own sizes
    are the fallback.
    """
    graph = rewrite.before.graph
    leaves = rewrite.before.leaves
    rng = np.random.default_rng(13)
    for sizes in size_assignments(rewrite.before.symbols | rewrite.after.symbols, graph.shape(leaves[0])):
        for shapes in (windows, [concrete_shape(graph, leaf, sizes) for leaf in leaves]):
            known = [shape for shape in shapes if shape is not None]
            if len(known) < len(leaves) or not all(
                is_affordable(shape) and math.prod(shape) <= _MOST for shape in known
            ):
                continue
            drawn = tuple(rng.standard_normal(shape) for shape in known)
            try:
                with evaluator.silence_numpy():
                    bound = rewrite.before.bind(sizes)
                    terms = bound.largest_magnitude(drawn)
            except (EvaluationFailed, ValueError):
                continue
            return RoundingCase(drawn, ("normal",), bound), terms
    return None


# elements of an input that a fold is tried on
_MOST = 2**20
# of each pattern that are drawn
_GROUPS = 256
# elements of inputs that are kept for the next norm
_FEW = 2**16
