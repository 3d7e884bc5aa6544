"""Choose the input on which onnxruntime runs a joined norm, and the error that is expected for this input."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..graphs.dims import Dims
from ..graphs.region import EvaluationFailed
from ..recognition.norm_fit import NormFit
from .certification import Rewrite
from .rounding_cases import RoundingCase, rounding_patterns
from .rounding_verdicts import MakeTrial, TrialInput, make_norm_input, make_trial_of

# Sizes for the axes of x that are not normalized and that the file leaves open, and for a group norm's spatial axes
_FEW = (3, 4, 2, 3)
# Row length if the file leaves it open
_ROW = 9
# Largest static batch that is kept, because a Reshape may hold it
_BATCH = 8


@dataclass(frozen=True)
class NormGrouping:
    """Elements that are normalized together: the last axis, or a group of channels of (N, C, …) with all places.

    Attributes:
        epsilon: epsilon of the norm.
        centered: True if the mean is subtracted.
        groups: number of channel groups; 0 for the last axis.
        added: True if x is the sum of the first two leaves.
        gate: activation of the second leaf by which the norm is multiplied, "SiLU" or "Sigmoid"; "" for none.
        scaled: True if the norm is multiplied by the second leaf itself.
        sized: True if a constant of the norm has the size of the places, so that static sizes must be kept.
    """

    epsilon: float
    centered: bool = True
    groups: int = 0
    added: bool = False
    gate: str = ""
    scaled: bool = False
    sized: bool = False

    def as_fit(self, size: tuple[int, ...]) -> NormFit:
        """Build the `NormFit` of a norm with this grouping.

        Returns:
            the fit, with unit scale and zero shift.
        """
        axes, split, block = (
            (tuple(range(2, len(size))), 1, size[1] // self.groups) if self.groups else ((len(size) - 1,), None, 1)
        )
        return NormFit(size, axes, split, block, self.centered, self.epsilon, np.ones(()), np.zeros(()))


def epilogue_case(rewrite: Rewrite, grouping: NormGrouping) -> RoundingCase | None:
    """Build the test input, with all rounding patterns, at small sizes.

    Returns:
        the case; None if a side cannot be evaluated.
    """
    before = rewrite.before
    shapes = [before.graph.shape(leaf) or () for leaf in before.leaves]
    rng = np.random.default_rng(19)
    try:
        bound = before.bind({})
    except EvaluationFailed:
        return None
    size, *others = (_leaf_size(shape, grouping) for shape in shapes)
    fit = grouping.as_fit(size)
    x, names = rounding_patterns(size, fit.axes, fit.split, fit.block, grouping.epsilon)[0]
    rest = [rng.standard_normal(s) for s in others]
    return RoundingCase((x - rest[0] if grouping.added else x, *rest), names, bound)


def _leaf_size(shape: Dims, grouping: NormGrouping) -> tuple[int, ...]:
    """Choose the size of a leaf: the size of x, or the size of one vector per sample."""
    last = len(shape) - 1
    size = []
    for i, n in enumerate(shape):
        if grouping.groups:
            fixed = i == 1 or (grouping.sized and i > 1)
        else:
            fixed = i == last
        if isinstance(n, int) and (fixed or n == 1 or (i == 0 and n <= _BATCH)):
            size.append(n)
        else:
            size.append(_ROW if fixed else _FEW[min(i, len(_FEW) - 1)])
    return tuple(size)


def make_epilogue_trial(grouping: NormGrouping, scale: np.ndarray | None, opset: int) -> MakeTrial:
    """Build the function that makes the trial of the first output's rewrite (`rounding_verdicts.make_trial_of`).

    Args:
        scale: the constant scale; None if it is 1, or 1 + s with s the second leaf.

    Returns:
        a function of (rewrites, number of the trial).
    """

    def choose_input(rewrite: Rewrite) -> TrialInput | None:
        given = epilogue_case(rewrite, grouping)
        dtype = rewrite.before.graph.dtype(rewrite.before.leaves[0])
        if given is None or dtype is None:
            return None
        x, *others = given.leaves
        if scale is not None:
            gain = float(np.abs(scale).max())
        elif grouping.scaled:
            gain = 1.0
        else:
            gain = float(np.abs(1 + others[0]).max())
        if grouping.scaled:
            gain *= float(np.abs(others[0]).max())
        if grouping.gate:
            opened = 1 / (1 + np.exp(-others[0]))
            gain *= float(np.abs(opened * others[0] if grouping.gate == "SiLU" else opened).max())
        fit = grouping.as_fit(x.shape)
        return make_norm_input(
            given, dtype, fit, fit.rows_of(x + others[0] if grouping.added else x), epsilon=grouping.epsilon, gamma=gain
        )

    return make_trial_of(choose_input, opset)
