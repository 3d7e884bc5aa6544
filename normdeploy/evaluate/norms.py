"""Norm ops on float64 arrays, by their definitions (`normdeploy.norms.definitions`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ..norms.definitions import Definition, Interpreter, Normal
from ..norms.ops import ROWS, NormOp, Owner
from .core import Array, Attrs, Function, Inputs, Result, Table, Unsupported
from .pointwise import FUNCTIONS
from .reductions import mean


class Arrays(Interpreter):
    """Computes with float64 arrays. A rounding Cast is an identity."""

    def __init__(self, opset: int, outputs: int) -> None:
        self.opset = opset
        self.outputs = outputs

    def __call__(self, op: str, *inputs: Any, **attributes: Any) -> Array:
        made: Array = FUNCTIONS[op](*inputs)
        return made

    def reduce(self, op: str, x: Array, axes: Sequence[int], **attributes: Any) -> Array:
        assert op == "ReduceMean"
        return mean(x, tuple(axes))

    def refuse(self, reason: str) -> NoReturn:
        raise Unsupported(reason)

    def rank(self, x: Array) -> int:
        return x.ndim

    def number(self, value: float, like: Array) -> float:
        return value

    def group(self, x: Array, groups: int) -> Array:
        channels = x.shape[1]
        if channels % groups:
            raise ValueError(
                f"GroupNormalization of {channels} channels in {groups} groups: the groups must divide the channels"
            )
        return x.reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)

    def reshape_like(self, y: Array, x: Array) -> Array:
        return y.reshape(x.shape)

    def per_channel(self, v: Array, x: Array) -> Array:
        """Reshape to (1, C, 1, …); ValueError where it does not have C elements.

        A vector x has one channel (https://onnx.ai/onnx/operators/onnx__BatchNormalization.html, Inputs).
        """
        if x.ndim == 1:
            return v.reshape(1)
        return v.reshape((1, x.shape[1]) + (1,) * (x.ndim - 2))

    def per_group(self, v: Array, groups: int) -> Array:
        if len(v) != groups:
            raise ValueError(f"GroupNormalization 18 has one scale and bias a group: {groups}, not {len(v)}")
        return v.reshape(groups, 1)

    def standardize(self, x: Array, axes: Sequence[int], epsilon: float, centered: bool = True) -> Normal:
        """As `Interpreter.standardize`, to which tests/evaluate/test_norms.py compares it.

        Most of the time of a norm is spent here. Scaling in place by one reciprocal a row saves a fifth of it.
        """
        axes = tuple(axes)
        n = math.prod([x.shape[axis] for axis in axes])
        center = np.add.reduce(x, axis=axes, keepdims=True) / n if centered else None
        d = x - center if centered else x
        deviation = np.sqrt(np.add.reduce(d * d, axis=axes, keepdims=True) / n + epsilon)
        inverse = 1.0 / deviation
        value = np.multiply(d, inverse, out=d if centered else None)
        return Normal(value, center, deviation)


def _evaluated(definition: Definition) -> Function:
    def evaluate(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
        made: Result = definition(Arrays(opset, outputs), *inputs, **attrs)
        return made

    return evaluate


def _is_evaluated(row: NormOp) -> bool:
    """Whether values are looked at through a node of the op: the standard's, and onnxruntime's layer norms of X. Its
    other ops, and TensorRT's, are only read back into standard ones (`normdeploy.contrib`)."""
    if row.definition is None:
        return False
    return row.owner is Owner.ONNX or (row.owner is Owner.ONNXRUNTIME and row.kind != "GroupNorm" and "X" in row.inputs)


TABLE: Table = {
    (domain, row.op): _evaluated(row.definition)
    for row in ROWS
    if row.definition is not None and _is_evaluated(row)
    for domain in row.domains
}
