"""Evaluate a graph at a random point of prime fields.

A node that the field can't evaluate is an unknown function of its inputs: its result depends on its op, its attributes
and the terms of its inputs. If its shape is known, its elements are independent variables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx

from ...evaluate import evaluator
from ...evaluate.evaluator_core import UnsupportedOp
from ...graphs import integer_ops
from ...graphs.symbolic_sizes import NoPolynomial, Size
from ...storage.onnx_domains import STANDARD
from ...storage.proto_traversal import attribute_values
from .field_ops import TABLE
from .field_values import Facts, Field, NotEvaluated, Value
from .graph_nodes import node_inputs
from .op_call import Call

# Ops that give different results in each run
RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
# Ops whose versions differ only in types, or in attributes whose defaults have the older meaning
_STABLE = frozenset({"MaxPool", "LSTM", "GRU", "RNN", "TopK", "ArgMax", "ArgMin", "NonZero", "LRN", "Det"})
# Errors of ops whose inputs do not fit
_FAILURES = (ValueError, TypeError, IndexError, KeyError, AssertionError, AttributeError, ArithmeticError)
# Contrib ops that mean the same as the op of the same name in the default domain
_SAME_IN_CONTRIB = frozenset({"SimplifiedLayerNormalization"})


@dataclass
class Trace:
    """Evaluation of one graph.

    Attributes:
        values: values by tensor name.
        reasons: outputs of nodes that the field can't evaluate → the op and the reason.
        facts: arguments at which the graph is not defined everywhere.
        exact_casts: outputs of nodes → floating types of their Casts that would round but were exact.
    """

    values: dict[str, Value] = field(default_factory=dict)
    reasons: dict[str, tuple[str, str]] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    exact_casts: dict[str, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ConcreteGraph:
    """Graph whose dims are numbers.

    Attributes:
        nodes: the nodes that the outputs need, in topological order.
        constants: arrays of the initializers by name.
        shapes: fixed shapes that inference found, by tensor name.
        kinds: elem_type by tensor name.
        inputs: names of the inputs that are not initializers.
        outputs: names of the outputs.
        opsets: version by domain.
        side: identifies the file, for nodes with random results.
    """

    nodes: tuple[onnx.NodeProto, ...]
    constants: Mapping[str, np.ndarray]
    shapes: Mapping[str, tuple[int, ...]]
    kinds: Mapping[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opsets: Mapping[str, int]
    side: str


def evaluate_graph(
    point: Field, graph: ConcreteGraph, inputs: Mapping[str, Value], exact: Mapping[str, Value]
) -> Trace:
    """Evaluate a graph.

    Args:
        point: the random point. Graphs that are compared share it.
        inputs: values of the inputs by name.
        exact: exact values of constants that the file stores rounded, by name.

    Returns:
        the values of all tensors.
    """
    trace = Trace(facts=Facts())
    point.facts = trace.facts
    values = trace.values
    values.update(inputs)
    values.update(exact)
    last = _last_readers(graph)
    for place, node in enumerate(graph.nodes):
        for name in node.input:
            if name and name not in values and name in graph.constants:
                values[name] = _constant(point, graph.constants[name])
        point.check_time()
        point.exact_casts = set()
        results = _evaluate_node(point, graph, node, trace)
        if point.exact_casts:
            trace.exact_casts.update(dict.fromkeys(node.output, frozenset(point.exact_casts)))
        results = _with_types(node, trace.values, results, graph.kinds)
        for name, value in zip(node.output, results, strict=False):
            if name:
                values.setdefault(name, value)
        for name in last.get(place, ()):
            values[name] = _without_residues(point, values[name])
    for name in graph.outputs:
        if name not in values and name in graph.constants:
            values[name] = _constant(point, graph.constants[name])
    return trace


def _last_readers(graph: ConcreteGraph) -> dict[int, list[str]]:
    """Find the tensors that no later node reads.

    Returns:
        names by the place of the last node that reads or makes them.
    """
    places: dict[str, int] = {}
    for place, node in enumerate(graph.nodes):
        places.update(dict.fromkeys(node_inputs(node), place))
        places.update(dict.fromkeys((name for name in node.output if name), place))
    last: dict[int, list[str]] = {}
    for name, place in places.items():
        if name not in graph.outputs and name not in graph.constants:
            last.setdefault(place, []).append(name)
    return last


def _without_residues(point: Field, x: Value) -> Value:
    """Keep only the digest of a value that is not read again. Small constants keep their numbers."""
    if x.residues is None or x.is_constant:
        return x
    return replace(x, residues=None, digest=point.digest(x))


def _constant(point: Field, array: np.ndarray) -> Value:
    try:
        return point.constant(array)
    except NotEvaluated:
        content = array.tobytes() if array.dtype != object else repr(array.tolist()).encode()
        digest = _hash("constant", str(array.dtype), repr(array.shape), content)
        return Value(array.shape, "o", digest=digest)


def _evaluate_node(point: Field, graph: ConcreteGraph, node: onnx.NodeProto, trace: Trace) -> Sequence[Value]:
    inputs = [trace.values[name] if name else None for name in node.input]
    domain = "" if node.domain in STANDARD else node.domain
    opset = graph.opsets.get(domain, 1)
    if not any(a.HasField("g") or a.graphs for a in node.attribute):
        try:
            return evaluate_op(point, node, domain, inputs, opset)
        except NotEvaluated as error:
            reason = str(error)
        except _FAILURES as error:
            reason = f"{type(error).__name__}: {error}"
    else:
        reason = "control flow is compared by its structure only"
    results = _unknown_node(point, graph, node, domain, inputs, opset, trace)
    for name in node.output:
        trace.reasons[name] = (node.op_type, reason)
    return results


def evaluate_op(
    point: Field, node: onnx.NodeProto, domain: str, inputs: Sequence[Value | None], opset: int
) -> Sequence[Value]:
    """Evaluate one node.

    Returns:
        its outputs.

    Raises:
        NotEvaluated: the field can't evaluate the node.
    """
    attrs = plain_attributes(node)
    outputs = len(node.output)
    if node.op_type == "Constant" and not domain:
        if not attrs:
            raise NotEvaluated("a Constant without a value")
        (array,) = evaluator.evaluate_node("Constant", [], attrs, opset=opset)
        return (point.constant(np.asarray(attrs.get("value", array))),)
    if any(x is not None and not x.is_known and node.op_type != "Shape" for x in inputs):
        kept = None if domain else _find_unchanged_input(node.op_type, inputs)
        if kept is None:
            raise NotEvaluated("an input is known only by its term")
        return (kept,)
    if inputs and not domain and node.op_type in _INTEGER_OPS and all(_is_whole(x) for x in inputs):
        whole = [x.stored if x is not None else None for x in inputs]
        try:
            results = integer_ops.apply_integer_op(node.op_type, whole, attrs, opset, outputs)
            return [point.constant(_in_type_of(whole, np.asarray(r), node.op_type)) for r in results if r is not None]
        except (UnsupportedOp, NoPolynomial, TypeError) as error:
            # The op may still have a definition for open sizes.
            if node.op_type not in TABLE or node.op_type in ("Slice", "Gather"):
                raise NotEvaluated(str(error)) from error
    function = TABLE.get(node.op_type)
    if function is not None and (not domain or (domain == "com.microsoft" and node.op_type in _SAME_IN_CONTRIB)):
        made = function(Call(point, node.op_type, inputs, attrs, opset, outputs))
        return made if isinstance(made, tuple) else (made,)
    return _evaluate_body(point, node, domain, inputs, opset)


# Op → number with which it returns its other input
_NEUTRAL = {"And": 1, "Or": 0, "Xor": 0, "Add": 0, "Mul": 1}
# Op → number as the second input with which it returns the first
_NEUTRAL_SECOND = {"Sub": 0, "Div": 1}


def _find_unchanged_input(op: str, inputs: Sequence[Value | None]) -> Value | None:
    """Find the input that an op returns: Identity, or an op of two inputs of which one is a single neutral number."""
    if op == "Identity":
        return inputs[0]
    if len(inputs) != 2:
        return None
    first, second = inputs
    if first is None or second is None:
        return None
    if _is_single_number(second, _NEUTRAL.get(op, _NEUTRAL_SECOND.get(op)), first):
        return first
    if _is_single_number(first, _NEUTRAL.get(op), second):
        return second
    return None


def _is_single_number(x: Value, number: int | None, other: Value) -> bool:
    """Return whether ``x`` is this number alone, and does not change the shape of ``other``."""
    if number is None or x.stored is None or x.stored.size != 1 or x.stored.dtype == object:
        return False
    fits = x.stored.ndim == 0 or (other.shape is not None and x.stored.ndim <= len(other.shape))
    return fits and bool(x.stored.reshape(()) == number)


def _with_types(
    node: onnx.NodeProto,
    values: Mapping[str, Value],
    results: Sequence[Value],
    kinds: Mapping[str, int],
    opset: int | None = None,
) -> list[Value]:
    """Give the results of a node their element types, from inference or from the op's definition."""
    made = []
    for i, (name, value) in enumerate(zip(node.output, results, strict=False)):
        elem = kinds.get(name, 0) or (_defined_type(node, values, i, opset) if opset else 0) or value.elem
        made.append(value if value.elem == elem else replace(value, elem=elem))
    return made


def _defined_type(node: onnx.NodeProto, values: Mapping[str, Value], i: int, opset: int) -> int:
    """Read the type of an output from the definition of a standard op: the type of an input with the same letter.

    Returns:
        ONNX's number of it; 0 if the definition does not say it.
    """
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    letter = schema.outputs[min(i, len(schema.outputs) - 1)].type_str
    for place, name in enumerate(node.input):
        if name in values and schema.inputs[min(place, len(schema.inputs) - 1)].type_str == letter:
            return values[name].elem
    return 0


def _kind_in_term(x: Value) -> str:
    """Describe the type of an input of an unknown function. Ops on integers depend on the bits of the type."""
    return f"i{x.elem}" if x.kind == "i" else x.kind


def _is_whole(x: Value | None) -> bool:
    """Return True for an omitted input, and for integers or sizes that do not depend on inputs."""
    return x is None or (x.stored is not None and (x.stored.dtype == object or x.stored.dtype.kind in "iub"))


# Ops on integers whose results have the type of the first input
_SAME_TYPE = frozenset(
    {*("Add", "Sub", "Mul", "Neg", "Abs", "Pow", "Sum", "Range", "Max", "Min"), "Clip", "ReduceSum", "ReduceProd"}
)


def _in_type_of(inputs: Sequence[np.ndarray | None], made: np.ndarray, op: str) -> np.ndarray:
    """Let integers overflow as their type does."""
    first = inputs[0]
    if op not in _SAME_TYPE or first is None or object in (first.dtype, made.dtype):
        return made
    return made.astype(first.dtype)


# Ops that numpy computes on constant integers. Other ops on constant integers, such as Shape, have own definitions.
_INTEGER_OPS = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Max", "Min", "Clip", "Sign", "Pow", "Sum", "Range"),
        *("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or", "Not", "Where"),
        *("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "Gather", "Slice", "Concat", "Squeeze", "Unsqueeze"),
        *("Reshape", "Transpose", "Split", "Expand", "Tile", "Identity"),
    }
)


def plain_attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Read the attributes of a node as plain values.

    Returns:
        values by name; tensors as arrays.
    """
    attrs = attribute_values(node)
    return {k: onnx.numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for k, v in attrs.items()}


# ------------------------------------------------------------------ ops defined by functions


def _evaluate_body(
    point: Field, node: onnx.NodeProto, domain: str, inputs: Sequence[Value | None], opset: int
) -> Sequence[Value]:
    """Evaluate a standard op by the function that ONNX defines it with."""
    if domain:
        raise NotEvaluated("the op belongs to another domain")
    body = _function_body(node, inputs, opset)
    opsets = {o.domain: o.version for o in body.opset_import}
    given: dict[str, Value | None] = dict.fromkeys(body.input)
    given.update(zip(body.input, inputs, strict=False))
    attributes = {a.name: a for a in node.attribute}
    for inner in body.node:
        if any(a.HasField("g") for a in inner.attribute):
            raise NotEvaluated("its definition contains control flow")
        filled = _fill_attributes(inner, attributes, body)
        values = [given[name] if name else None for name in inner.input]
        version = opsets.get("", opset)
        results = evaluate_op(point, filled, "", values, version)
        known = {name: value for name, value in given.items() if value is not None}
        results = _with_types(filled, known, results, {}, version)
        given.update(zip(inner.output, results, strict=False))
        # Another file may store a number such as the √2 of Gelu.
        point.body_constants.update((point.digest(x), x) for x in results if x.approx is not None and x.stored is None)
    made = [given.get(name) for name in body.output[: len(node.output)]]
    if any(x is None for x in made):
        raise NotEvaluated("its definition leaves out an output")
    return [x for x in made if x is not None]


def _function_body(node: onnx.NodeProto, inputs: Sequence[Value | None], opset: int) -> onnx.FunctionProto:
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError as error:
        raise NotEvaluated("the op has no definition") from error
    if schema.has_function:
        return schema.function_body
    if not schema.has_context_dependent_function:
        raise NotEvaluated("the op is not algebraic")
    types = []
    for x in inputs:
        kind = onnx.TypeProto()
        if x is not None:
            elem_type = x.elem or {"f": 1, "i": 7, "b": 9}[x.kind]
            kind = onnx.helper.make_tensor_type_proto(elem_type, x.shape)
        types.append(kind.SerializeToString())
    content = schema.get_context_dependent_function(node.SerializeToString(), types)
    body = onnx.FunctionProto()
    body.ParseFromString(content)
    if not body.node:
        raise NotEvaluated("the op is not algebraic")
    return body


def _fill_attributes(
    node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto], body: onnx.FunctionProto
) -> onnx.NodeProto:
    """Replace references to the attributes of the function by their values."""
    if not any(a.ref_attr_name for a in node.attribute):
        return node
    defaults = {a.name: a for a in body.attribute_proto}
    filled = onnx.NodeProto()
    filled.CopyFrom(node)
    del filled.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            filled.attribute.append(attribute)
            continue
        given = attributes.get(attribute.ref_attr_name) or defaults.get(attribute.ref_attr_name)
        if given is None:
            continue
        copy = filled.attribute.add()
        copy.CopyFrom(given)
        copy.name = attribute.name
    return filled


# ------------------------------------------------------------------ unknown functions


def _hash(*parts: str | bytes) -> bytes:
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        made.update(len(content).to_bytes(8, "little"))
        made.update(content)
    return made.digest()


def _unknown_node(
    point: Field,
    graph: ConcreteGraph,
    node: onnx.NodeProto,
    domain: str,
    inputs: Sequence[Value | None],
    opset: int,
    trace: Trace,
) -> list[Value]:
    """Make the outputs of a node that is an unknown function of all of its inputs."""
    parts: list[str | bytes] = [domain, node.op_type, str(_version(node, domain, opset))]
    for x in inputs:
        if x is None:
            parts.append("omitted")
            continue
        if x.is_known:
            point.note_compared(x)
        parts.append(_kind_in_term(x))
        parts.append(point.digest(x) if x.is_known else x.digest)
    parts += [repr(item) for item in _attribute_keys(point, graph, node, domain, opset, trace)]
    if node.op_type in RANDOM or _is_training(node, inputs):
        parts.append(f"{graph.side} {node.output[0]}")
    term = _hash(*parts)
    results = []
    inferred = {}
    if all(x is None or x.is_known for x in inputs) and not _shape_depends_on_values(node, inputs):
        inferred = _infer_sizes(node, domain, inputs, graph, term)
        if node.op_type == "Slice":
            inferred |= _sizes_of_open_slice(point, node, inputs)
    for i, name in enumerate(node.output):
        digest = _hash(term, str(i))
        kind = _kind_of(graph.kinds.get(name))
        sizes = inferred.get(name)
        if sizes is not None and kind != "o":
            results.append(point.free(digest.hex(), sizes, kind, graph.kinds.get(name, 0)))
        else:
            results.append(Value(None, kind, digest=digest, elem=graph.kinds.get(name, 0)))
    return results


def _infer_sizes(
    node: onnx.NodeProto, domain: str, inputs: Sequence[Value | None], graph: ConcreteGraph, term: bytes
) -> dict[str, list[Size]]:
    """Infer the sizes of the outputs of a node.

    A size that ONNX does not infer is an open size that depends on the node's term only.

    Returns:
        sizes by name; no entry for an output of unknown rank.
    """
    shapes = {name: [Size.from_int(n) for n in shape] for name, shape in graph.shapes.items() if name in node.output}
    if not any(x is not None and x.is_open for x in inputs) and len(shapes) == len(node.output):
        return shapes
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    named: dict[str, Size] = {}
    for name, x in zip(node.input, inputs, strict=True):
        if x is None:
            continue
        dims = [_dim_name(size, named) for size in x.sizes]
        types[name] = onnx.helper.make_tensor_type_proto(graph.kinds.get(name, 1), dims)
        if x.stored is not None and x.stored.dtype != object and x.stored.size < 64:
            data[name] = onnx.numpy_helper.from_array(np.asarray(x.stored), name)
    try:
        schema = onnx.defs.get_schema(node.op_type, graph.opsets.get(domain, 1), domain)
        opsets = [onnx.helper.make_opsetid(d, v) for d, v in graph.opsets.items()]
        results = onnx.shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=opsets)
    # onnx's inference refuses nodes that it can't follow.
    except Exception:
        return {}
    found = {}
    for name, result in results.items():
        if not result.tensor_type.HasField("shape"):
            continue
        found[name] = [
            Size.from_int(d.dim_value)
            if d.HasField("dim_value")
            else named.get(d.dim_param) or Size.opaque("size", term.hex(), node.output[:].index(name), i)
            for i, d in enumerate(result.tensor_type.shape.dim)
        ]
    return found


def _sizes_of_open_slice(point: Field, node: onnx.NodeProto, inputs: Sequence[Value | None]) -> dict[str, list[Size]]:
    """Compute the sizes of a Slice from 0 to an open size, such as of a table of positions.

    The open size must not exceed the sliced size; the proof states this limit.
    """
    x, starts, ends, *others = inputs
    numbers = [v.stored for v in (starts, ends, *others) if v is not None]
    if x is None or any(n is None for n in numbers):
        return {}
    lists = [n.reshape(-1).tolist() for n in numbers if n is not None]
    axes = lists[2] if len(lists) > 2 else list(range(len(lists[0])))
    steps = lists[3] if len(lists) > 3 else [1] * len(axes)
    sizes = list(x.sizes)
    for start, end, axis, step in zip(lists[0], lists[1], axes, steps, strict=True):
        whole = sizes[axis].constant_value
        if start != 0 or step != 1 or not isinstance(end, Size) or whole is None:
            return {}
        sizes[axis] = end
        point.limits.add((end, whole))
    return {node.output[0]: sizes}


def _dim_name(size: Size, named: MutableMapping[str, Size]) -> int | str:
    if size.constant_value is not None:
        return size.constant_value
    name = f"size{len(named)}"
    for known, other in named.items():
        if other == size:
            return known
    named[name] = size
    return name


def _is_training(node: onnx.NodeProto, inputs: Sequence[Value | None]) -> bool:
    return node.op_type == "Dropout" and len(inputs) > 0


def _shape_depends_on_values(node: onnx.NodeProto, inputs: Sequence[Value | None]) -> bool:
    """Return True if the shape may depend on numbers that are not known."""
    if node.op_type in ("NonZero", "Unique", "NonMaxSuppression", "Compress", "If", "Loop", "Scan", "SequenceMap"):
        return True
    return any(x is not None and x.kind == "i" and x.stored is None for x in inputs[1:]) and node.op_type not in (
        "Gather",
        "GatherElements",
        "GatherND",
        "ScatterND",
        "ScatterElements",
        "OneHot",
        "EmbedLayerNormalization",
        "Attention",
        "LSTM",
        "GRU",
        "RNN",
    )


def _kind_of(elem_type: int | None) -> str:
    if elem_type in (1, 10, 11, 16):
        return "f"
    if elem_type in (2, 3, 4, 5, 6, 7, 12, 13):
        return "i"
    return "b" if elem_type == 9 else "o"


def _version(node: onnx.NodeProto, domain: str, opset: int) -> int:
    """Return the version of the op's definition. Some ops have kept their meaning since their first version."""
    if node.op_type in _STABLE and not domain:
        return 0
    try:
        return int(onnx.defs.get_schema(node.op_type, opset, domain).since_version)
    except onnx.defs.SchemaError:
        return opset


def _attribute_keys(
    point: Field, graph: ConcreteGraph, node: onnx.NodeProto, domain: str, opset: int, trace: Trace
) -> Iterator[tuple[str, object]]:
    """Yield attributes that differ from their defaults, as values that are equal for equal attributes."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, domain)
        defaults = {k: a.default_value for k, a in schema.attributes.items() if a.default_value.type}
    except onnx.defs.SchemaError:
        defaults = {}
    for attribute in sorted(node.attribute, key=lambda a: a.name):
        default = defaults.get(attribute.name)
        if default is not None and onnx.helper.get_attribute_value(default) == onnx.helper.get_attribute_value(
            attribute
        ):
            continue
        if attribute.HasField("g"):
            yield attribute.name, body_digest(point, attribute.g, trace.values, graph)
        elif attribute.graphs:
            yield attribute.name, tuple(body_digest(point, g, trace.values, graph) for g in attribute.graphs)
        elif attribute.HasField("t"):
            array = onnx.numpy_helper.to_array(attribute.t)
            yield attribute.name, (attribute.t.data_type, array.shape, array.tobytes())
        else:
            yield attribute.name, onnx.helper.get_attribute_value(attribute)


def body_digest(point: Field, body: onnx.GraphProto, outer: Mapping[str, Value], graph: ConcreteGraph) -> bytes:
    """Hash a body of control flow with the terms that it reads from outside.

    Two bodies with equal digests have the same nodes in the same order, up to the names of tensors.

    Returns:
        the digest.
    """
    names: MutableMapping[str, str] = {}
    parts: list[str | bytes] = [f"{len(body.input)} inputs"]
    for i, info in enumerate(body.input):
        names[info.name] = f"input {i}"
        parts.append(str(info.type.tensor_type.elem_type))
    for tensor in body.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        content = array.tobytes() if array.dtype != object else repr(array.tolist()).encode()
        names[tensor.name] = _hash(str(array.dtype), repr(array.shape), content).hex()

    def reading(name: str) -> str:
        if not name or name in names:
            return names.get(name, "")
        value = outer.get(name)
        if value is None and name in graph.constants:
            value = _constant(point, graph.constants[name])
        if value is None:
            # A body that reads an unknown tensor is different from every other body.
            return f"{graph.side} {name}"
        return (point.digest(value) if value.is_known else value.digest).hex() + _kind_in_term(value)

    for number, node in enumerate(body.node):
        domain = "" if node.domain in STANDARD else node.domain
        opset = graph.opsets.get(domain, 1)
        parts += [domain, node.op_type, str(_version(node, domain, opset)), *(reading(n) for n in node.input)]
        inner = {**outer, **{n: Value(None, "o", digest=v.encode()) for n, v in names.items()}}
        keys = _attribute_keys(point, graph, node, domain, opset, replace_values(inner))
        parts += [repr(item) for item in keys]
        if node.op_type in RANDOM or node.op_type == "Dropout":
            parts.append(f"{graph.side} {node.output[0]}")
        for i, name in enumerate(node.output):
            names[name] = f"node {number} output {i}"
    parts += [reading(info.name) for info in body.output]
    return _hash(*parts)


def replace_values(values: Mapping[str, Value]) -> Trace:
    """Make a trace of known values, for a nested body."""
    return replace(Trace(), values=dict(values))
