"""The check that stands before each plugin node: the file's nodes and the kernel's own float64 reference agree.

The file's side is `evaluate.evaluate`, by the ops' specifications; the plugin's side is the reference that its kernel is tested against,
with the attributes as TensorRT's parser will read them off the node and the parameters that go with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from ..evaluate import evaluate
from ..graphs.dims import Dims
from ..graphs.functions import DOMAIN
from ..graphs.graph import Graph, value_inputs
from .plugin_nodes import Plan

BOUND = 1e-7  # relative: epsilon is a float32 attribute on both sides, so that what differs is float64's own rounding
_SMALL = (2, 3, 5, 7, 4, 6, 8, 9)  # sizes of dims along which every place is treated alike, by axis


def disagreement(graph: Graph, plan: Plan, ops: Mapping[str, Any]) -> str:
    """Why the new nodes of ``plan`` can't take the place of the old ones, "" where they can. ``ops``: the kernels by name."""
    try:
        shapes = _sizes(graph, plan)
        rng = np.random.default_rng(17)
        for name in ("normal", "offset", "constant"):
            first = {"normal": 0.0, "offset": 1e3, "constant": 0.5}[name] + (name != "constant") * rng.standard_normal(shapes[0])
            leaves = [first, *(rng.standard_normal(shape) for shape in shapes[1:])]
            with evaluate.quiet():
                before = _run(graph, plan.old, plan.leaves, leaves, ops)
                after = _run(graph, plan.new, plan.leaves, leaves, ops)
            for old, new in zip(plan.outputs, plan.new[-1].outputs, strict=False):
                if not _equal(before[id(old)], after[id(new)]):
                    return f"its float64 reference differs from the file's nodes on {name} data"
    except (evaluate.Unsupported, ValueError, TypeError, IndexError, KeyError, AssertionError) as error:
        return f"it could not be compared with the file's nodes: {type(error).__name__}: {error}"
    return ""


def _equal(before: np.ndarray, after: np.ndarray) -> bool:
    if before.shape != after.shape or not (np.isfinite(before) == np.isfinite(after)).all():
        return False
    finite = np.isfinite(before)
    largest = np.abs(before[finite]).max(initial=0.0)
    return bool(np.abs(before - after)[finite].max(initial=0.0) <= BOUND * largest + 1e-12)


def _sizes(graph: Graph, plan: Plan) -> list[tuple[int, ...]]:
    """Shapes of the leaves: as the file has them where parameters lie along a dim, else small; one dim has one size everywhere."""
    small: dict[tuple[int, int | str | None], int] = {}
    for axis, dim in enumerate(plan.shape):
        if (axis in plan.free and dim != 1) or not isinstance(dim, int):
            small[axis, dim] = _SMALL[axis]
    named = {dim: size for (_, dim), size in small.items() if isinstance(dim, str)}

    def size(axis: int, dim: int | str | None) -> int:
        if (axis, dim) in small:
            return named.get(dim, small[axis, dim]) if isinstance(dim, str) else small[axis, dim]
        if isinstance(dim, int):
            return dim
        return named.get(dim or "", _SMALL[axis])

    shapes: list[Dims] = [plan.shape, *(graph.shape(t) or () for t in plan.leaves[1:])]
    return [tuple(size(axis, dim) for axis, dim in enumerate(shape)) for shape in shapes]


def _run(
    graph: Graph, nodes: Sequence[gs.Node], leaves: Sequence[gs.Tensor], arrays: Sequence[np.ndarray], ops: Mapping[str, Any]
) -> dict[int, np.ndarray]:
    known = {id(t): array for t, array in zip(leaves, arrays, strict=True)}
    for node in nodes:
        for t in value_inputs(node):
            if id(t) not in known and not t.is_empty():
                known[id(t)] = graph.value(t)
        inputs = [known.get(id(t)) for t in node.inputs]
        found = _kernel(node, inputs, ops) if is_plugin(node) else graph.apply(node, inputs)
        known.update((id(t), value) for t, value in zip(node.outputs, found, strict=False) if value is not None)
    return known


def is_plugin(node: gs.Node) -> bool:
    return node.domain == DOMAIN and "plugin_namespace" in node.attrs


def _kernel(node: gs.Node, inputs: Sequence[Any], ops: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
    op = ops[node.op]
    found = op.reference(*inputs, **{name: node.attrs[name] for name in op.attributes})
    return found if isinstance(found, tuple) else (found,)
