"""NodeProtos that stand in no graph yet, evaluated by a `ProofInterpreter`; names go to values.

Beside the closed language of regions (`normdeploy.proof.op_definitions`) they may hold what is the same on both
sides and is not
looked into: rows that whole numbers pick from a table, how often a whole number is met, and the activation behind a
norm. All of these go by one lemma, that equal arguments have equal results (`normdeploy.proof.lemmas.congruence`).
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
    """A tensor of whole numbers, which are data. ``value``: they as numbers, where how often one is met is asked
    for."""

    name: str
    shape: tuple[Size, ...]
    value: Value | None = None


@dataclass(frozen=True, eq=False)
class LookupTable:
    """A tensor of which rows (along axis 0) are picked: by the name of the `IndexTensor`, or the first ones, by how
    many."""

    name: str
    picked: Mapping[str | Size, Value]

    def pick_rows(self, by: IndexTensor | Size) -> Value:
        indices = self.picked.get(by.name if isinstance(by, IndexTensor) else by)
        if indices is None:
            raise NotProved(ProofFailure.DIFFERS, f"other rows of {self.name!r} are picked", self.name)
        return indices


@dataclass(frozen=True, eq=False)
class _MatchIndicator:
    """Ones where a whole number is met, else zeros, as bool or as numbers."""

    value: Value


def match_indicator(m: ProofInterpreter, x: IndexTensor, number: int) -> Value:
    """One where ``x`` is ``number``, else zero."""
    if x.value is None:
        raise NotProved(ProofFailure.OP, f"{x.name!r} is compared", x.name)
    return apply_unknown(m, f"= {number}", x.value, lambda f: (f == number).astype(np.float64))


def leaky_relu(m: ProofInterpreter, y: Value, alpha: float) -> Value:
    """alpha·y where y < 0, else y."""
    return apply_unknown(
        m, f"LeakyRelu {alpha!r}", y, lambda f: np.where(f < 0, f * alpha, f) if alpha else np.where(f < 0, 0.0, f)
    )


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Attributes as plain values; tensors as arrays."""
    attrs = attribute_values(node)
    return {k: onnx.numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for k, v in attrs.items()}


def evaluate_protos(
    m: ProofInterpreter,
    nodes: Sequence[onnx.NodeProto],
    initializers: Sequence[onnx.TensorProto],
    given: Mapping[str, Any],
    opset: int,
) -> dict[str, Any]:
    """All tensors of ``nodes``, which are in topological order. ``given``: `Value`, `IndexTensor` and `LookupTable`
    by name.

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
            results = apply_op(m, node.op_type, inputs, attributes_of(node), opset, len(node.output))
        except NotProved as e:
            e.culprit = e.culprit or node.output[0]
            raise
        except FAILURES as e:
            raise NotProved(
                ProofFailure.OP, f"{node.op_type} can't be followed: {type(e).__name__}: {e}", node.output[0]
            ) from e
        env.update(zip(node.output, results, strict=False))
    return env


def apply_op(
    m: ProofInterpreter, op: str, inputs: list[Any], attrs: Mapping[str, Any], opset: int, outputs: int
) -> tuple[Any, ...]:
    """The outputs of a standard op.

    Raises:
        NotProved: the op is outside of the language, or a premise does not hold.
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
    raise NotProved(ProofFailure.OP, f"{op} of whole numbers that are data is no algebra", op)
