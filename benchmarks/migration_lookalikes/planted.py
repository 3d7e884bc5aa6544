"""Plant faults that a judge of migrations must see. A short migrator that looks only at shapes is right for plain
graphs; each of `FAULTS` makes it wrong in one way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

NORMS = ("LayerNormalization", "RMSNormalization")


@dataclass
class _Plain:
    """Graph whose norm has a stored γ of [C] and feeds MatMuls with stored weights, each followed by an Add."""

    proto: onnx.ModelProto

    def __post_init__(self) -> None:
        graph = self.proto.graph
        self.norm = next(n for n in graph.node if n.op_type in NORMS)
        self.linears = [n for n in graph.node if n.op_type == "MatMul" and n.input[0] == self.norm.output[0]]
        self.stored = {t.name: t for t in graph.initializer}
        self.gamma = self.read(self.norm.input[1])
        self.beta = self.read(self.norm.input[2]) if len(self.norm.input) > 2 else np.zeros_like(self.gamma)

    def read(self, name: str) -> np.ndarray:
        """Read a stored tensor.

        Returns:
            float64.
        """
        return numpy_helper.to_array(self.stored[name]).astype(np.float64)

    def store(self, name: str, value: np.ndarray) -> None:
        """Replace a stored tensor."""
        self.stored[name].CopyFrom(numpy_helper.from_array(value.astype(np.float32), name))

    def bias_of(self, linear: onnx.NodeProto) -> str:
        """Find the bias of a linear layer.

        Returns:
            its name.
        """
        add = next(n for n in self.proto.graph.node if n.op_type == "Add" and linear.output[0] in n.input)
        return next(i for i in add.input if i != linear.output[0])


def right(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Move γ and β of a plain graph into its MatMuls.

    Returns:
        the changed copy.
    """
    plain = _Plain(onnx.ModelProto.FromString(proto.SerializeToString()))
    for linear in plain.linears:
        weight = plain.read(linear.input[1])
        bias = plain.bias_of(linear)
        plain.store(bias, plain.read(bias) + plain.beta @ weight)
        plain.store(linear.input[1], plain.gamma[:, None] * weight)
    plain.store(plain.norm.input[1], np.ones_like(plain.gamma))
    if len(plain.norm.input) > 2:
        plain.store(plain.norm.input[2], np.zeros_like(plain.beta))
    return plain.proto


def _with(change: Callable[[_Plain, _Plain], None]) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    """Return a migrator that applies `right` and then ``change(before, after)``."""

    def faulty(proto: onnx.ModelProto) -> onnx.ModelProto:
        """Migrate wrongly.

        Returns:
            the changed copy.
        """
        before, after = _Plain(proto), _Plain(right(proto))
        change(before, after)
        return after.proto

    return faulty


def _last(plain: _Plain) -> str:
    return plain.linears[-1].input[1]


def _no_beta(before: _Plain, after: _Plain) -> None:
    bias = after.bias_of(after.linears[-1])
    after.store(bias, before.read(bias))


def _twice(before: _Plain, after: _Plain) -> None:
    after.store(after.norm.input[1], before.gamma)


def _wrong_axis(before: _Plain, after: _Plain) -> None:
    after.store(_last(after), before.read(_last(before)) * before.gamma)


def _one_missed(before: _Plain, after: _Plain) -> None:
    after.store(_last(after), before.read(_last(before)))


def _epsilon(before: _Plain, after: _Plain) -> None:
    next(a for a in after.norm.attribute if a.name == "epsilon").f = 1.1e-3


def _half(before: _Plain, after: _Plain) -> None:
    after.store(_last(after), after.read(_last(after)).astype(np.float16) * np.float32(1 + 2e-4))


def _one_weight(before: _Plain, after: _Plain) -> None:
    weight = after.read(_last(after))
    weight[-1, -1] += 1e-4 * np.abs(weight).max()
    after.store(_last(after), weight)


def _inverted(before: _Plain, after: _Plain) -> None:
    after.store(_last(after), before.read(_last(before)) / before.gamma[:, None])


def _beta_before_gamma(before: _Plain, after: _Plain) -> None:
    bias = after.bias_of(after.linears[-1])
    after.store(bias, before.read(bias) + (before.beta * before.gamma + 0.5) @ before.read(_last(before)))


def _centred(before: _Plain, after: _Plain) -> None:
    """Replace RMSNormalization by LayerNormalization, and vice versa."""
    after.norm.op_type = NORMS[after.norm.op_type == NORMS[0]]
    if after.norm.op_type == "RMSNormalization":
        del after.norm.input[2:]


def _outputs(before: _Plain, after: _Plain) -> None:
    after.proto.graph.output[0].name = after.norm.output[0]


def _renamed(before: _Plain, after: _Plain) -> None:
    after.proto.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE


def _dropped(before: _Plain, after: _Plain) -> None:
    """Remove the norm, so that a node reads a missing tensor."""
    after.proto.graph.node.remove(after.norm)


def _added(before: _Plain, after: _Plain) -> None:
    """Add a second shift to the norm's result."""
    name = after.norm.output[0]
    after.norm.output[0] = "inner"
    after.proto.graph.initializer.append(numpy_helper.from_array(np.float32(1e-3), "more"))
    place = [*after.proto.graph.node].index(after.norm) + 1
    after.proto.graph.node.insert(place, helper.make_node("Add", ["inner", "more"], [name]))


FAULTS: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "β is lost": _with(_no_beta),
    "γ is applied twice": _with(_twice),
    "γ along the outputs": _with(_wrong_axis),
    "one layer is forgotten": _with(_one_missed),
    "ε is changed by a tenth": _with(_epsilon),
    "weights are rounded to float16": _with(_half),
    "one weight is off by 1e-4": _with(_one_weight),
    "divided by γ": _with(_inverted),
    "β before γ": _with(_beta_before_gamma),
    "another norm": _with(_centred),
    "another output": _with(_outputs),
    "another type of input": _with(_renamed),
    "a node is dropped": _with(_dropped),
    "a shift is added": _with(_added),
}
