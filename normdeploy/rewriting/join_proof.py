"""The certificate of a norm that was joined with its neighbours: nodes before and op after, in float64 on `rewriting.certify`'s battery.

Both sides are made of ops that do the same at each place outside what is normalized over, with parameters of known shape and no shape
arithmetic. So small sizes of all other axes prove it, whatever the file says of them. Both hold the same epsilon, in float32, and take the
same steps, so that there is nothing to allow for but 1e-7 of each row's largest element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..evaluate import evaluate
from ..graphs.dims import Dims
from ..recognition.probe import Fit
from ..recognition.region import EvaluationFailed
from ..records import Certificate
from . import rounding
from .certify import BOUND, Case, Rewrite, battery
from .rounding import Trial

_SIZES = ((3, 4, 2, 3), (9, 2, 3, 2))  # of the axes of x that are not normalized over, and of a group norm's places
_ROW = (9, 11)  # elements of a row whose number is dynamic
_BATCH = 8  # a static batch up to this is taken as it is: a Reshape may hold it


@dataclass(frozen=True)
class Grouping:
    """What is normalized over: the last axis, or of (N, C, …) one of ``groups`` parts of the channels and all places."""

    epsilon: float
    centered: bool = True
    groups: int = 0
    added: bool = False  # x is the sum of the first two leaves

    def fit(self, size: tuple[int, ...]) -> Fit:
        axes, split, block = (tuple(range(2, len(size))), 1, size[1] // self.groups) if self.groups else ((len(size) - 1,), None, 1)
        return Fit(size, axes, split, block, self.centered, self.epsilon, np.ones(()), np.zeros(()))


def cases(pairs: Sequence[Rewrite], grouping: Grouping) -> list[list[Case]]:
    """For each output the battery at two sizes; empty where one side can't be evaluated."""
    before = pairs[0].before
    shapes = [before.graph.shape(leaf) or () for leaf in before.leaves]
    rng = np.random.default_rng(19)
    found: list[list[Case]] = [[] for _ in pairs]
    try:
        bound = [(pair.before.bind({}), pair.after.bind({})) for pair in pairs]
    except EvaluationFailed:
        return []
    for row, few in zip(_ROW, _SIZES, strict=True):
        size, *others = (_size(shape, row, few, grouping) for shape in shapes)
        fit = grouping.fit(size)
        for x, names in battery(size, fit.axes, fit.split, fit.block, grouping.epsilon, ()):
            rest = [rng.standard_normal(s) for s in others]
            leaves = (x - rest[0] if grouping.added else x, *rest)
            for kept, (old, new) in zip(found, bound, strict=True):
                kept.append(Case(leaves, names, old, new))
    return found


def _size(shape: Dims, row: int, few: Sequence[int], grouping: Grouping) -> tuple[int, ...]:
    """A leaf's size: that of x, or of a vector for each sample."""
    last = len(shape) - 1
    size = []
    for i, n in enumerate(shape):
        fixed = i == 1 if grouping.groups else i == last
        if isinstance(n, int) and (fixed or n == 1 or (i == 0 and n <= _BATCH)):
            size.append(n)
        else:
            size.append(row if fixed else few[min(i, len(few) - 1)])
    return tuple(size)


def certified(proof: Sequence[Sequence[Case]], grouping: Grouping) -> Certificate:
    """The identity verdict on every output."""
    every = [case for cases in proof for case in cases]
    if not every:
        return Certificate(False, float("inf"), BOUND, 0, "", note="the op could not be evaluated")
    worst, name = 0.0, every[0].names[0]
    for case in every:
        try:
            with evaluate.quiet():
                ratio = _difference(case.before.run(case.leaves), case.after.run(case.leaves), grouping)
        except EvaluationFailed as e:
            return Certificate(False, float("inf"), BOUND, len(every), "", note=str(e))
        g = int(np.argmax(ratio))
        if not ratio[g] <= worst:
            worst, name = float(ratio[g]), case.names[g]
    return Certificate(worst <= BOUND, worst, BOUND, sum(len(c.names) for c in every), name)


def _difference(before: np.ndarray, after: np.ndarray, grouping: Grouping) -> np.ndarray:
    """Of each row, relative to its largest element; infinite where one side alone is not a number."""
    fit = grouping.fit(before.shape)
    if after.shape != before.shape:
        return np.full(len(fit.rows(before)), np.inf)
    ref, got = fit.rows(before), fit.rows(after)
    apart = np.where((ref == got) | (np.isnan(ref) & np.isnan(got)), 0.0, np.abs(ref - got))
    return np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max(axis=1) / (np.nan_to_num(np.abs(ref)).max(axis=1) + 1e-300)


def trial(
    proof: Sequence[Sequence[Case]], rewrite: Rewrite, grouping: Grouping, scale: np.ndarray | None, opset: int, n: int
) -> Trial | None:
    """The first output's rewrite for onnxruntime; what is expected of it is what `normdeploy.rewriting.rounding` expects of a norm.

    ``scale``: where it is constant; 1 + s of the second leaf where not. ``n``: makes names that no other trial has.
    """
    graph, case = rewrite.before.graph, proof[0][0]
    fit, gain = grouping.fit(case.leaves[0].shape), float(np.abs(1 + case.leaves[1] if scale is None else scale).max())

    def expected(reference: np.ndarray, unit: float) -> np.ndarray:
        x = fit.rows(case.leaves[0] + case.leaves[1] if grouping.added else case.leaves[0])
        spread = np.square(x - x.mean(axis=1, keepdims=True) if grouping.centered else x).mean(axis=1)
        condition = 1 + np.abs(x).max(axis=1) / np.sqrt(spread + grouping.epsilon)
        return 8 * unit * condition * gain + unit * np.abs(fit.rows(reference)).max(axis=1)

    dtype = graph.dtype(rewrite.before.leaves[0])
    return None if dtype is None else rounding.trial(graph, case, rewrite, dtype, opset, n, fit.rows, expected)
