"""Choose how a certificate can state that both sides of a rewrite are equal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import onnx

from ..norms.function_bodies import norm_function_body
from ..norms.norm_table import STANDARD as STANDARD_NORMS
from ..norms.third_party import function_op_row
from ..storage.onnx_domains import is_standard
from .rewrite_records import RecordedConstant, RecordedSide, RewriteRecord

ALGEBRAIC = frozenset(
    {
        *("Add", "Concat", "Constant", "ConstantOfShape", "Conv", "ConvTranspose", "Div", "Dropout", "Einsum"),
        *("Expand", "Flatten", "Gemm", "GlobalAveragePool", "Identity", "MatMul", "Mean", "Mul", "Neg", "Pow"),
        *("Abs", "Clip", "Max", "Min"),
        *("Reciprocal", "ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare", "Reshape", "Slice", "Split", "Sqrt"),
        *("Squeeze", "Sub", "Sum", "Tile", "Transpose", "Unsqueeze", "SimplifiedLayerNormalization"),
        *(STANDARD_NORMS.keys() - {"LRN", "LpNormalization"}),
    }
)
"""Ops of floats that a checker computes exactly."""

OPAQUE = frozenset({"Sigmoid", "Tanh", "Erf", "Softplus", "HardSigmoid", "Gelu", "Swish", "Softmax"})
"""Ops that are unknown functions of their argument for a checker, and Softmax."""

# Epsilons are computed as quotients in float64.
_SOLVED = 2.0**-38
_MOST_TERMS = 2**16
# Ops on sizes in the bodies of own ops
_SIZES = frozenset({"Shape", "Size", "Gather", "Cast", "CastLike", "Range", "ReduceProd"})
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
_FLOAT_TYPES = frozenset(
    {
        onnx.TensorProto.DOUBLE,
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
    }
)


def choose_mode(record: RewriteRecord) -> tuple[str, str]:
    """Choose how the equality of both sides can be checked.

    Returns:
        "exact", "affine", "numeric" or "none", and the reason for one of the last two.
    """
    if record.before is None or record.after is None:
        return "none", record.reason
    foreign = {f"{n.proto.domain}.{n.proto.op_type}" for n in record.nodes if not _is_defined(n.proto)}
    if foreign:
        return "none", f"the format does not define {', '.join(sorted(foreign))}"
    if record.identity is None:
        return "numeric", "the rewrite was proved without a prime field"
    if record.identity.read:
        read = ", ".join(f"{number!r} as {fraction}" for number, fraction in record.identity.read)
        return "numeric", f"constants were read as the exact numbers that they approximate: {read}"
    others = set(_iter_undefined_ops(record.before, record)) | set(_iter_undefined_ops(record.after, record))
    if others:
        return "numeric", f"no exact definition: {', '.join(sorted(others))}"
    if record.expressions is not None:
        return "exact", ""
    if record.identity.parameters or record.identity.epsilons:
        return "affine", ""
    if record.has_undescribed_constants:
        return "numeric", "the format has no expressions for its constants"
    return "exact", ""


def _is_defined(node: onnx.NodeProto) -> bool:
    return is_standard(node) or function_op_row(node.domain, node.op_type) is not None


def _iter_undefined_ops(side: RecordedSide, record: RewriteRecord) -> Iterator[str]:
    """Yield the standard ops of a side that the format defines neither for exact numbers nor for integers."""
    integers = {name for name, c in side.constants.items() if _is_integer_constant(c)}
    integers |= {leaf.name for leaf in record.leaves if leaf.dtype and leaf.dtype not in _FLOATS}
    for recorded in side.nodes:
        node = recorded.proto
        on_integers = all(name in integers for name in node.input if name)
        to = next((a.i for a in node.attribute if a.name == "to"), None)
        if node.op_type in ("Shape", "Size"):
            integers.update(node.output)
        elif node.op_type in ("Cast", "CastLike"):
            is_integer_cast = to is not None and to not in _FLOAT_TYPES
            if is_integer_cast and not on_integers:
                yield node.op_type
            elif is_integer_cast:
                integers.update(node.output)
        elif on_integers and node.input and is_standard(node) and node.op_type != "ConstantOfShape":
            integers.update(node.output)
        elif node.op_type == "Clip" and node.attribute:
            # The bounds of opsets before 11 are float32 attributes, which a checker's exact numbers do not meet.
            yield node.op_type
        elif is_standard(node):
            yield from {node.op_type} - ALGEBRAIC - OPAQUE
        elif (row := function_op_row(node.domain, node.op_type)) is not None:
            body = norm_function_body(row, max(recorded.opset, row.since))
            yield from {inner.op_type for inner in body.node} - ALGEBRAIC - OPAQUE - _SIZES


def _is_integer_constant(constant: RecordedConstant) -> bool:
    return constant.value is not None and constant.value.dtype.name not in _FLOATS


def exact_epsilons(record: RewriteRecord) -> dict[str, Fraction] | None:
    """Express each epsilon after the rewrite as a small fraction of an epsilon before.

    Returns:
        exact epsilon by the name of the node's first output; None if one is not such a fraction.
    """
    assert record.before is not None
    known = {a.f for n in record.before.nodes for a in n.proto.attribute if a.name == "epsilon"}
    known |= {
        float(c.value.reshape(-1)[0])
        for c in record.before.constants.values()
        if c.value is not None and c.value.dtype.name in _FLOATS and c.value.size == 1
    }
    found: dict[str, Fraction] = {}
    for name, value in record.epsilons.items():
        tried = [
            Fraction(e) * Fraction(value / e).limit_denominator(_MOST_TERMS)
            for e in sorted(known)
            if e > 0 and math.isfinite(e)
        ]
        fits = [q for q in tried if abs(float(q) - value) <= _SOLVED * abs(value)]
        if not fits:
            return None
        found[name] = min(fits, key=lambda q: (q.denominator.bit_length() + q.numerator.bit_length(), q))
    return found
