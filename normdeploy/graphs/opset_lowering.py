"""Lower a file's opset: write each node as the older opset defines it, or refuse the file.

onnx's version converter (1.23) is not used here. It refuses a whole file if one op has no adapter down, and many ops
have none: Add, Reshape and BatchNormalization from opset 14 to 13, Identity from 16, Shape from 15, Split and Pad from
18, and GroupNormalization from 21 (onnx/onnx#5843; a newer onnx has one, #8436). It also loses functions and metadata.
Most nodes need no adapter, because ops gained mainly types and optional attributes. A node stays as it is if onnx's
older schema has its inputs, attributes and types. An attribute that only the newer schema has is dropped if it has the
value that the older op implied.

The other nodes are rewritten by `ADAPTERS`. Ops that the older opset lacks are replaced by their function body in
onnx's schema (Gelu, HardSwish, Mish, Swish, Attention, ...). Norms are replaced before, because each of them has a
proof (`normdeploy.contrib.standardization`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import TensorProto

from ..evaluate import evaluator
from ..norms.norm_table import STANDARD as NORMS
from ..norms.third_party import function_op_row, is_managed_op
from ..storage.onnx_domains import default_domain_opset, is_standard
from ..storage.proto_traversal import (
    attribute_value,
    attribute_values,
    copy_field,
    copy_model,
    nodes_with_bodies,
    standard_opset,
    unique_name,
)
from .dims import Types
from .function_ops import inline_calls, inline_functions
from .proto_queries import all_names, constant_tensors
from .region import RefusedError
from .shape_inference import infer_types
from .subgraphs import body_subgraphs
from .type_opsets import onnx_type_names, schema_allows_types

# Function bodies may hold ops that are newer too, such as Swish in SwiGLU.
_ROUNDS = 4
_INT64_MAX = np.iinfo(np.int64).max
# Ops whose elements are elements of their first input, or products of them
_SELECTING = ("Cast", "Gather", "Identity", "ReduceProd", "Reshape", "Slice", "Squeeze", "Unsqueeze")
# Op and attribute → its values that began later than the attribute → the opset of each value
_LATER_VALUES: Mapping[tuple[str, str], Mapping[bytes, int]] = {
    ("Pad", "mode"): {b"wrap": 19},
    ("Resize", "coordinate_transformation_mode"): {b"half_pixel_symmetric": 19},
    ("ScatterElements", "reduction"): {b"max": 18, b"min": 18},
    ("ScatterND", "reduction"): {b"max": 18, b"min": 18},
}
_FLOATS8 = frozenset(value for name, value in TensorProto.DataType.items() if name.startswith("FLOAT8"))
# Exceptions for a tensor that can't be computed from constants
_NOT_CONSTANT = (KeyError, evaluator.UnsupportedOp, ValueError, TypeError, IndexError)


@dataclass(frozen=True)
class LoweredNode:
    """Node that was changed, or whose op has another form at the older opset.

    Attributes:
        place: body that contains the node; "" for the main graph.
        before: the node at the newer opset.
        after: nodes at the older opset.
        constants: constants that one of these nodes reads.
        computed: names of constants that other nodes compute.
        types: types of the tensors around.
    """

    place: str
    before: onnx.NodeProto
    after: Sequence[onnx.NodeProto]
    constants: Sequence[onnx.TensorProto]
    computed: frozenset[str]
    types: Types = field(repr=False)


def lower_opset(proto: onnx.ModelProto, opset: int) -> tuple[onnx.ModelProto, list[LoweredNode]]:
    """Lower the model and its functions to ``opset``.

    Nodes that follow ``opset`` already stay: a reduction with an attribute ``axes``, for example.

    Args:
        proto: the model after `inline_newer_functions`.

    Returns:
        a changed copy, and each rewritten node.

    Raises:
        RefusedError: a node has no equal form at this opset. The message names node, op, type and the lowest opset.
    """
    newer = default_domain_opset(proto)
    out = inline_newer_ops(proto, opset)
    lowered: list[LoweredNode] = []
    _lower_graph(out, _Opsets(newer, opset), set(), lowered, "")
    functions = [f for f in out.functions if not is_managed_op(f.domain, f.name)]
    for function in functions:
        opsets = _Opsets(default_domain_opset(function, newer), opset)
        for node in nodes_with_bodies(function.node):
            if not _is_same_form(node, opsets):
                reason = _describe_misfit(node, opset, Types()) or "it has another form there, and is in a function"
                raise _refusal(node, opset, reason, _lowest_opset(node, opsets.newer, Types()))
    for holder in (out, *functions):
        entry = standard_opset(holder)
        if entry is not None:
            entry.version = opset
    oldest = onnx.helper.find_min_ir_version_for(list(out.opset_import), ignore_unknown=True)
    # Functions need a newer IR version, and those with an overload an even newer one.
    out.ir_version = max(oldest, out.ir_version) if out.functions else oldest
    return out, lowered


@dataclass(frozen=True)
class _Opsets:
    """Opset of the nodes before and after."""

    newer: int
    older: int


# ------------------------------------------------------------------ ops and functions that the older opset lacks


def inline_newer_functions(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Inline the functions with a body that the older opset can't hold as it is, apart from its norms.

    Returns:
        a changed copy, or ``proto`` itself if nothing is inlined.

    Raises:
        RefusedError: a function can't be inlined.
    """
    calls = [n for n in nodes_with_bodies(proto.graph.node) if is_managed_op(n.domain, n.op_type)]
    rows = [(n, function_op_row(n.domain, n.op_type)) for n in calls]
    proto = inline_calls(proto, [n for n, row in rows if row is not None and row.since > opset])
    changed = [
        (f.domain, f.name)
        for f in proto.functions
        if not is_managed_op(f.domain, f.name)
        and not all(
            n.op_type in NORMS or _is_same_form(n, _Opsets(default_domain_opset(f), opset))
            for n in nodes_with_bodies(f.node)
        )
    ]
    if not changed:
        return proto
    proto = inline_functions(proto, changed)
    left = {(f.domain, f.name) for f in proto.functions}.intersection(changed)
    if left:
        # onnx's inliner leaves functions whose opset is not the model's.
        raise RefusedError(
            f"the function {'.'.join(min(left))!r} has ops that opset {opset} lacks, and can't be inlined"
        )
    return proto


def inline_newer_ops(proto: onnx.ModelProto, opset: int, around: Collection[str] = frozenset()) -> onnx.ModelProto:
    """Replace ops that begin after ``opset`` by the function bodies in onnx's schemas, at the model's own opset.

    Args:
        around: names that the new tensors must not have.

    Returns:
        a changed copy.

    Raises:
        RefusedError: onnx fails to write a function body.
    """
    proto = copy_model(proto)
    newer = default_domain_opset(proto)
    names = {*around, *all_names(proto.graph)}
    # The inliner knows the types of the main graph only, so each body is opened as a model.
    for body in body_subgraphs(proto):
        body.put_back(inline_newer_ops(body.model, opset, names))
    for _ in range(_ROUNDS):
        nodes = [n for n in proto.graph.node if _has_body_only(n, newer, opset)]
        if not nodes:
            break
        for node in nodes:
            _state_defaults(node, newer)
        before = {output: n for n in proto.graph.node for output in n.output}
        try:
            proto = _inline_schema_bodies(proto, sorted({n.op_type for n in nodes}))
        except Exception as error:
            # onnx's exceptions share no base class.
            reason = " ".join(str(error).split())[:120]
            raise RefusedError(f"onnx can't write {nodes[0].op_type} as its function body: {reason}") from error
        _rename_clashing(proto.graph, before, around)
        _copy_metadata(proto.graph.node, before)
    return proto


def _rename_clashing(graph: onnx.GraphProto, before: Mapping[str, onnx.NodeProto], around: Collection[str]) -> None:
    """Rename the tensors of inlined bodies that have the name of a tensor of an outer graph."""
    taken = {*around, *all_names(graph)}
    new = {o for n in graph.node for o in n.output} - before.keys()
    names = {name: unique_name(name, taken) for name in sorted(new.intersection(around))}
    for node in graph.node if names else ():
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def _copy_metadata(nodes: Sequence[onnx.NodeProto], before: Mapping[str, onnx.NodeProto]) -> None:
    """Give the nodes of inlined bodies the metadata of the nodes that they replace.

    Args:
        before: name of an output → its node before the inlining.
    """
    inner = {output: node for node in nodes for output in node.output if output not in before}
    for node in reversed(nodes):
        replaced = next((before[o] for o in node.output if o in before), None)
        if replaced is not None and not node.metadata_props:
            node.metadata_props.extend(replaced.metadata_props)
        for writer in (inner[name] for name in node.input if name in inner):
            if not writer.metadata_props:
                writer.metadata_props.extend(node.metadata_props)


def _inline_schema_bodies(proto: onnx.ModelProto, ops: Sequence[str]) -> onnx.ModelProto:
    """Replace standard ops by the function bodies in onnx's schemas.

    The weights become inputs for that: protobuf can't give the inliner more than 2 GB, and the inliner does not see the
    types of initializers.
    """
    skeleton = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    for descriptor, value in proto.graph.ListFields():
        if descriptor.name != "initializer":
            copy_field(skeleton.graph, descriptor, value)
    fed = {i.name for i in proto.graph.input}
    skeleton.graph.input.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        for t in proto.graph.initializer
        if t.name not in fed
    )
    inlined = onnx.inliner.inline_selected_functions(
        skeleton, [("", op) for op in ops], exclude=False, inline_schema_functions=True
    )
    for descriptor in ("node", "value_info"):
        made = list(getattr(inlined.graph, descriptor))
        del getattr(proto.graph, descriptor)[:]
        getattr(proto.graph, descriptor).extend(made)
    return proto


def _has_body_only(node: onnx.NodeProto, newer: int, older: int) -> bool:
    """Return whether the older opset lacks a node's op, and onnx's schema has a function body for it."""
    if not is_standard(node) or node.op_type in ADAPTERS or node.op_type in NORMS:
        return False
    if not _has_op(node.op_type, newer):
        return False
    if _has_op(node.op_type, older):
        return False
    schema = onnx.defs.get_schema(node.op_type, newer)
    return bool(schema.has_function or schema.has_context_dependent_function)


def _has_op(op: str, opset: int) -> bool:
    return bool(onnx.defs.has(op, max_inclusive_version=opset, domain=""))


def _state_defaults(node: onnx.NodeProto, opset: int) -> None:
    """Write the default attributes into a node, because onnx's inliner ignores them."""
    node.domain = ""
    stated = {a.name for a in node.attribute}
    for name, attribute in onnx.defs.get_schema(node.op_type, opset).attributes.items():
        if name not in stated and attribute.default_value.name:
            node.attribute.append(attribute.default_value)


# ------------------------------------------------------------------ graphs and nodes


def _lower_graph(
    proto: onnx.ModelProto,
    opsets: _Opsets,
    around: set[str],
    lowered: list[LoweredNode],
    place: str,
) -> None:
    """Rewrite the nodes of a graph and of its bodies, in place."""
    types = infer_types(proto)
    taken = {*around, *all_names(proto.graph)}
    for body in body_subgraphs(proto):
        inner = "; ".join(filter(None, (place, body.place)))
        _lower_graph(body.model, opsets, taken, lowered, inner)
        body.put_back(body.model)
    constants = constant_tensors(proto.graph)
    writers = {output: node for node in proto.graph.node for output in node.output}
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        if not is_standard(node) or not _is_newer(node, opsets):
            nodes.append(node)
            continue
        writer = NodeWriter(node, opsets.newer, opsets.older, types, constants, writers, taken)
        _write_node(writer)
        for made in writer.nodes:
            _require_form(node, made, opsets, writer.types)
            made.metadata_props.extend(node.metadata_props if not made.metadata_props else ())
        read = {name for n in (node, *writer.nodes) for name in n.input}
        near = [t for name, t in constants.items() if name in read]
        computed = [onnx.numpy_helper.from_array(value, name) for name, value in writer.computed.items()]
        lowered.append(
            LoweredNode(
                place,
                node,
                writer.nodes,
                [*near, *computed, *writer.initializers],
                frozenset(writer.computed),
                types,
            )
        )
        nodes += writer.nodes
        proto.graph.initializer.extend(writer.initializers)
    kept = list(nodes)
    del proto.graph.node[:]
    proto.graph.node.extend(kept)


def _is_newer(node: onnx.NodeProto, opsets: _Opsets) -> bool:
    """Return whether a node follows a schema that the older opset does not have."""
    if not _has_op(node.op_type, opsets.newer):
        # The op belongs to another tool, which wrote it into ONNX's domain.
        return False
    known = onnx.defs.get_schema(node.op_type, opsets.newer).attributes
    if any(a.name not in known for a in node.attribute):
        # A norm's nodes were written for the older opset.
        return False
    if not _has_op(node.op_type, opsets.older):
        return True
    old, new = (onnx.defs.get_schema(node.op_type, opset) for opset in (opsets.older, opsets.newer))
    return bool(old.since_version != new.since_version)


class NodeWriter:
    """Write the nodes that replace one node.

    Attributes:
        node: the node.
        newer, older: opset of the node, and opset of the written nodes.
        types: types of the tensors.
        nodes, initializers: what was written.
        computed: constant inputs that other nodes compute.
    """

    def __init__(
        self,
        node: onnx.NodeProto,
        newer: int,
        older: int,
        types: Types,
        constants: Mapping[str, onnx.TensorProto],
        writers: Mapping[str, onnx.NodeProto],
        taken: set[str],
    ) -> None:
        self.node, self.newer, self.older, self.types = node, newer, older, types
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.computed: dict[str, np.ndarray] = {}
        self._constants, self._writers, self._taken = constants, writers, taken

    def __call__(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Write one node.

        Returns:
            the name of its output.
        """
        name = output or unique_name(f"{self.node.output[0]}_{op}", self._taken)
        self.nodes.append(onnx.helper.make_node(op, list(inputs), [name], name=name, **attributes))
        return name

    def keep(self, inputs: Sequence[str] | None = None, **attributes: Any) -> None:
        """Write the node itself, with other inputs or attributes; an attribute None is removed."""
        made = onnx.NodeProto()
        made.CopyFrom(self.node)
        if inputs is not None:
            del made.input[:]
            made.input.extend(inputs)
        for name, value in attributes.items():
            for attribute in [a for a in made.attribute if a.name == name]:
                made.attribute.remove(attribute)
            if value is not None:
                made.attribute.append(onnx.helper.make_attribute(name, value))
        while made.input and not made.input[-1]:
            made.input.pop()
        self.nodes.append(made)

    def add_constant(self, value: Any, hint: str, dtype: Any = np.int64) -> str:
        """Write an initializer.

        Returns:
            its name.
        """
        name = unique_name(f"{self.node.output[0]}_{hint}", self._taken)
        self.initializers.append(onnx.numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def input_name(self, index: int) -> str:
        """Return the name of an input; "" if it is omitted."""
        return self.node.input[index] if index < len(self.node.input) else ""

    def attribute(self, name: str) -> Any:
        """Return an attribute, or else its default; None if it has no default."""
        known = onnx.defs.get_schema(self.node.op_type, self.newer).attributes
        if name in known and known[name].default_value.name:
            implied = onnx.helper.get_attribute_value(known[name].default_value)
        else:
            implied = None
        return attribute_value(self.node, name, implied)

    def has_no_zero(self, name: str) -> bool:
        """Return whether no element of a shape can be 0, if every size of a tensor is 1 or more."""
        constant = self._constants.get(name)
        if constant is not None:
            return bool((onnx.numpy_helper.to_array(constant) != 0).all())
        writer = self._writers.get(name)
        if writer is None or not is_standard(writer):
            return False
        if writer.op_type in ("Concat", "Mul"):
            return all(map(self.has_no_zero, writer.input))
        return writer.op_type == "Shape" or (
            writer.op_type in _SELECTING and bool(writer.input) and self.has_no_zero(writer.input[0])
        )

    def constant(self, index: int) -> np.ndarray | None:
        """Return the value of a constant input.

        Returns:
            the value; None if the input is omitted.

        Raises:
            RefusedError: the input is not a constant.
        """
        name = self.input_name(index)
        if not name:
            return None
        try:
            value = self._evaluate_constant(name)
        except _NOT_CONSTANT as error:
            formal = onnx.defs.get_schema(self.node.op_type, self.newer).inputs[index].name
            raise self.refusal(f"its input {formal!r} is not a constant") from error
        if name not in self._constants:
            self.computed[name] = value
        return value

    def _evaluate_constant(self, name: str) -> np.ndarray:
        """Return the value of a tensor that is computed from constants alone.

        Raises:
            KeyError: it depends on data.
            UnsupportedOp, ValueError, TypeError, IndexError: a node can't be evaluated.
        """
        if name in self._constants:
            return np.asarray(onnx.numpy_helper.to_array(self._constants[name]))
        node = self._writers[name]
        values = [self._evaluate_constant(i) if i else None for i in node.input]
        made = evaluator.evaluate_node(
            node.op_type,
            [v.astype(np.float64) if v is not None and v.dtype.kind == "f" else v for v in values],
            {k: _array_of(v) for k, v in attribute_values(node).items()},
            opset=self.newer,
            domain=node.domain,
            outputs=len(node.output),
        )
        return np.asarray(made[list(node.output).index(name)])

    def rank(self, index: int) -> int:
        """Return the rank of an input.

        Raises:
            RefusedError: it is unknown.
        """
        shape = self.types[self.input_name(index)][1]
        if shape is None:
            raise self.refusal(f"the rank of {self.input_name(index)!r} is unknown")
        return len(shape)

    def elem_type(self, index: int) -> int:
        """Return the elem_type of an input.

        Raises:
            RefusedError: it is unknown.
        """
        elem_type = self.types[self.input_name(index)][0]
        if elem_type is None:
            raise self.refusal(f"the type of {self.input_name(index)!r} is unknown")
        return elem_type

    def refusal(self, reason: str) -> RefusedError:
        """Build the error for a node whose form has no equal below its adapter's opset."""
        return _refusal(self.node, self.older, reason, ADAPTERS[self.node.op_type].since)


def _array_of(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return value


def _refusal(node: onnx.NodeProto, opset: int, reason: str, since: int) -> RefusedError:
    label = node.name or next((o for o in node.output if o), "")
    return RefusedError(
        f"node {label!r} ({node.op_type}) can't be written at opset {opset}: {reason}; the lowest opset for it is"
        f" {since}"
    )


def _write_node(w: NodeWriter) -> None:
    adapter = ADAPTERS.get(w.node.op_type)
    if adapter is not None and w.older < adapter.since <= w.newer:
        adapter.write(w)
    else:
        w.keep()
    w.nodes = [_drop_implied_attributes(n, w.newer, w.older) for n in w.nodes]


def _drop_implied_attributes(node: onnx.NodeProto, newer: int, older: int) -> onnx.NodeProto:
    """Remove the attributes that the older op lacks, if they have the value that the older op implied."""
    if not _has_op(node.op_type, older):
        return node
    known = onnx.defs.get_schema(node.op_type, older).attributes
    for attribute in [a for a in node.attribute if a.name not in known]:
        if _is_implied(node.op_type, attribute, newer):
            node.attribute.remove(attribute)
    return node


def _is_implied(op: str, attribute: onnx.AttributeProto, newer: int) -> bool:
    schema = onnx.defs.get_schema(op, newer)
    if attribute.ref_attr_name or attribute.name not in schema.attributes:
        return False
    value = onnx.helper.get_attribute_value(attribute)
    default = schema.attributes[attribute.name].default_value
    if attribute.name == "dilations":
        return all(dilation == 1 for dilation in value)
    return bool(default.name) and value == onnx.helper.get_attribute_value(default)


def _is_same_form(node: onnx.NodeProto, opsets: _Opsets) -> bool:
    """Return whether a node of a function, whose types are unknown, means the same at both opsets."""
    if not is_standard(node) or not _is_newer(node, opsets):
        return True
    adapter = ADAPTERS.get(node.op_type)
    if adapter is not None and opsets.older < adapter.since <= opsets.newer:
        return False
    return not _describe_misfit(node, opsets.older, Types())


def _require_form(original: onnx.NodeProto, node: onnx.NodeProto, opsets: _Opsets, types: Types) -> None:
    """Raise RefusedError if the older opset does not define a written node."""
    reason = _describe_misfit(node, opsets.older, types)
    if reason:
        raise _refusal(original, opsets.older, reason, _lowest_opset(original, opsets.newer, types))


def _lowest_opset(node: onnx.NodeProto, opset: int, types: Types) -> int:
    """Find the lowest opset that holds a node as it is."""
    while opset > 1 and not _describe_misfit(node, opset - 1, types):
        opset -= 1
    return opset


def _describe_misfit(node: onnx.NodeProto, opset: int, types: Types) -> str:
    """Describe the first part of a node that an opset does not define; "" if there is none."""
    if not _has_op(node.op_type, opset):
        return "the opset has no such op"
    schema = onnx.defs.get_schema(node.op_type, opset)
    for attribute in node.attribute:
        value = None if attribute.ref_attr_name else onnx.helper.get_attribute_value(attribute)
        shown = value.decode() if isinstance(value, bytes) else value
        if attribute.name not in schema.attributes:
            return f"the opset has no attribute {attribute.name} (it is {shown})"
        later = _LATER_VALUES.get((node.op_type, attribute.name), {})
        if isinstance(value, bytes) and later.get(value, 0) > opset:
            return f"the opset has no {attribute.name} {shown}"
    fewest = (schema.min_input, schema.min_output)
    for names, least, most, side in (
        (node.input, fewest[0], schema.max_input, "input"),
        (node.output, fewest[1], schema.max_output, "output"),
    ):
        if not least <= len(names) <= most:
            return f"the opset allows {least} to {most} {side}s, not {len(names)}"
    known = {name: kind for name in (*node.input, *node.output) if (kind := types[name][0])}
    given, made = (onnx_type_names(names, known) for names in (node.input, node.output))
    if not schema_allows_types(node.op_type, opset, given, made):
        shown = ", ".join(dict.fromkeys(n.removeprefix("tensor(").removesuffix(")") for n in (*given, *made) if n))
        return f"the opset does not allow its types ({shown})"
    for formal, types_of_it in _types_by_parameter(schema, given, made).items():
        if len(types_of_it) > 1:
            return f"the opset needs one type for its {formal}, not {' and '.join(types_of_it)}"
    return ""


def _types_by_parameter(
    schema: onnx.defs.OpSchema, given: Sequence[str], made: Sequence[str]
) -> dict[str, dict[str, None]]:
    """Return the types that each type parameter of an op gets, such as T → "tensor(float)", in order."""
    found: dict[str, dict[str, None]] = {}
    for formals, types in ((schema.inputs, given), (schema.outputs, made)):
        for place, name in enumerate(types if formals else ()):
            formal = formals[min(place, len(formals) - 1)]
            if name and formal.is_homogeneous:
                found.setdefault(formal.type_str, {})[name.removeprefix("tensor(").removesuffix(")")] = None
    return found


# ------------------------------------------------------------------ adapters


@dataclass(frozen=True)
class Adapter:
    """Way to write an op below an opset.

    Attributes:
        since: opset from which the op has the form that is rewritten.
        write: writes the older form with a `NodeWriter`.
    """

    since: int
    write: Callable[[NodeWriter], None]


def _write_reduction(w: NodeWriter) -> None:
    """Write the axes of a reduction as an attribute."""
    axes = w.constant(1)
    if axes is not None and axes.size:
        w.keep(w.node.input[:1], axes=[int(a) for a in axes], noop_with_empty_axes=None)
    elif not w.attribute("noop_with_empty_axes"):
        w.keep(w.node.input[:1], noop_with_empty_axes=None)
    else:
        # Without axes, each element is reduced alone.
        x, y = w.node.input[0], w.node.output[0]
        if w.node.op_type == "ReduceSumSquare":
            w("Mul", x, x, output=y)
        else:
            alone = {"ReduceL1": "Abs", "ReduceL2": "Abs", "ReduceLogSum": "Log"}
            w(alone.get(w.node.op_type, "Identity"), x, output=y)


def _write_pad(w: NodeWriter) -> None:
    """Write the pads of all axes."""
    axes = w.constant(3)
    if axes is None:
        w.keep()
        return
    rank = w.rank(0)
    places = [int(a) % rank for a in axes]
    if places == list(range(rank)):
        w.keep(w.node.input[:3])
        return
    pads = w.constant(1)
    assert pads is not None
    full = np.zeros((2, rank), np.int64)
    full[:, places] = pads.reshape(2, -1)
    w.keep([w.node.input[0], w.add_constant(full.reshape(-1), "pads"), w.input_name(2)])


def _write_split(w: NodeWriter) -> None:
    """Write the sizes of the parts: of n parts, each but the last has the size ⌈size / n⌉."""
    count = w.attribute("num_outputs")
    if count is None:
        w.keep()
        return
    x = w.node.input[0]
    shape = w.types[x][1]
    size = None if shape is None else shape[w.attribute("axis")]
    if isinstance(size, int):
        part = -(-size // count)
        sizes = [part] * (count - 1) + [size - part * (count - 1)]
        if sizes[-1] == part:
            w.keep(num_outputs=None)
        elif sizes[-1] >= 0:
            w.keep([x, w.add_constant(sizes, "split")], num_outputs=None)
        else:
            raise w.refusal(f"{size} elements can't be split into {count} parts of {part}")
        return
    length = w("Gather", w("Shape", x), w.add_constant([w.attribute("axis")], "axis"))
    below, parts = w.add_constant([count - 1], "most"), w.add_constant([count], "parts")
    part = w("Div", w("Add", length, below), parts)
    last = w("Sub", length, w("Mul", part, below))
    w.keep([x, w("Concat", *[part] * (count - 1), last, axis=0)], num_outputs=None)


def _write_shape(w: NodeWriter) -> None:
    """Write a Shape of some axes as a Slice of the whole shape."""
    start, end = w.attribute("start"), w.attribute("end")
    if start == 0 and end is None:
        w.keep(start=None)
        return
    starts = w.add_constant([start], "start")
    ends = w.add_constant([_INT64_MAX if end is None else end], "end")
    w("Slice", w("Shape", w.node.input[0]), starts, ends, output=w.node.output[0])


def _write_cast_like(w: NodeWriter) -> None:
    if w.attribute("saturate") == 0 and w.elem_type(1) in _FLOATS8:
        raise w.refusal("its saturate is 0")
    w("Cast", w.node.input[0], output=w.node.output[0], to=w.elem_type(1))


def _write_triangle(w: NodeWriter) -> None:
    """Write Trilu: an element of row i and column j is kept if j − i ≥ k (upper), or j − i ≤ k (lower)."""
    x = w.node.input[0]
    shape = w("Shape", x)
    zero, one = w.add_constant(0, "zero"), w.add_constant(1, "one")
    rows, columns = (w("Range", zero, w("Gather", shape, w.add_constant(axis, "axis")), one) for axis in (-2, -1))
    offset = w.input_name(1) and w("Reshape", w.input_name(1), w.add_constant([1], "scalar"))
    below = w("Unsqueeze", rows, w.add_constant([1], "axis"))
    first = w("Add", below, offset) if offset else below
    kept = w("GreaterOrEqual" if w.attribute("upper") else "LessOrEqual", columns, first)
    nothing = w.add_constant(0, "nothing", onnx.helper.tensor_dtype_to_np_dtype(w.elem_type(0)))
    w("Where", kept, x, nothing, output=w.node.output[0])


def _write_resize(w: NodeWriter) -> None:
    """Write the scales or sizes of all axes."""
    axes = w.attribute("axes")
    inputs = [w.input_name(i) for i in range(4)]
    if axes:
        rank = w.rank(0)
        places = [int(a) % rank for a in axes]
        if places != list(range(rank)):
            if w.attribute("coordinate_transformation_mode") == b"tf_crop_and_resize":
                raise w.refusal("its roi is given for some axes only")
            scales = w.constant(2)
            if scales is not None and scales.size:
                full = np.ones(rank)
                full[places] = scales
                inputs[2] = w.add_constant(full, "scales", np.float32)
            else:
                index = w.add_constant(places, "axes")
                inputs[3] = w("ScatterElements", w("Shape", inputs[0]), index, inputs[3])
    w.keep(inputs, axes=None)


def _write_average_pool(w: NodeWriter) -> None:
    """Refuse rounded-up sizes: opset 19 leaves out windows that begin in the padding at the end."""
    if w.attribute("ceil_mode"):
        raise w.refusal("its ceil_mode 1 had another meaning")
    w.keep()


def _write_grid_sample(w: NodeWriter) -> None:
    """Write the older names of the modes."""
    if w.rank(0) != 4:
        raise w.refusal("the opset samples images only")
    modes = {b"linear": "bilinear", b"cubic": "bicubic", b"nearest": "nearest"}
    w.keep(mode=modes[w.attribute("mode")])


def _write_reshape(w: NodeWriter) -> None:
    """Drop allowzero if the shape has no 0."""
    if w.attribute("allowzero") and not w.has_no_zero(w.input_name(1)):
        raise w.refusal("its allowzero is 1, and its shape may have a 0")
    w.keep(allowzero=None)


def _write_cast(w: NodeWriter) -> None:
    """Drop saturate and round_mode, which only 8-bit floats read."""
    if w.attribute("to") in _FLOATS8:
        w.keep()
    else:
        w.keep(saturate=None, round_mode=None)


def _write_batch_norm(w: NodeWriter) -> None:
    """Write a BatchNormalization of inference; the older op computes statistics if it has more outputs."""
    if w.attribute("training_mode") or any(w.node.output[1:]):
        raise w.refusal("it computes statistics of the batch (training_mode)")
    w.keep(training_mode=None)


def _write_roi_align(w: NodeWriter) -> None:
    """Drop the mode that the older op had; it is not the newer default."""
    mode = w.attribute("coordinate_transformation_mode")
    if mode != b"output_half_pixel":
        raise w.refusal(f"its coordinate_transformation_mode is {mode.decode()}")
    w.keep(coordinate_transformation_mode=None)


def _refuse_group_norm(w: NodeWriter) -> None:
    raise w.refusal("the opset has one scale for each group")


def _refuse_transform(w: NodeWriter) -> None:
    raise w.refusal("its axis had another default and was an attribute")


ADAPTERS: Mapping[str, Adapter] = {
    **dict.fromkeys(
        (
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSum",
            "ReduceLogSumExp",
            "ReduceMax",
            "ReduceMean",
            "ReduceMin",
            "ReduceProd",
            "ReduceSumSquare",
        ),
        Adapter(18, _write_reduction),
    ),
    "AveragePool": Adapter(19, _write_average_pool),
    "BatchNormalization": Adapter(14, _write_batch_norm),
    "Cast": Adapter(19, _write_cast),
    "CastLike": Adapter(15, _write_cast_like),
    "DFT": Adapter(20, _refuse_transform),
    "GroupNormalization": Adapter(21, _refuse_group_norm),
    "GridSample": Adapter(20, _write_grid_sample),
    "Pad": Adapter(18, _write_pad),
    "Reshape": Adapter(14, _write_reshape),
    "Resize": Adapter(18, _write_resize),
    "RoiAlign": Adapter(16, _write_roi_align),
    "Shape": Adapter(15, _write_shape),
    "Split": Adapter(18, _write_split),
    "Trilu": Adapter(14, _write_triangle),
}
"""Op → opset of its newer form → how the form is written below this opset."""
