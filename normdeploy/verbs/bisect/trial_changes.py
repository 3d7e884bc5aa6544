"""Define trials. A trial is a change of a file, with the cause of the fault if the change makes the file right.

A spot is the group of nodes at a fault; its end is the tensor that these nodes compute wrongly.
"""

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
    """Likely cause of a fault.

    Attributes:
        kind: kind of the mistake. In numbers: "weights", "stale weights", "constant", "number", "epsilon", "state". In
            nodes: "axis", "ddof", "left out", "approximation", "training mode", "hidden row", "added", "order",
            "input", "attribute", "body", "operator", "precision". In the whole result: "factor", "preprocessing". In a
            runtime: "overflow", "underflow", "accuracy", "optimizer". In a quantized file: "scale", "zero point",
            "channels", "granularity", "saturation", "coarse". If nothing explains the fault: "unknown".
        text: description of the mistake for the user.
        place: index of the node at fault; None if it may be one of several nodes.
        instead: the tensor that replaces the result of the node.
        held: right values of tensors of the file, if the change gives these values to all nodes that read them.
    """

    kind: str
    text: str
    place: int | None = None
    instead: str = ""
    held: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """Change of a file to try, and the cause of the fault if the change makes the file right."""

    cause: Cause
    change: NodeChange


@dataclass(frozen=True)
class TrialSpot:
    """Spot of a file, with the values of its tensors.

    Attributes:
        values: all tensors that the spot reads and computes, with the file's values.
    """

    exact: Float64Evaluator
    values: Arrays
    spot: FaultSpot
    program: ReferenceProgram

    def node_at(self, place: int) -> TrialNode:
        """Wrap one node of the file.

        Returns:
            The node at ``place``.
        """
        return TrialNode(self, place)

    @cached_property
    def nodes(self) -> list[TrialNode]:
        """Return the nodes of the spot."""
        return [self.node_at(place) for place in self.spot.places]

    @property
    def operators(self) -> Sequence[str]:
        """Return the model's operators that the spot computes."""
        return self.spot.operators

    @cached_property
    def numbers(self) -> list[float]:
        """Return the single numbers that the spot's operators read, such as epsilons."""
        return self.program.scalars_of(self.operators)

    @cached_property
    def parameters(self) -> dict[str, Array]:
        """Return the parameters that the spot's operators read, in float64."""
        return self.program.parameters_of(self.operators)

    @cached_property
    def folds(self) -> dict[str, FoldedTensor]:
        """Return the parameters that the spot's operators read, with BatchNorms folded in."""
        return self.program.folded_parameters(self.operators)

    @cached_property
    def weights(self) -> dict[str, Array]:
        """Return the parameters that the spot's operators read, both unchanged and folded."""
        return {**self.parameters, **{name: fold.right for name, fold in self.folds.items()}}


@dataclass(frozen=True)
class TrialNode:
    """Node of a file that a trial replaces. Its text is "Op 'name'"."""

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
        """Check that the node is a standard op, and one of ``ops`` if any are given.

        Returns:
            False for other ops and for ops of other domains.
        """
        return is_standard(self.node) and (not ops or self.op in ops)

    def name_of_input(self, i: int) -> str:
        """Return the name of the node's input ``i``.

        Returns:
            The name; "" if the node has no such input.
        """
        if i < len(self.node.input):
            return self.node.input[i]
        return ""

    def input_value(self, i: int) -> Array | None:
        """Return the value of the node's input ``i``.

        Returns:
            An array; None if the input is constant or unknown.
        """
        return self.around.values.get(self.name_of_input(i))

    def fixed_input(self, i: int, kinds: str) -> Array | None:
        """Return a constant that the node reads as input ``i``.

        Args:
            kinds: numpy's kinds of dtypes, such as "f" or "iub".

        Returns:
            An array; None if the input is not constant or of another kind.
        """
        return self.exact.fixed_value(self.name_of_input(i), kinds)

    @property
    def output_value(self) -> Array | None:
        """Return the file's value of the node's first output, None if unknown."""
        return self.around.values.get(self.node.output[0])

    @cached_property
    def attributes(self) -> dict[str, object]:
        """Return the node's attributes except tensors and bodies. Missing attributes have the defaults of the opset."""
        return attributes_with_defaults(self.exact, self.node)

    def stated_axis(self, default: int) -> int:
        """Return the attribute ``axis``.

        Returns:
            The axis; ``default`` if the node does not have the attribute.
        """
        return next((a.i for a in self.node.attribute if a.name == "axis"), default)

    def as_node(self, kind: str, text: str, node: onnx.NodeProto, *, instead: str = "") -> Trial:
        """Try another node in place of this node.

        Returns:
            A trial that replaces the node.
        """
        return Trial(Cause(kind, text, self.place, instead), NodeChange(nodes={self.place: node}))

    def with_inputs(self, kind: str, text: str, inputs: Mapping[int, Array | Edit]) -> Trial:
        """Try other values for some inputs, or functions that compute the values from the present ones.

        Returns:
            A trial that changes the inputs.
        """
        edits = {(self.place, i): _as_edit(value) for i, value in inputs.items()}
        return Trial(Cause(kind, text, self.place), NodeChange(inputs=edits))

    def with_setting(self, kind: str, name: str, own: object, other: object) -> Trial:
        """Try another value of one attribute.

        Returns:
            A trial that replaces the node.
        """
        return self.as_node(kind, self.describe_other(name, own, other), with_attributes(self.node, {name: other}))

    def describe_other(self, what: str, own: object, other: object) -> str:
        """Describe that the result is correct with another value.

        Returns:
            One sentence, such as "Softmax 'a' has axis 1; with 2 the result is correct".
        """
        return f"{self} has {what} {own}; with {other} the result is correct"


def _as_edit(value: Array | Edit) -> Edit:
    if callable(value):
        return value
    return replace_by(value)


def replace_by(value: Array) -> Edit:
    """Make a function that returns ``value`` for any input.

    Returns:
        The function.
    """
    return lambda _: value


def node_at_text(exact: Float64Evaluator, place: int) -> str:
    """Describe a node for a message.

    Returns:
        Op and name, such as "Conv 'stem'", or only the op.
    """
    node = exact.nodes[place]
    if node.name:
        return f"{node.op_type} {node.name!r}"
    return node.op_type


def copy_node(node: onnx.NodeProto) -> onnx.NodeProto:
    """Copy a node.

    Returns:
        A copy that can be changed.
    """
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    return changed


def with_attributes(node: onnx.NodeProto, attributes: Mapping[str, object]) -> onnx.NodeProto:
    """Set some attributes of a node to other values.

    Returns:
        A changed copy.
    """
    changed = copy_node(node)
    del changed.attribute[:]
    changed.attribute.extend(a for a in node.attribute if a.name not in attributes)
    changed.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
    return changed


def attributes_with_defaults(exact: Float64Evaluator, node: onnx.NodeProto) -> dict[str, object]:
    """Read a node's attributes, except tensors and bodies.

    Returns:
        Name -> value. Missing attributes have the defaults of the file's opset.
    """
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
