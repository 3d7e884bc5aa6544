"""What a trial changes, the cause that it would show, and the nodes in whose place something else is tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import onnx

from ...precision.preparation import file_opset
from ...runtimes.float64_evaluator import Float64Evaluator, NodeChange
from ...storage.onnx_domains import is_standard
from ...types import Array, Arrays
from .counterpart_search import FaultSpot
from .folded_norms import FoldedTensor
from .reference_program import ReferenceProgram

Edit = Callable[[Array], Array]
_NO_PLAIN_VALUES = (onnx.AttributeProto.TENSOR, onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


@dataclass(frozen=True)
class Cause:
    """``kind``: "weights" | "epsilon" | "axis" | "ddof" | "left out" | "approximation" | "training mode" | "hidden row"
    | "overflow" | "underflow" | "factor" | "accuracy" | "optimizer" | "precision" | "added" | "preprocessing" |
    "stale weights" | "state" | "constant" | "order" | "input" | "attribute" | "body" | "number" | "operator" |
    "unknown". ``text`` says what was found; ``place``: the node's, None if it may be one of several; ``instead``: the
    tensor that replaces the node's result; ``held``: tensors of the file with their right values, where the change is
    that all their readers get these."""

    kind: str
    text: str
    place: int | None = None
    instead: str = ""
    held: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """A trial change of a file, and the cause it would confirm."""

    cause: Cause
    change: NodeChange


@dataclass(frozen=True)
class TrialSpot:
    """A spot of a file, and what is known there.

    ``values``: of all that the spot reads and makes, as the file has them.
    """

    exact: Float64Evaluator
    values: Arrays
    spot: FaultSpot
    program: ReferenceProgram

    def node_at(self, place: int) -> TrialNode:
        """Return one node of the file."""
        return TrialNode(self, place)

    @cached_property
    def nodes(self) -> list[TrialNode]:
        """The nodes of the spot."""
        return [self.node_at(place) for place in self.spot.places]

    @property
    def operators(self) -> Sequence[str]:
        """The model's operators that the spot stands for."""
        return self.spot.operators

    @cached_property
    def numbers(self) -> list[float]:
        """The model's single numbers that belong here, epsilons among them."""
        return self.program.scalars_of(self.operators)

    @cached_property
    def parameters(self) -> dict[str, Array]:
        """The model's parameters that belong here, in float64."""
        return self.program.parameters_of(self.operators)

    @cached_property
    def folds(self) -> dict[str, FoldedTensor]:
        """The same with BatchNorms folded in."""
        return self.program.folded_parameters(self.operators)

    @cached_property
    def weights(self) -> dict[str, Array]:
        """The model's parameters, as they are and folded."""
        return {**self.parameters, **{name: fold.right for name, fold in self.folds.items()}}


@dataclass(frozen=True)
class TrialNode:
    """One node of a file, in whose place something else is tried; as text: "Op 'name'"."""

    around: TrialSpot
    place: int

    def __str__(self) -> str:
        return node_at_text(self.exact, self.place)

    @property
    def exact(self) -> Float64Evaluator:
        return self.around.exact

    @property
    def node(self) -> onnx.NodeProto:
        return self.exact.nodes[self.place]

    @property
    def op(self) -> str:
        return self.node.op_type

    def is_standard(self, *ops: str) -> bool:
        """Return whether the node is one of ONNX's own ops ``ops``; of any of them if none is given."""
        return is_standard(self.node) and (not ops or self.op in ops)

    def name_of_input(self, i: int) -> str:
        """Return the tensor that the node reads, "" if none."""
        if i < len(self.node.input):
            return self.node.input[i]
        return ""

    def input_value(self, i: int) -> Array | None:
        """Return the value that the node reads, None if it is constant or unknown."""
        return self.around.values.get(self.name_of_input(i))

    def fixed_input(self, i: int, kinds: str) -> Array | None:
        """Return a constant that the node reads, None where it is none of these kinds of dtypes."""
        return self.exact.fixed_value(self.name_of_input(i), kinds)

    @property
    def output_value(self) -> Array | None:
        return self.around.values.get(self.node.output[0])

    @cached_property
    def attributes(self) -> dict[str, object]:
        """The node's attributes but tensors and bodies, with the defaults of its opset where none is stated."""
        return attributes_with_defaults(self.exact, self.node)

    def stated_axis(self, default: int) -> int:
        """Return the attribute ``axis``, or ``default`` if the node has none."""
        return next((a.i for a in self.node.attribute if a.name == "axis"), default)

    def as_node(self, kind: str, text: str, node: onnx.NodeProto, *, instead: str = "") -> Trial:
        """Try another node."""
        return Trial(Cause(kind, text, self.place, instead), NodeChange(nodes={self.place: node}))

    def with_inputs(self, kind: str, text: str, inputs: Mapping[int, Array | Edit]) -> Trial:
        """Try other values for some inputs, or a function of them."""
        edits = {(self.place, i): _as_edit(value) for i, value in inputs.items()}
        return Trial(Cause(kind, text, self.place), NodeChange(inputs=edits))

    def with_setting(self, kind: str, name: str, own: object, other: object) -> Trial:
        """Try another value of one attribute."""
        return self.as_node(kind, self.describe_other(name, own, other), with_attributes(self.node, {name: other}))

    def describe_other(self, what: str, own: object, other: object) -> str:
        """Say that something of the node is right if it is another."""
        return f"{self} has {what} {own}, with {other} it is right"


def _as_edit(value: Array | Edit) -> Edit:
    if callable(value):
        return value
    return replace_by(value)


def replace_by(value: Array) -> Edit:
    return lambda _: value


def node_at_text(exact: Float64Evaluator, place: int) -> str:
    node = exact.nodes[place]
    if node.name:
        return f"{node.op_type} {node.name!r}"
    return node.op_type


def copy_node(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a copy that can be changed."""
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    return changed


def with_attributes(node: onnx.NodeProto, attributes: Mapping[str, object]) -> onnx.NodeProto:
    """Return a node with some attributes set to other values."""
    changed = copy_node(node)
    del changed.attribute[:]
    changed.attribute.extend(a for a in node.attribute if a.name not in attributes)
    changed.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
    return changed


def attributes_with_defaults(exact: Float64Evaluator, node: onnx.NodeProto) -> dict[str, object]:
    """Return a node's attributes but tensors and bodies, with the defaults of its opset where none is stated."""
    values: dict[str, object] = {}
    if is_standard(node) and onnx.defs.has(node.op_type):
        try:
            schema = onnx.defs.get_schema(node.op_type, file_opset(exact.proto), "")
        except onnx.defs.SchemaError:
            schema = onnx.defs.get_schema(node.op_type)
        defaults = [a.default_value for a in schema.attributes.values() if a.default_value.type]
        values = {a.name: _attribute_value(a) for a in defaults}
    return values | {a.name: _attribute_value(a) for a in node.attribute if a.type not in _NO_PLAIN_VALUES}


def _attribute_value(attribute: onnx.AttributeProto) -> object:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return value
