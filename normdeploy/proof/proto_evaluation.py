"""Evaluate NodeProtos that are not in a graph yet with a `ProofInterpreter`.

The nodes may hold the ops of `normdeploy.proof.op_definitions`. They may also hold three opaque functions, if both
sides contain them: rows of a table picked by integers, the number of occurrences of an integer, and the activation
after a norm. One lemma admits all three: equal arguments have equal results (`normdeploy.proof.lemmas.congruence`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ..graphs.symbolic_sizes import Size
from ..storage.proto_traversal import attribute_values
from .interpreter import ProofInterpreter
from .lemmas.congruence import apply_unknown
from .op_definitions import broadcast_to_sizes
from .proof_errors import NotProved, ProofFailure
from .region_evaluation import FAILURES, apply_op_of_domain
from .value import Value


@dataclass(frozen=True, eq=False)
class IndexTensor:
    """Tensor of integers that are input data, not shapes or axes.

    Attributes:
        name: name of the tensor.
        shape: its shape.
        value: the integers as a value of the proof if a node counts their occurrences; None otherwise.
    """

    name: str
    shape: tuple[Size, ...]
    value: Value | None = None


@dataclass(frozen=True, eq=False)
class LookupTable:
    """Tensor from which nodes pick rows along axis 0.

    Attributes:
        name: name of the tensor.
        picked: values of the picked rows. The key is the name of the `IndexTensor`, or n for the first n rows.
    """

    name: str
    picked: Mapping[str | Size, Value]

    def pick_rows(self, by: IndexTensor | Size) -> Value:
        """Look up the rows that an index tensor picks, or the first ``by`` rows.

        Returns:
            the value of the rows.

        Raises:
            NotProved: ``picked`` has no rows for ``by``.
        """
        indices = self.picked.get(by.name if isinstance(by, IndexTensor) else by)
        if indices is None:
            raise NotProved(ProofFailure.DIFFERS, f"other rows of {self.name!r} are selected", self.name)
        return indices


@dataclass(frozen=True, eq=False)
class _MatchIndicator:
    """Tensor with 1 at the places of one integer and 0 elsewhere, as bool or as numbers."""

    value: Value


def match_indicator(m: ProofInterpreter, x: IndexTensor, number: int) -> Value:
    """Compare ``x`` with ``number``.

    Returns:
        1 at the places equal to ``number``, else 0.

    Raises:
        NotProved: the integers of ``x`` have no value in the proof.
    """
    if x.value is None:
        raise NotProved(ProofFailure.OP, f"{x.name!r} is compared with a number", x.name)
    return apply_unknown(m, f"= {number}", x.value, lambda f: (f == number).astype(np.float64))


def leaky_relu(m: ProofInterpreter, y: Value, alpha: float) -> Value:
    """Compute alpha·y for y < 0, else y.

    Returns:
        the result, as an opaque function of ``y``.
    """
    return apply_unknown(
        m, f"LeakyRelu {alpha!r}", y, lambda f: np.where(f < 0, f * alpha, f) if alpha else np.where(f < 0, 0.0, f)
    )


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Read the attributes of a node as plain values.

    Returns:
        values by name; tensors as arrays.
    """
    attrs = attribute_values(node)
    return {k: onnx.numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for k, v in attrs.items()}


def evaluate_protos(
    m: ProofInterpreter,
    nodes: Sequence[onnx.NodeProto],
    initializers: Sequence[onnx.TensorProto],
    given: Mapping[str, Any],
    opset: int,
) -> dict[str, Any]:
    """Evaluate ``nodes``, which are in topological order.

    Args:
        given: inputs by name: each a `Value`, an `IndexTensor` or a `LookupTable`.

    Returns:
        all tensors by name, including ``given`` and ``initializers``.

    Raises:
        NotProved: an op is not supported, or a premise does not hold.
    """
    env = dict(given)
    for tensor in initializers:
        array = onnx.numpy_helper.to_array(tensor)
        env[tensor.name] = array if array.dtype.kind in "iub" else m.constant(array.astype(np.float64))
    for node in nodes:
        try:
            inputs = [env[name] if name else None for name in node.input]
            results = apply_op(m, node.op_type, inputs, attributes_of(node), opset, len(node.output))
        except NotProved as e:
            e.culprit = e.culprit or node.output[0]
            raise
        except FAILURES as e:
            raise NotProved(
                ProofFailure.OP, f"{node.op_type} can't be evaluated: {type(e).__name__}: {e}", node.output[0]
            ) from e
        env.update(zip(node.output, results, strict=False))
    return env


def apply_op(
    m: ProofInterpreter, op: str, inputs: list[Any], attrs: Mapping[str, Any], opset: int, outputs: int
) -> tuple[Any, ...]:
    """Evaluate a standard op.

    Returns:
        its outputs.

    Raises:
        NotProved: the op is outside the language, or a premise does not hold.
    """
    if op == "Shape" and isinstance(inputs[0], (IndexTensor, Value)):
        return apply_op_of_domain(m, op, "", inputs, attrs, opset, 1)
    if any(isinstance(x, (IndexTensor, LookupTable, _MatchIndicator)) for x in inputs):
        return (_evaluate_with_indices(m, op, inputs, attrs),)
    if op in ("Relu", "LeakyRelu"):
        return (leaky_relu(m, inputs[0], float(attrs.get("alpha", 0.01)) if op == "LeakyRelu" else 0.0),)
    return apply_op_of_domain(m, op, "", inputs, attrs, opset, outputs)


def _evaluate_with_indices(m: ProofInterpreter, op: str, inputs: list[Any], attrs: Mapping[str, Any]) -> Any:
    match (op, inputs):
        case ("Gather", [LookupTable() as table, IndexTensor() as ids]) if attrs.get("axis", 0) == 0:
            return table.pick_rows(ids)
        case ("Slice", [LookupTable() as table, starts, ends, axes]) if starts.tolist() == [0] and axes.tolist() == [0]:
            return table.pick_rows(Size.from_int(ends.reshape(-1)[0]))
        case ("Equal", [IndexTensor() as x, np.ndarray() as number]) if number.size == 1:
            return _MatchIndicator(match_indicator(m, x, int(number.reshape(-1)[0])))
        case ("Cast", [_MatchIndicator() as x]) if attrs["to"] == onnx.TensorProto.INT32:
            return x.value
        case ("Sub", [IndexTensor() as x, IndexTensor() as y]) if x is y:
            return broadcast_to_sizes(m, m.number(0), x.shape)
    raise NotProved(ProofFailure.OP, f"{op} on integer data is not algebraic", op)
