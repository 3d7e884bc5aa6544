"""Shapes that onnx's inference does not find: those behind a Reshape, Expand or Slice whose operand is computed, and what follows.

A node's result is computed from zeros at three choices of sizes for the symbols of its inputs. A dim that is each time the same number, or
one and the same multiple of one symbol or of the product of two, is stated as that; any other stays unknown. Only the rank and what is
stated are relied on, and what is done with them is certified at sizes of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from ..evaluate import evaluate
from ..recognition.region import EvaluationFailed, NoMatch, compile_region, concrete
from .dims import Dims, invented
from .graph import Graph

_MOVES = frozenset(
    {"Reshape", "Expand", "Slice", "Tile", "Concat", "Gather", "Unsqueeze", "Squeeze", "Transpose", "Split", "Pad", "Flatten"}
)
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
_CHOICES = 3
_AFFORDABLE = 1 << 22  # elements of a tensor that is made to see a shape
_OPERAND = 64  # elements of an integer constant that may say something of a shape


def complete(graph: Graph) -> None:
    """Let ``graph`` know the shapes that can be found, in the graph's order, so that one leads to the next."""
    for node in graph.nodes:
        unknown = [o for o in node.outputs if not o.is_empty() and _open(graph.shape(o))]
        if not unknown or (node.domain or "") not in ("", "ai.onnx"):
            continue
        for output, (kind, dims) in _inferred(graph, node).items():
            if dims is not None and any(o.name == output for o in unknown):
                told = next(o for o in unknown if o.name == output)
                graph.learn(told, kind, _better(graph, node, graph.shape(told), dims))
        for output in unknown:
            if _open(graph.shape(output)) and node.op in _MOVES:
                found = _measured(graph, node, output)
                if found is not None:
                    graph.learn(output, None, _better(graph, node, graph.shape(output), found))


def _open(dims: Dims | None) -> bool:
    return dims is None or any(d is None or invented(d) for d in dims)


def _better(graph: Graph, node: gs.Node, old: Dims | None, new: Dims) -> Dims:
    """Each dim as ``new`` says it; where that says nothing, the name that inference made up: equal ones are equal sizes.

    A name that was made up before, for an input, says something: this dim is that one.
    """
    if old is None or len(old) != len(new):
        return new
    passed = {d for t in node.inputs if not t.is_empty() for d in graph.shape(t) or ()}
    return tuple(b if b is not None and (b in passed or not invented(b)) else a for a, b in zip(old, new, strict=True))


def _inferred(graph: Graph, node: gs.Node) -> dict[str, tuple[int, Dims | None]]:
    """What onnx says of one node, given what is known of its inputs by now."""
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for t in node.inputs:
        if t.is_empty():
            continue
        dims, dtype = graph.shape(t), graph.dtype(t)
        if dims is None or dtype is None:
            return {}
        types[t.name] = onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(dtype), dims)
        held = graph.known(t) if dtype.kind == "i" and _small(dims) else None
        if held is not None:
            data[t.name] = numpy_helper.from_array(np.asarray(held, dtype=dtype), t.name)
    try:
        schema = onnx.defs.get_schema(node.op, graph.opset)
        found = onnx.shape_inference.infer_node_outputs(
            schema, graph.node_proto(node), types, data, opset_imports=list(graph.proto.opset_import)
        )
    except Exception:  # it refuses what it can't follow
        return {}
    return {name: (t.tensor_type.elem_type, _dims(t)) for name, t in found.items() if t.HasField("tensor_type")}


def _small(dims: Dims) -> bool:
    sizes = [d for d in dims if isinstance(d, int)]
    return len(sizes) == len(dims) and math.prod(sizes) <= _OPERAND


def _dims(kind: onnx.TypeProto) -> Dims | None:
    if not kind.tensor_type.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in kind.tensor_type.shape.dim)


def _measured(graph: Graph, node: gs.Node, output: gs.Tensor) -> Dims | None:
    leaves = list({id(t): t for t in node.inputs if not t.is_empty() and not graph.is_shape_valued(t)}.values())
    region = compile_region(graph, output, leaves)
    if isinstance(region, NoMatch) or any(graph.shape(t) is None for t in leaves):
        return None
    seen: list[tuple[dict[str, int], tuple[int, ...]]] = []
    for sizes in _sizes(sorted(region.symbols)):
        shapes = [concrete(graph, t, sizes) or () for t in leaves]
        if any(math.prod(shape) > _AFFORDABLE for shape in shapes):
            break
        try:
            with evaluate.quiet():
                result = region.bind(sizes).run([np.zeros(shape) for shape in shapes])
        except (EvaluationFailed, ValueError):
            continue
        seen.append((sizes, result.shape))
        if len(seen) == _CHOICES:
            break
    if len(seen) < _CHOICES or len({len(shape) for _, shape in seen}) != 1:
        return None
    return tuple(_said([(sizes, shape[axis]) for sizes, shape in seen]) for axis in range(len(seen[0][1])))


def _sizes(names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Distinct sizes for the symbols, then rounder ones for what has to be divided."""
    for factor in (1, 4, 12):
        for start in range(_CHOICES):
            yield {name: factor * _PRIMES[(i * (start + 1) + start) % len(_PRIMES)] for i, name in enumerate(names)}


def _said(sizes: Sequence[tuple[dict[str, int], int]]) -> int | str | None:
    """A dim as a number, or as a multiple of one symbol or of the product of two; None where it is neither."""
    values = [value for _, value in sizes]
    if len(set(values)) == 1:
        return values[0]
    names = sorted(sizes[0][0])
    for symbols in (*((n,) for n in names), *itertools.combinations_with_replacement(names, 2)):
        products = [math.prod(choice[s] for s in symbols) for choice, _ in sizes]
        factor = values[0] // products[0]
        if factor and all(factor * p == v for p, v in zip(products, values, strict=True)):
            return "*".join([str(factor)] * (factor > 1) + list(symbols))
    return None
