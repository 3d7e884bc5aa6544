"""Build the inputs on which onnxruntime measures a rewrite's accuracy.

There is one case per rewrite. Each pattern fills at least one group of its input.

Proofs do not depend on these inputs (`normdeploy.proof`). The inputs are chosen to show cancellation, small variances
and large numbers.
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
    """Input of a rewrite.

    Attributes:
        leaves: values of the leaves.
        names: pattern of each group.
        before: the nodes before the rewrite, at the sizes of the case.
    """

    leaves: tuple[np.ndarray, ...]
    names: tuple[str, ...]
    before: BoundRegion


Pattern = Callable[[np.random.Generator, int, float], np.ndarray]

# The battery: each pattern is computed from (generator, elements of the group, epsilon). The comments give the reasons.
PATTERNS: dict[str, Pattern] = {
    "normal": lambda rng, n, e: rng.standard_normal(n),
    # The result is zero unless epsilon was lost. 0.5 is a power of two, so the mean is exact
    "constant": lambda rng, n, e: np.full(n, 0.5),
    # The result is 0/0 if epsilon was lost
    "zero": lambda rng, n, e: np.zeros(n),
    # Shows cancellation
    "offset 1e3": lambda rng, n, e: 1e3 + rng.standard_normal(n),
    # The variance is smaller than a usual epsilon
    "scale 1e-4": lambda rng, n, e: 1e-4 * rng.standard_normal(n),
    # The variance is as large as the norm's epsilon
    "scale of epsilon": lambda rng, n, e: np.sqrt(e or 1e-12) * rng.standard_normal(n),
    # Shows a wrong ddof
    "one-hot": lambda rng, n, e: np.eye(1, n, int(rng.integers(n)))[0],
    # Near the largest float16 number
    "large 3e4": lambda rng, n, e: 3e4 * rng.uniform(-1, 1, n),
    "skewed": lambda rng, n, e: rng.standard_normal(n) ** 3 + np.arange(n) / n,
}


def norm_case(norm: Norm, rewrite: Rewrite) -> RoundingCase | None:
    """Build the battery at the first sizes that suit the norm.

    Returns:
        the case; None if the norm cannot be evaluated.
    """
    loose = find_loose_axes(norm.region)
    return _norm_case_at_sizes(norm, rewrite, loose) or (_norm_case_at_sizes(norm, rewrite, ()) if loose else None)


def _norm_case_at_sizes(norm: Norm, rewrite: Rewrite, loose: tuple[int, ...]) -> RoundingCase | None:
    rng = np.random.default_rng(11)
    for bound, size in bound_regions(norm.region, loose):
        try:
            after = rewrite.after.bind(bound.sizes)
            layout = norm.fit.resize(size)
            # The sizes of the shapes may not be compatible, so other sizes are tried.
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
    """Lay out the patterns so that each fills at least one group; cached for norms with the same groups.

    Args:
        shape: shape of the input.
        axes: normalized axes.
        split: axis that is split into groups; None for none.
        block: size of a group along the split axis.
        epsilon: epsilon of the norm.

    Returns:
        inputs of this shape, each with the pattern names of its groups.
    """
    # Large inputs are not cached.
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
        # Only the first groups are drawn; later groups repeat them.
        rows = np.array([PATTERNS[name](rng, n, epsilon) for name in names[: _GROUPS * len(order)]])
        x = layout.arrange_rows(np.resize(rows, (groups, n)))
        x.setflags(write=False)
        made.append((x, names))
    return tuple(made)


def fold_case(rewrite: Rewrite, windows: Sequence[tuple[int, ...] | None]) -> tuple[RoundingCase, float] | None:
    """Build a normally distributed input for a fold.

    Args:
        windows: for each leaf, a smaller shape that uses the whole weight (a convolution's window), or None for the
            shape in the file. If these shapes fail, all leaves get the shapes in the file.

    Returns:
        the case, and the largest sum of magnitudes in an output; None if all sizes have too many elements.
    """
    graph = rewrite.before.graph
    leaves = rewrite.before.leaves
    rng = np.random.default_rng(13)
    for sizes in size_assignments(rewrite.before.symbols | rewrite.after.symbols, graph.shape(leaves[0])):
        for shapes in (windows, [concrete_shape(graph, leaf, sizes) for leaf in leaves]):
            # A size is negative if the input of a convolution is shorter than its kernel.
            known = [shape for shape in shapes if shape is not None and min(shape, default=0) >= 0]
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


# Maximum number of elements of an input of a fold
_MOST = 2**20
# Maximum number of groups per pattern to draw
_GROUPS = 256
# Maximum number of elements of an input that is cached
_FEW = 2**16
