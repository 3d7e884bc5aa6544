"""What a trial changes, the cause that it would show, and how nodes and constants are read for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx

from ...runtimes.float64_evaluator import Array, Float64Evaluator, NotEvaluated, Values

Edit = Callable[[Array], Array]


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
    held: Values = field(default_factory=dict)


def replace_by(value: Array) -> Edit:
    return lambda _: value


def node_at_text(exact: Float64Evaluator, place: int) -> str:
    node = exact.nodes[place]
    if node.name:
        return f"{node.op_type} {node.name!r}"
    return node.op_type


def float_constant(exact: Float64Evaluator, name: str) -> Array | None:
    try:
        value = exact.tensor_value(name, {}) if name in exact.constants else None
    except NotEvaluated:
        return None
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value
    return None


def with_attribute(node: onnx.NodeProto, name: str, value: object) -> onnx.NodeProto:
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    kept = [a for a in changed.attribute if a.name != name]
    del changed.attribute[:]
    changed.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])
    return changed
