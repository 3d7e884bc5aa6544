"""Evaluate the nodes of a region with their attributes and initializers in a `ProofInterpreter`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from ..dtypes import is_float_dtype, is_integer_dtype
from ..evaluate import evaluator
from ..graphs import integer_ops
from ..graphs.dims import dim_size
from ..graphs.file_graph import NEWEST
from ..graphs.graph import Graph
from ..graphs.region import Region
from ..graphs.symbolic_sizes import NoPolynomial, Size
from ..norms import function_bodies
from ..norms.norm_table import CONTRIB, DEFAULT, DOMAIN, NormOp, OpOwner, rows_of_owner
from ..norms.third_party import function_op_row
from ..storage.onnx_domains import STANDARD
from . import convolutions, norm_definitions, op_definitions
from .interpreter import ProofInterpreter, StoredConstant
from .lemmas import TABLE as LEMMAS
from .lemmas.casts import cast_value
from .lemmas.congruence import quantize_rows
from .proof_errors import NotProved, ProofFailure
from .value import Value

FAILURES = (
    evaluator.UnsupportedOp,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AssertionError,
    AttributeError,
    ArithmeticError,
)

NodeDefinition = Callable[[ProofInterpreter, list[Any], Mapping[str, Any]], tuple[Any, ...]]
"""Computes the outputs of a node from its inputs and attributes."""
# Contrib ops that mean the same as the standard op of the same name
_NAMED = {(CONTRIB, op) for op, row in rows_of_owner(OpOwner.ONNXRUNTIME).items() if "" in row.domains}


def shape_of(graph: Graph, t: gs.Tensor) -> tuple[Size, ...]:
    """Read the shape that the file states.

    Returns:
        a size per axis; each unknown dim becomes a new symbol.

    Raises:
        NotProved: the rank is unknown.
    """
    shape = graph.shape(t)
    if shape is None:
        raise NotProved(ProofFailure.SIZE, f"the rank of {t.name!r} is unknown", t.name)
    return tuple(dim_size(d, f"{t.name}:{i}") for i, d in enumerate(shape))


def evaluate_region(m: ProofInterpreter, region: Region, leaves: Mapping[int, Value]) -> Value:
    """Evaluate the result of a region.

    Args:
        leaves: values by the ids of the tensors.

    Returns:
        the value of ``region.y``.

    Raises:
        NotProved: an op is outside the language, or a premise does not hold.
    """
    graph = region.graph
    env: dict[int, Any] = dict(leaves)
    for t in region.shape_leaves:
        if id(t) not in env:
            env[id(t)] = _ShapeOnlyTensor(m.plan.shape_of_file(shape_of(graph, t)))
    evaluate_nodes(m, graph, region.nodes, env)
    y = env.get(id(region.y))
    if y is None and graph.is_constant(region.y):
        y = constant_value(m, graph, region.y)
    if not isinstance(y, Value):
        raise NotProved(ProofFailure.OP, f"the result {region.y.name!r} is not algebraic", region.y.name)
    if m.gf is not None and y.a is None:
        raise NotProved(ProofFailure.OP, "one of its constants is not finite", region.y.name)
    return y


def evaluate_nodes(
    m: ProofInterpreter,
    graph: Graph,
    nodes: Sequence[gs.Node],
    env: MutableMapping[int, Any],
    definitions: Mapping[int, NodeDefinition] = MappingProxyType({}),
) -> None:
    """Evaluate nodes in topological order.

    Args:
        env: receives the outputs of the nodes, keyed by the ids of the tensors.
        definitions: definitions of nodes that are not standard ops, by the ids of the nodes.

    Raises:
        NotProved: a node cannot be evaluated.
    """
    for node in nodes:
        m.node = id(node)
        inputs = [_node_input(m, graph, node, i, t, env) for i, t in enumerate(node.inputs)]
        if id(node) in graph._new:
            opset = max(graph.opset, NEWEST)
        else:
            opset = graph.opset
        try:
            definition = definitions.get(id(node))
            if definition is not None:
                results = definition(m, inputs, graph.attrs(node))
            else:
                results = _evaluate_node(m, graph, node, inputs, opset)
        except NotProved as e:
            if node.outputs:
                e.culprit = node.outputs[0].name
            raise
        except FAILURES as e:
            raise NotProved(
                ProofFailure.OP, f"{node.op} can't be evaluated: {type(e).__name__}: {e}", node.outputs[0].name
            ) from e
        env.update((id(t), v) for t, v in zip(node.outputs, results, strict=False) if v is not None)


def _is_zero_point(node: gs.Node, i: int) -> bool:
    """Return True if input ``i`` is the zero point of a QuantizeLinear, which may be in the node's function body."""
    if node.domain == DOMAIN:
        row = function_op_row(node.domain, node.op)
        return row is not None and row.inputs[i : i + 1] == ("y_zero_point",)
    return (node.op, i, node.domain or "") == ("QuantizeLinear", 2, "")


class _ShapeOnlyTensor:
    """Tensor whose shape is read, but not its elements."""

    def __init__(self, shape: tuple[Size, ...]) -> None:
        self.shape = shape


def _node_input(
    m: ProofInterpreter, graph: Graph, node: gs.Node, i: int, t: gs.Tensor, env: MutableMapping[int, Any]
) -> Any:
    if t.is_empty():
        return None
    if id(t) in env:
        return env[id(t)]
    if id(t) in m.given:
        return m.given[id(t)]
    # The second input of CastLike matters only by its dtype.
    if node.op == "CastLike" and i == 1:
        return None
    # A zero point of 0 matters only by its dtype.
    if _is_zero_point(node, i) and graph.is_constant(t) and not graph.value(t).any():
        return graph.dtype(t)
    if not graph.is_constant(t):
        raise NotProved(ProofFailure.OP, f"{t.name!r} is neither a constant nor an input of the region", t.name)
    env[id(t)] = constant_value(m, graph, t)
    return env[id(t)]


def constant_value(m: ProofInterpreter, graph: Graph, t: gs.Tensor, narrow: bool = False) -> Any:
    """Evaluate a constant of the file.

    Args:
        narrow: as in `Sampler.constant`.

    Returns:
        an array for integers and bools, else a value.

    Raises:
        NotProved: the constant cannot be computed.
    """
    stored = m.draws.held.get(id(t))
    if stored is None:
        try:
            with evaluator.silence_numpy():
                array = graph.value(t)
        except evaluator.UnsupportedOp as e:
            raise NotProved(ProofFailure.LIMIT, str(e), t.name) from e
        if array.dtype.kind in "iub":
            return array
        stored = m.draws.held[id(t)] = StoredConstant(array, is_stored_as_half(graph, t))
    return m.constant(stored, narrow)


def is_stored_as_half(graph: Graph, t: gs.Tensor) -> bool:
    """Return True if the constant was stored in float16, before Casts."""
    node = graph.producer(t)
    while node is not None and node.op in ("Cast", "CastLike", "Identity"):
        t = node.inputs[0]
        node = graph.producer(node.inputs[0])
    return getattr(graph.dtype(t), "name", "") == "float16"


def _evaluate_node(m: ProofInterpreter, graph: Graph, node: gs.Node, inputs: list[Any], opset: int) -> tuple[Any, ...]:
    if node.op == "CastLike":
        kind = graph.dtype(node.inputs[1])
        floating = kind is None or is_float_dtype(kind)
        return (cast_value(m, inputs[0], floating, kind if kind is not None and is_integer_dtype(kind) else None),)
    return apply_op_of_domain(m, node.op, node.domain or "", inputs, graph.attrs(node), opset, len(node.outputs))


def apply_op_of_domain(
    m: ProofInterpreter, op: str, domain: str, inputs: list[Any], attrs: Mapping[str, Any], opset: int, outputs: int
) -> tuple[Any, ...]:
    """Evaluate one node.

    Returns:
        its outputs.

    Raises:
        NotProved: the op is outside the language, or a premise does not hold.
    """
    if (row := function_op_row(domain, op)) is not None:
        return _evaluate_function(m, row, inputs, attrs, opset)
    if domain not in STANDARD and (domain, op) not in _NAMED:
        raise NotProved(ProofFailure.OP, f"{domain}.{op} is not supported in proofs", op)
    if op == "Shape":
        shape = list(inputs[0].shape)[attrs.get("start", 0) : attrs.get("end")]
        return (_shape_as_integers(shape, (len(shape),)),)
    if op == "Size":
        total: Any = Size.from_int(1)
        for n in inputs[0].shape:
            total = total * n
        return (_shape_as_integers([total], ()),)
    if any(isinstance(x, _ShapeOnlyTensor) for x in inputs):
        raise NotProved(ProofFailure.OP, f"{op} reads a tensor that is not an input of the region", op)
    if op == "Constant":
        (array,) = evaluator.evaluate_node(op, inputs, attrs, opset=opset)
        return (array if array is None or array.dtype.kind in "iub" else m.constant(array),)
    if inputs and all(integer_ops.is_integer_value(x) for x in inputs) and op not in ("Cast", "ConstantOfShape"):
        try:
            results = integer_ops.apply_integer_op(op, inputs, attrs, opset, outputs)
        except NoPolynomial as e:
            raise NotProved(ProofFailure.SIZE, str(e), e.op) from e
        return tuple(x if integer_ops.is_integer_value(x) else m.constant(np.asarray(x)) for x in results)
    function = (
        op_definitions.TABLE.get(op) or norm_definitions.TABLE.get(op) or convolutions.TABLE.get(op) or LEMMAS.get(op)
    )
    if function is None:
        raise NotProved(ProofFailure.OP, f"{op} is not algebraic", op)
    if op in norm_definitions.TABLE:
        _require_known_parts(DEFAULT[op], inputs, attrs)
    results = function(m, inputs, attrs, opset, outputs)
    if isinstance(results, tuple):
        return results
    return (results,)


def _require_known_parts(row: NormOp, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
    """Check that a norm node has only inputs and attributes of known meaning.

    For standard ops, onnx's checker does this check. It has no schema for the ops that onnxruntime adds to the default
    domain, such as SimplifiedLayerNormalization.

    Raises:
        NotProved: the node has an unknown input or attribute.
    """
    if len(inputs) > len(row.inputs):
        raise NotProved(
            ProofFailure.OP, f"{row.op} has {len(inputs)} inputs, but at most {len(row.inputs)} are expected", row.op
        )
    for name in attrs:
        if row.owner is OpOwner.ONNXRUNTIME and name not in row.attributes:
            raise NotProved(ProofFailure.OP, f"{row.op} has an unknown attribute {name!r}", row.op)


def _shape_as_integers(sizes: list[Size], shape: tuple[int, ...]) -> np.ndarray:
    numbers = [s.constant_value for s in sizes]
    if all(n is not None for n in numbers):
        return np.array(numbers, dtype=np.int64).reshape(shape)
    made = np.empty(len(sizes), dtype=object)
    made[:] = sizes
    return made.reshape(shape)


def _evaluate_function(
    m: ProofInterpreter, row: NormOp, inputs: list[Any], attrs: Mapping[str, Any], opset: int
) -> tuple[Any, ...]:
    """Evaluate an op by the function body in the file."""
    opset = max(opset, row.since)
    function = function_bodies.norm_function_body(row, opset)
    known: dict[str, Any] = dict(zip(function.input, inputs, strict=False))
    at = m.node
    for node in function.node:
        if row.is_quantized_by_row and "result" in known:
            # The quantization of the norm's result is an opaque function of the norm's rows.
            kind = known["y_zero_point"]
            least = float(attrs["least"])
            largest = float(attrs["largest"])
            if not isinstance(kind, np.dtype):
                raise NotProved(ProofFailure.OP, "its zero point is not 0")
            known["Y"], known["y_scale"] = quantize_rows(m, known["result"], kind.name, least, largest)
            break
        m.node = at
        if node.op_type == "CastLike":
            known[node.output[0]] = known[node.input[0]]
            continue
        if any(a.ref_attr_name == "epsilon" for a in node.attribute) and node.op_type == "Constant":
            known[node.output[0]] = m.exact_epsilon(attrs["epsilon"])
            continue
        given = function_bodies.call_attributes(node, attrs)
        results = apply_op_of_domain(
            m, node.op_type, "", [known[n] if n else None for n in node.input], given, opset, len(node.output)
        )
        known.update(zip(node.output, results, strict=False))
    return tuple(known[name] for name in function.output)
