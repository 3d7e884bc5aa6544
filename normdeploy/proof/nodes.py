"""NodeProtos that stand in no graph yet, evaluated by a `Machine`; names go to values.

Beside the closed language of regions (`normdeploy.proof.ops`) they may hold what is the same on both sides and is not
looked into: rows that whole numbers pick from a table, how often a whole number is met, and the activation behind a
norm. All of these go by one lemma, that equal arguments have equal results (`normdeploy.proof.lemmas.congruence`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ..graphs.sizes import Size
from .errors import NotProved, Why
from .lemmas.congruence import unknown
from .machine import Machine
from .ops import expanded
from .run import FAILURES, apply
from .value import Value


@dataclass(frozen=True, eq=False)
class Indices:
    """A tensor of whole numbers, which are data. ``value``: they as numbers, where how often one is met is asked
    for."""

    name: str
    shape: tuple[Size, ...]
    value: Value | None = None


@dataclass(frozen=True, eq=False)
class Table:
    """A tensor of which rows (along axis 0) are picked: by the name of the `Indices`, or the first ones, by how
    many."""

    name: str
    picked: Mapping[str | Size, Value]

    def rows(self, by: Indices | Size) -> Value:
        indices = self.picked.get(by.name if isinstance(by, Indices) else by)
        if indices is None:
            raise NotProved(Why.DIFFERS, f"other rows of {self.name!r} are picked", self.name)
        return indices


@dataclass(frozen=True, eq=False)
class _Met:
    """Ones where a whole number is met, else zeros, as bool or as numbers."""

    value: Value


def met(m: Machine, x: Indices, number: int) -> Value:
    """One where ``x`` is ``number``, else zero."""
    if x.value is None:
        raise NotProved(Why.OP, f"{x.name!r} is compared", x.name)
    return unknown(m, f"= {number}", x.value, lambda f: (f == number).astype(np.float64))


def leaky(m: Machine, y: Value, alpha: float) -> Value:
    """alpha·y where y < 0, else y."""
    return unknown(
        m, f"LeakyRelu {alpha!r}", y, lambda f: np.where(f < 0, f * alpha, f) if alpha else np.where(f < 0, 0.0, f)
    )


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Attributes as plain values; tensors as arrays."""
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {k: onnx.numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for k, v in attrs.items()}


def run_protos(
    m: Machine,
    nodes: Sequence[onnx.NodeProto],
    initializers: Sequence[onnx.TensorProto],
    given: Mapping[str, Any],
    opset: int,
) -> dict[str, Any]:
    """All tensors of ``nodes``, which are in topological order. ``given``: `Value`, `Indices` and `Table` by name.

    Raises:
        NotProved: an op is outside of the language, or a premise does not hold.
    """
    env = dict(given)
    for tensor in initializers:
        array = onnx.numpy_helper.to_array(tensor)
        env[tensor.name] = array if array.dtype.kind in "iub" else m.constant(array.astype(np.float64))
    for node in nodes:
        try:
            inputs = [env[name] if name else None for name in node.input]
            results = apply_op(m, node.op_type, inputs, attributes(node), opset, len(node.output))
        except NotProved as e:
            e.culprit = e.culprit or node.output[0]
            raise
        except FAILURES as e:
            raise NotProved(Why.OP, f"{node.op_type} can't be followed: {type(e).__name__}: {e}", node.output[0]) from e
        env.update(zip(node.output, results, strict=False))
    return env


def apply_op(
    m: Machine, op: str, inputs: list[Any], attrs: Mapping[str, Any], opset: int, outputs: int
) -> tuple[Any, ...]:
    """The outputs of a standard op.

    Raises:
        NotProved: the op is outside of the language, or a premise does not hold.
    """
    if op == "Shape" and isinstance(inputs[0], (Indices, Value)):
        return apply(m, op, "", inputs, attrs, opset, 1)
    if any(isinstance(x, (Indices, Table, _Met)) for x in inputs):
        return (_with_whole_numbers(m, op, inputs, attrs),)
    if op in ("Relu", "LeakyRelu"):
        return (leaky(m, inputs[0], float(attrs.get("alpha", 0.01)) if op == "LeakyRelu" else 0.0),)
    return apply(m, op, "", inputs, attrs, opset, outputs)


def _with_whole_numbers(m: Machine, op: str, inputs: list[Any], attrs: Mapping[str, Any]) -> Any:
    match (op, inputs):
        case ("Gather", [Table() as table, Indices() as ids]) if attrs.get("axis", 0) == 0:
            return table.rows(ids)
        case ("Slice", [Table() as table, starts, ends, axes]) if starts.tolist() == [0] and axes.tolist() == [0]:
            return table.rows(Size.of(ends.reshape(-1)[0]))
        case ("Equal", [Indices() as x, np.ndarray() as number]) if number.size == 1:
            return _Met(met(m, x, int(number.reshape(-1)[0])))
        case ("Cast", [_Met() as x]) if attrs["to"] == onnx.TensorProto.INT32:
            return x.value
        case ("Sub", [Indices() as x, Indices() as y]) if x is y:
            return expanded(m, m.number(0), x.shape)
    raise NotProved(Why.OP, f"{op} of whole numbers that are data is no algebra", op)
