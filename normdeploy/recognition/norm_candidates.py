"""Try pairs of tensors around a square root as the input and the output of a norm.

`candidate_readings` yields the norms that it finds, and a reason for each pair that is not a norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx_graphsurgeon as gs

from ..graphs.dims import evaluate_dim, is_invented_name
from ..graphs.graph import Graph, value_inputs
from ..graphs.region import Refusal, Region, compile_region, shape_symbols, size_assignments
from .anchors import (
    FLOATING,
    INSIDE,
    REDUCTIONS,
    find_entries,
    find_narrowing_cast,
    find_results,
    is_anchor,
    is_norm_node,
)
from .norm_facts import Norm, RootCandidate
from .norm_fit import Clarity, RejectedReading
from .region_fitting import read_region


def candidate_at(graph: Graph, root: gs.Node) -> RootCandidate | None:
    """Collect the tensors around ``root`` at which a norm may begin and end.

    Returns:
        the candidate, or None if no reduction precedes the root.
    """
    xs, passed = find_entries(graph, root)
    if not is_norm_node(root) and root.op != "ReduceL2" and not any(n.op in REDUCTIONS for n in passed):
        return None
    return RootCandidate(root, tuple(xs), tuple(find_results(graph, root, xs)), tuple(passed))


def candidate_readings(graph: Graph, c: RootCandidate) -> Iterator[Norm | RejectedReading]:
    """Yield the readings of the norm around a root, outermost first, including the rejected readings.

    For each output, the farthest input is tried first. Otherwise the end of a layer norm would be read as an RMS norm
    whose input is the centered x.

    Yields:
        a norm, or a rejected reading with the reason and the names of its input and output.
    """
    for y in reversed(c.ys):
        for x in reversed(c.xs):
            reading = _read_norm(graph, c, x, y)
            if isinstance(reading, Norm):
                yield reading
                break
            yield replace(reading, start=x.name, end=y.name)
    cast = find_narrowing_cast(graph, c.passed, graph.dtype(c.xs[-1]) if c.xs else None)
    # A norm whose input follows a narrowing Cast is rejected, because the Cast belongs to the norm's computation.
    if cast is not None:
        yield RejectedReading(f"an internal Cast, {cast.name!r}, narrows its statistics", cast.outputs[0].name)
    default = next((t.name for n in c.passed for t in n.inputs if graph.is_overridable(t.name)), "")
    if default:
        yield RejectedReading(
            f"{default!r} is both an initializer and a graph input, so a caller may override it: it is not a constant",
            default,
        )


def _read_norm(graph: Graph, c: RootCandidate, x: gs.Tensor, y: gs.Tensor) -> Norm | RejectedReading:
    """Read the nodes from x to y as a norm.

    A rejected reading with `Clarity.APART` means that x and y can't be the input and output of any norm.
    """
    shape = graph.shape(x)
    dtype = graph.dtype(x)
    if shape is None or dtype is None:
        return RejectedReading(f"the type or shape of {x.name!r} is unknown", x.name, clarity=Clarity.VAGUE)
    if dtype.name not in FLOATING:
        return RejectedReading(
            f"{x.name!r} is {dtype.name}; norms need a floating-point type", x.name, clarity=Clarity.APART
        )
    if (graph.dtype(y) or dtype) != dtype:
        return RejectedReading(
            f"its result is {graph.dtype(y)}, but its input is {dtype}", y.name, clarity=Clarity.APART
        )
    if _have_different_shapes(graph, x, y):
        return RejectedReading(
            f"its result has shape {graph.shape(y)}, but its input {shape}", y.name, clarity=Clarity.APART
        )
    region = compile_region(graph, y, [x], INSIDE)
    if isinstance(region, Refusal):
        leaves = _data_operands(graph, c, x, y)
        if leaves and len(leaves) <= 2:
            region = compile_region(graph, y, [x, *leaves], INSIDE)
        if isinstance(region, Refusal):
            return RejectedReading(region.reason, region.tensor, clarity=Clarity.APART)
    if region.shape_leaves and not _have_same_shape(graph, x, y):
        # At the sizes chosen for the evaluation, the two shapes may agree although they differ in general.
        return RejectedReading(
            f"its result gets its shape from another tensor, which may differ from the shape of {x.name!r}",
            y.name,
            clarity=Clarity.APART,
        )
    if not any(n.op in REDUCTIONS or is_norm_node(n) for n in region.nodes if not graph.is_shape_valued(n.outputs[0])):
        return RejectedReading("no mean is computed between them", y.name, clarity=Clarity.APART)
    cast = find_narrowing_cast(graph, region.nodes, dtype)
    if cast is not None:
        return RejectedReading(
            f"an internal Cast, {cast.name!r}, narrows its statistics",
            cast.outputs[0].name,
            region=region,
        )
    # Two consecutive norms together compute one norm, but with an epsilon that is not in the file.
    if _longest_norm_chain(graph, region) > 1:
        return RejectedReading("there are two consecutive norms between them", y.name, clarity=Clarity.APART)
    return read_region(region, shape, dtype)


def _longest_norm_chain(graph: Graph, region: Region) -> int:
    """Count the roots on the path with the most roots. A root counts only if a reduction lies between the previous root
    and this root.
    """
    # id of a tensor -> (number of roots so far, True if a reduction follows the last root)
    seen: dict[int, tuple[int, bool]] = {}
    for node in region.nodes:
        roots, fresh = max((seen.get(id(t), (0, False)) for t in value_inputs(node)), default=(0, False))
        fresh = fresh or node.op in REDUCTIONS or is_norm_node(node)
        if fresh and is_anchor(graph, node):
            roots = roots + 1
            fresh = False
        seen.update((id(o), (roots, fresh)) for o in node.outputs)
    return seen.get(id(region.y), (0, False))[0]


def _data_operands(graph: Graph, c: RootCandidate, x: gs.Tensor, y: gs.Tensor) -> list[gs.Tensor]:
    """Find the data other than x that the nodes between the root and y read.

    If the root is a norm node, its scale and bias are included.
    """
    root = c.root
    inside = {id(t) for t in c.ys}
    operands: dict[int, gs.Tensor] = {}
    stack = [y]
    seen = {id(y)}
    while stack:
        node = graph.producer(stack.pop())
        if node is None or node is root:
            continue
        for t in node.inputs:
            if id(t) in seen or t.is_empty() or graph.is_shape_valued(t) or t is x:
                continue
            seen.add(id(t))
            if id(t) in inside:
                stack.append(t)
            elif isinstance(compile_region(graph, t, [x], INSIDE), Refusal):
                operands[id(t)] = t
    if is_norm_node(root):
        operands.update((id(t), t) for t in root.inputs[1:] if not t.is_empty() and not graph.is_shape_valued(t))
    return list(operands.values())


def _have_same_shape(graph: Graph, x: gs.Tensor, y: gs.Tensor) -> bool:
    """Return True if the shapes in the file show that both tensors have the same shape."""
    sizes = size_assignments(shape_symbols(graph, x) | shape_symbols(graph, y))[0]
    a = graph.shape(x)
    b = graph.shape(y)
    if a is None or b is None or len(a) != len(b):
        return False
    known = [(evaluate_dim(i, sizes), evaluate_dim(j, sizes)) for i, j in zip(a, b, strict=True)]
    return all(i is not None and i == j for i, j in known)


def _have_different_shapes(graph: Graph, x: gs.Tensor, y: gs.Tensor) -> bool:
    """Return True if the shapes in the file show that the tensors have different shapes."""
    sizes = size_assignments(shape_symbols(graph, x) | shape_symbols(graph, y))[0]
    a = graph.shape(x)
    b = graph.shape(y)
    if a is None or b is None:
        return False
    if len(a) != len(b):
        return True
    known = [(evaluate_dim(i, sizes), evaluate_dim(j, sizes)) for i, j in zip(a, b, strict=True)]
    if any(is_invented_name(d) for d in (*a, *b)):
        return any(isinstance(i, int) and isinstance(j, int) and i != j for i, j in zip(a, b, strict=True))
    return any(i is not None and j is not None and i != j for i, j in known)
