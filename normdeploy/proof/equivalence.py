"""The two sides of a rewrite as functions of the same leaves, whatever they are made of."""

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
    """``before`` and ``after`` compute as many results of leaves of the given shapes.

    ``at``: both sides in float64 at given sizes, each leaf full of a number or, where that is NaN, normal; None where
    it can't be said.
    ``graph``, ``nodes``: where the nodes after stand, to look at their constants and epsilons. ``expressions``: of a
    fold.
    ``held``: constants that were read, by the ids of their tensors: each is looked at once for all evaluations.
    ``partly_hidden``: leaves, by their numbers, of which whoever proposes has shown that no row is -Inf throughout.
    ``named``: lengths of axes that may stand for any. ``work``: what all attempts to prove it have taken.
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
        """With the sizes of ``named`` in the shapes of the leaves."""
        plan = AxisPlan(named=self.named)
        return replace(self, shapes=tuple(map(plan.shape_of_file, self.shapes)))

    def after_constants(self) -> list[gs.Constant]:
        """Those that the nodes after read."""
        return list({id(t): t for n in self.nodes for t in n.inputs if isinstance(t, gs.Constant)}.values())


def equivalence_of_regions(
    before: Sequence[Region], after: Sequence[Region], expressions: ComputedConstants | None = None
) -> Equivalence:
    """Regions of one graph with the same leaves, one for each result."""
    first = before[0]
    graph = first.graph
    shapes = []
    for t in first.leaves:
        dtype = graph.dtype(t)
        if dtype is not None and dtype.kind in "iubO":
            raise NotProved(ProofFailure.OP, f"{t.name!r} holds no floating numbers", t.name)
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
    # Nodes whose function is restated compute something else in float64.
    if restated is not plain:
        return sides
    return replace(sides, at=values_at_size)
