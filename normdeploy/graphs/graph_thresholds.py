"""Find the thresholds of a graph's inputs: the numbers at which its constants take effect.

`find_thresholds` walks a graph from its outputs to its inputs and converts each threshold on the way: a threshold of 5
for the result of x·2 + 1 is a threshold of 2 for x. `normdeploy.graphs.threshold_inputs` draws inputs on both sides of
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx

from ..storage.onnx_domains import STANDARD
from ..storage.proto_traversal import attribute_graphs
from ..storage.shared_weights import tensor_array
from ..types import Arrays
from .index_bounds import IndexLimit, find_index_bounds
from .proto_queries import captured_names

# Maximum number of elements of a constant that is read as thresholds.
_FEW = 64
# Maximum number of thresholds that are kept for one tensor.
_MOST = 24
# Ops that move, select or average elements. A threshold of the result is also a threshold of the input.
_SAME = frozenset(
    {
        "Identity",
        "Cast",
        "CastLike",
        "Reshape",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Transpose",
        "Slice",
        "Concat",
        "Split",
        "Expand",
        "Pad",
        "Gather",
        "GatherElements",
        "GatherND",
        "MaxPool",
        "GlobalMaxPool",
        "Relu",
        "LeakyRelu",
        "Clip",
        "Dropout",
        "ReduceMax",
        "ReduceMin",
        "Tile",
        "Where",
        "ScatterND",
        "ScatterElements",
        "Min",
        "Max",
        "TopK",
        "DepthToSpace",
        "SpaceToDepth",
        "ReduceMean",
        "AveragePool",
        "GlobalAveragePool",
    }
)
_AT_ZERO = frozenset(
    {
        "Relu",
        "LeakyRelu",
        "PRelu",
        "Elu",
        "Selu",
        "Celu",
        "Abs",
        "Sign",
        "Sqrt",
        "Log",
        "Softsign",
        "Not",
        "Reciprocal",
        "IsNaN",
    }
)
_COMPARED = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "Min", "Max", "Mod"})
_LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
# Ops that only move elements.
_MOVES = frozenset({"Concat", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
# Op → positions of the inputs that determine sizes of a result or positions to read; None for all inputs.
_READ_AS_SIZES: dict[str, tuple[int, ...] | None] = {
    "Reshape": (1, 2, 3, 4),
    "Expand": (1, 2, 3, 4),
    "Tile": (1, 2, 3, 4),
    "Pad": (1, 2, 3, 4),
    "TopK": (1, 2, 3, 4),
    "Split": (1, 2, 3, 4),
    "Slice": (1, 2, 3, 4),
    "Resize": (1, 2, 3, 4),
    "Upsample": (1, 2, 3, 4),
    "Squeeze": (1, 2, 3, 4),
    "Unsqueeze": (1, 2, 3, 4),
    "Gather": (1,),
    "GatherElements": (1,),
    "GatherND": (1,),
    "ScatterND": (1,),
    "ScatterElements": (1,),
    "Scatter": (1,),
    "Compress": (1,),
    "CumSum": (1,),
    "Range": None,
    "ConstantOfShape": None,
    "OneHot": None,
    "Loop": None,
    "Scan": None,
    "EyeLike": None,
    "SequenceAt": None,
    "SplitToSequence": None,
    "GRU": (4,),
    "LSTM": (4,),
    "RNN": (4,),
    "MaxUnpool": (1, 2),
}


# Ops whose inputs do not determine sizes even if their output is used as a size, because these ops return shapes or
# booleans.
_NO_SIZES = frozenset(
    {"Shape", "Size", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "IsNaN", "IsInf", "Not", "And"}
    | {"Or", "Xor"}
)


@dataclass
class GraphThresholds:
    """Thresholds of a graph.

    Attributes:
        values: input → thresholds that act on it.
        named: all thresholds of the graph, as its constants state them.
        sized: inputs that determine sizes or positions. Large numbers there would fill the memory or be out of range.
        limits: integer input → range of the rows that it may look up.
        summed: inputs whose elements the graph reads only as terms of the sums of linear ops.
    """

    values: dict[str, tuple[float, ...]] = field(default_factory=dict)
    named: tuple[float, ...] = ()
    sized: frozenset[str] = frozenset()
    limits: Mapping[str, IndexLimit] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()

    def for_input(self, name: str) -> tuple[float, ...]:
        """List the thresholds to draw for an input.

        Returns: at most 48 numbers. The thresholds that act on this input come first, then all other thresholds of the
            graph.
        """
        return tuple(dict.fromkeys((*self.values.get(name, ()), *self.named)))[: 2 * _MOST]


def find_thresholds(proto: onnx.ModelProto) -> GraphThresholds:
    """Read the thresholds of a model in one pass over its nodes, bodies and functions.

    Returns: thresholds and index limits by input, and the inputs that determine sizes.
    """
    walk = _ThresholdPropagation({(f.domain, f.name): f for f in proto.functions})
    thresholds = walk.propagate_graph(proto.graph, {})
    inputs = [value.name for value in proto.graph.input]
    return GraphThresholds(
        values={name: tuple(thresholds[name]) for name in inputs if thresholds.get(name)},
        named=tuple(walk.named)[:_MOST],
        sized=frozenset(walk.sized.intersection(inputs)),
        limits=find_index_bounds(proto).values,
        summed=frozenset(inputs) - _find_unsummed(proto.graph),
    )


def _find_unsummed(graph: onnx.GraphProto) -> set[str]:
    """Return the tensors that an op reads otherwise than as terms of the sums of a linear op."""
    unsummed = {output.name for output in graph.output}
    for node in reversed(graph.node):
        is_standard = node.domain in STANDARD
        # Shape and Size read no elements.
        if is_standard and node.op_type in _LINEAR | {"Shape", "Size"}:
            continue
        if is_standard and node.op_type in _MOVES and not unsummed.intersection(node.output):
            continue
        unsummed.update(node.input)
        unsummed |= captured_names(node)
    return unsummed


# ------------------------------------------------------------------ thresholds of a graph


_Thresholds = dict[str, list[float]]
_Constants = dict[str, np.ndarray]


class _ThresholdPropagation:
    """Carry thresholds from a graph's outputs back to its inputs."""

    def __init__(self, functions: Mapping[tuple[str, str], onnx.FunctionProto]) -> None:
        self._functions = functions
        self._known: dict[tuple[str, str], tuple[_Thresholds, set[str]]] = {}
        self.named: dict[float, None] = {}
        self.sized: set[str] = set()

    def propagate_graph(self, graph: onnx.GraphProto | onnx.FunctionProto, outer: _Constants) -> _Thresholds:
        """Compute the thresholds of each tensor that ``graph`` reads.

        Args:
            outer: constants of the graphs around this one.

        Returns: tensor name → thresholds, tensors outside of the graph included.
        """
        constants = small_constants(graph, outer)
        for node in graph.node:
            value = node_constant(node, constants)
            if value is not None:
                constants[node.output[0]] = value
        thresholds: _Thresholds = {}
        for node in reversed(graph.node):
            self._propagate_node(node, thresholds, constants)
        return thresholds

    def _propagate_node(self, node: onnx.NodeProto, thresholds: _Thresholds, constants: _Constants) -> None:
        for body in (body for attribute in node.attribute for body in attribute_graphs(attribute)):
            for name, values in self.propagate_graph(body, constants).items():
                _add_thresholds(thresholds, name, values)
        self._note_size_tensors(node)
        if (function := self._functions.get((node.domain, node.op_type))) is not None:
            self._propagate_call(node, function, thresholds)
            return
        if node.domain not in STANDARD:
            return
        for name, values in _own_thresholds(node, constants):
            finite = [v for v in values if math.isfinite(v)]
            self.named |= dict.fromkeys(finite)
            _add_thresholds(thresholds, name, finite)
        behind = [v for name in node.output for v in thresholds.get(name, ())]
        if behind:
            for name, values in _input_thresholds(node, behind, constants):
                _add_thresholds(thresholds, name, values)

    def _propagate_call(self, node: onnx.NodeProto, function: onnx.FunctionProto, thresholds: _Thresholds) -> None:
        """Adopt the thresholds and sizes of a function's inputs for a call; each body is read once."""
        key = (function.domain, function.name)
        if key not in self._known:
            # This entry ends the recursion if a function calls itself. Such a file is refused elsewhere.
            self._known[key] = ({}, set())
            outside = self.sized
            self.sized = set()
            self._known[key] = (self.propagate_graph(function, {}), self.sized)
            self.sized = outside
        inner, sized = self._known[key]
        for given, name in zip(node.input, function.input, strict=False):
            _add_thresholds(thresholds, given, inner.get(name, ()))
            if name in sized:
                self.sized.add(given)

    def _note_size_tensors(self, node: onnx.NodeProto) -> None:
        """Note the tensors that determine sizes: tensors read as sizes, and tensors from which a size is computed."""
        if node.domain not in STANDARD and (node.domain, node.op_type) not in self._functions:
            # The op is unknown, so it may read any input as a size.
            self.sized.update(node.input)
            return
        if self.sized.intersection(node.output) and node.op_type not in _NO_SIZES:
            self.sized.update(node.input)
        if node.op_type in _READ_AS_SIZES:
            places = _READ_AS_SIZES[node.op_type]
            self.sized.update(name for i, name in enumerate(node.input) if places is None or i in places)


def _add_thresholds(thresholds: _Thresholds, name: str, values: Iterable[float]) -> None:
    if name:
        known = thresholds.setdefault(name, [])
        known += [v for v in dict.fromkeys(values) if v not in known and math.isfinite(v)]
        del known[_MOST:]


def small_constants(graph: onnx.GraphProto | onnx.FunctionProto, outer: Arrays) -> _Constants:
    """Collect the small initializers of a graph and of the graphs around it.

    Args:
        outer: constants of the graphs around it.

    Returns: name → elements, for at most 64 elements each.
    """
    constants = dict(outer)
    if isinstance(graph, onnx.GraphProto):
        for tensor in graph.initializer:
            if math.prod(tensor.dims) <= _FEW and tensor.data_type != onnx.TensorProto.STRING:
                constants[tensor.name] = tensor_array(tensor)
    return constants


def node_constant(node: onnx.NodeProto, constants: Arrays) -> np.ndarray | None:
    """Compute the value of a node that is a small constant, or only reshapes or casts one.

    Returns: the elements, with or without their final shape and type; None for any other node.
    """
    if node.op_type == "Constant" and node.domain in STANDARD:
        for attribute in node.attribute:
            # In a function's body, each call states the value.
            if attribute.ref_attr_name:
                return None
            if attribute.name in ("value_float", "value_int", "value_floats", "value_ints"):
                return np.atleast_1d(onnx.helper.get_attribute_value(attribute))
            if attribute.name == "value" and math.prod(attribute.t.dims) <= _FEW:
                if attribute.t.data_type != onnx.TensorProto.STRING:
                    return tensor_array(attribute.t)
                return None
    if node.op_type in ("Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Expand") and node.input:
        return constants.get(node.input[0])
    return None


def distinct_numbers(values: np.ndarray | None) -> list[float]:
    """List the distinct numbers of a small constant.

    Returns: floats in ascending order; [] for None and for strings, objects and complex numbers.
    """
    if values is None or values.dtype.kind in "cSOU":
        return []
    return [float(v) for v in np.unique(np.asarray(values, dtype=np.float64))]


def _own_thresholds(node: onnx.NodeProto, constants: _Constants) -> Iterable[tuple[str, list[float]]]:
    """Yield each input of a node with the numbers at which the node changes its behavior."""
    if not node.input:
        return
    x = node.input[0]
    op = node.op_type
    attributes = {a.name: a for a in node.attribute}

    def operand_number(name: str, default: float) -> float:
        """Read a float attribute.

        Returns: its value, or the default.
        """
        if name in attributes:
            return attributes[name].f
        return default

    if op == "Clip":
        known = [v for name in node.input[1:] for v in distinct_numbers(constants.get(name))]
        yield x, known + [attributes[name].f for name in ("min", "max") if name in attributes]
    elif op in _COMPARED:
        for name in node.input:
            if name not in constants:
                yield (
                    name,
                    [v for other in node.input if other != name for v in distinct_numbers(constants.get(other))] or [0],
                )
    elif op in _AT_ZERO:
        yield x, [0.0]
    elif op == "ThresholdedRelu":
        yield x, [operand_number("alpha", 1.0)]
    elif op == "HardSwish":
        yield x, [-3.0, 3.0]
    elif op == "Shrink":
        yield x, [-operand_number("lambd", 0.5), operand_number("lambd", 0.5)]
    elif op == "HardSigmoid":
        alpha = operand_number("alpha", 0.2)
        beta = operand_number("beta", 0.5)
        yield x, [-beta / alpha, (1 - beta) / alpha] if alpha else []
    elif op in ("Floor", "Ceil", "Round"):
        yield x, [0.0, 0.5, 1.0, 1.5, 2.5]
    elif op == "Cast":
        yield x, _rounding_thresholds(attributes["to"].i if "to" in attributes else 0)
    elif op == "QuantizeLinear":
        scales = distinct_numbers(constants.get(node.input[1]))
        yield x, [scale * step for scale in scales[:4] for step in (-128.5, -127.5, -0.5, 0.5, 127.5, 255.5)]


def _rounding_thresholds(kind: int) -> list[float]:
    """Return numbers near which a Cast to integers or bool changes its result."""
    if kind == onnx.TensorProto.BOOL:
        return [0.0]
    if kind in onnx.TensorProto.DataType.values():
        name = onnx.TensorProto.DataType.Name(kind)
    else:
        name = ""
    if name.startswith(("INT", "UINT")):
        return [-1.0, 0.0, 1.0, 2.0]
    return []


def _input_thresholds(
    node: onnx.NodeProto, behind: list[float], constants: _Constants
) -> Iterable[tuple[str, list[float]]]:
    """Yield each input of a node with the numbers at which the node's result reaches a threshold in ``behind``."""
    op = node.op_type
    names = [name for name in node.input if name and name not in constants]
    if op in _SAME:
        yield from ((name, behind) for name in names)
    elif op in ("Add", "Sub", "Mul", "Div") and len(node.input) == 2:
        for i, name in enumerate(node.input):
            if name not in constants:
                known = distinct_numbers(constants.get(node.input[1 - i]))[:4] or [0.0 if op in ("Add", "Sub") else 1.0]
                yield name, [v for c in known for y in behind for v in _invert_operation(op, i, y, c)]
    elif op in _INVERSES and names:
        yield names[0], [v for y in behind for v in _invert_safely(_INVERSES[op], y)]


def _invert_operation(op: str, place: int, y: float, c: float) -> list[float]:
    """Solve x op c = y for x, or c op x = y if x is the second operand (``place`` is 1)."""
    if op == "Add":
        return [y - c]
    if op == "Sub":
        if place == 0:
            return [y + c]
        return [c - y]
    if op == "Mul":
        if c:
            return [y / c]
        return []
    if place == 0:
        return [y * c]
    if y:
        return [c / y]
    return []


_INVERSES: dict[str, Callable[[float], tuple[float, ...]]] = {
    "Neg": lambda y: (-y,),
    "Abs": lambda y: (-y, y),
    "Floor": lambda y: (y, y + 1),
    "Ceil": lambda y: (y - 1, y),
    "Round": lambda y: (y - 0.5, y, y + 0.5),
    "Sqrt": lambda y: (y * y,),
    "Pow": lambda y: (-math.sqrt(y), math.sqrt(y)),
    "Exp": lambda y: (math.log(y),),
    "Log": lambda y: (math.exp(y),),
    "Tanh": lambda y: (math.atanh(y),),
    "Sigmoid": lambda y: (math.log(y / (1 - y)),),
    "Reciprocal": lambda y: (1 / y,),
}


def _invert_safely(inverse: Callable[[float], tuple[float, ...]], y: float) -> tuple[float, ...]:
    try:
        return inverse(y)
    except (ValueError, ZeroDivisionError, OverflowError):
        return ()
