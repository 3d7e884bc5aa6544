"""Describe the two sides of a rewrite as functions of the same leaves.

A leaf is a tensor that both sides read as data. The prover sees only this description, so any kind of rewrite can be
proved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from ..evaluate import evaluator
from ..graphs.graph import Graph
from ..graphs.region import EvaluationFailed, Region, concrete_shape
from ..graphs.symbolic_sizes import Size
from .axis_plan import AxisPlan
from .computed_constants import ComputedConstants, Side
from .proof_budget import OperationBudget
from .proof_errors import NotProved, ProofFailure
from .region_evaluation import evaluate_region, shape_of
from .sampler import StoredConstant


@dataclass(frozen=True)
class Equivalence:
    """Claim that ``before`` and ``after`` compute the same results from leaves of the given shapes.

    Attributes:
        shapes: shape of each leaf.
        before: function of the nodes before the rewrite.
        after: function of the nodes after the rewrite, with as many results as ``before``.
        culprit: name of the tensor to report if the proof fails.
        at: runs both sides in float64 at the passed sizes. It fills each leaf with the passed number, or with normal
            samples if the number is NaN. It returns None if a side cannot be run.
        graph: graph that holds the nodes after the rewrite, to read their constants and epsilons.
        nodes: the nodes after the rewrite.
        expressions: the computed constants of a fold.
        named: symbols, keyed by the length of axis that each symbol replaces. The proof then holds for any length.
        partly_hidden: indices of the leaves in which no row consists of -Inf only. The transform that proposed the
            rewrite has shown this.
        held: constants already read, by the ids of their tensors. Each constant is read once for all evaluations.
        work: operations spent on all attempts at this proof.
    """

    shapes: tuple[tuple[Size, ...], ...]
    before: Side
    after: Side
    culprit: str = ""
    at: Callable[[Mapping[str, int], Sequence[float]], tuple[list[Any], list[Any]] | None] = lambda sizes, numbers: None
    graph: Graph | None = None
    nodes: tuple[gs.Node, ...] = ()
    expressions: ComputedConstants | None = None
    named: dict[int, Size] = field(default_factory=dict)
    partly_hidden: frozenset[int] = frozenset()
    held: dict[int, StoredConstant] = field(default_factory=dict, repr=False, compare=False)
    work: OperationBudget = field(default_factory=OperationBudget, repr=False, compare=False)

    def of_any_length(self) -> Equivalence:
        """Replace the lengths in ``named`` by their symbols in the shapes of the leaves.

        Returns:
            a copy of this equivalence.
        """
        plan = AxisPlan(named=self.named)
        return replace(self, shapes=tuple(map(plan.shape_of_file, self.shapes)))

    def after_constants(self) -> list[gs.Constant]:
        """List the constants that the nodes after the rewrite read.

        Returns:
            each constant once.
        """
        return list({id(t): t for n in self.nodes for t in n.inputs if isinstance(t, gs.Constant)}.values())


def equivalence_of_regions(
    before: Sequence[Region], after: Sequence[Region], expressions: ComputedConstants | None = None
) -> Equivalence:
    """Build the equivalence of regions of one graph that share their leaves.

    Args:
        before: the regions before the rewrite, one per result.
        after: the regions after the rewrite, in the same order.
        expressions: the computed constants of a fold.

    Returns:
        the equivalence. Its ``at`` is None if ``expressions`` changes the function that the nodes must compute.

    Raises:
        NotProved: a leaf is not floating-point, or its rank is unknown.
    """
    first = before[0]
    graph = first.graph
    shapes = []
    for t in first.leaves:
        dtype = graph.dtype(t)
        if dtype is not None and dtype.kind in "iubO":
            raise NotProved(ProofFailure.OP, f"{t.name!r} is not a floating-point tensor", t.name)
        shapes.append(shape_of(graph, t))

    def evaluate_side(regions: Sequence[Region]) -> Side:
        ids = [id(t) for t in first.leaves]
        return lambda m, leaves: [evaluate_region(m, region, dict(zip(ids, leaves, strict=True))) for region in regions]

    def values_at_size(sizes: Mapping[str, int], numbers: Sequence[float]) -> tuple[list[Any], list[Any]] | None:
        rng = np.random.default_rng(3)
        try:
            sized = [concrete_shape(graph, t, sizes) for t in first.leaves]
            if any(s is None for s in sized):
                return None
            fed = [
                np.full(s or (), x) if x == x else rng.standard_normal(s or ())
                for s, x in zip(sized, numbers, strict=True)
            ]
            with evaluator.silence_numpy():
                old, new = ([region.bind(sizes).run(fed) for region in regions] for regions in (before, after))
                return old, new
        except (EvaluationFailed, ValueError):
            return None

    nodes = tuple({id(n): n for region in after for n in region.nodes}.values())
    plain = evaluate_side(before)
    if expressions is None:
        restated = plain
    else:
        restated = expressions.expected_side(plain, graph)
    sides = Equivalence(
        tuple(shapes), restated, evaluate_side(after), first.y.name, graph=graph, nodes=nodes, expressions=expressions
    )
    # If the expected function is not that of the nodes before, running both sides in float64 would show a difference.
    if restated is not plain:
        return sides
    return replace(sides, at=values_at_size)
