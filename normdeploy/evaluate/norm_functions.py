"""Norm ops on float64 arrays, by their definitions (`normdeploy.norms.interpreter`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ..norms.interpreter import Definition, Interpreter, NormalizedTensor
from ..norms.norm_table import ROWS, NormOp, OpOwner
from .elementwise_ops import FUNCTIONS
from .evaluator_core import Array, Attrs, Function, Inputs, Result, Table, UnsupportedOp
from .reductions import mean


class ArrayInterpreter(Interpreter):
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
        raise UnsupportedOp(reason)

    def rank_of(self, x: Array) -> int:
        return x.ndim

    def make_scalar(self, value: float, like: Array) -> float:
        return value

    def split_into_groups(self, x: Array, groups: int) -> Array:
        channels = x.shape[1]
        if channels % groups:
            raise ValueError(
                f"GroupNormalization of {channels} channels in {groups} groups: the groups must divide the channels"
            )
        return x.reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)

    def reshape_like(self, y: Array, x: Array) -> Array:
        return y.reshape(x.shape)

    def reshape_per_channel(self, v: Array, x: Array) -> Array:
        """Reshape to (1, C, 1, …); ValueError where it does not have C elements.

        A vector x has one channel (https://onnx.ai/onnx/operators/onnx__BatchNormalization.html, Inputs).
        """
        if x.ndim == 1:
            return v.reshape(1)
        return v.reshape((1, x.shape[1]) + (1,) * (x.ndim - 2))

    def reshape_per_group(self, v: Array, groups: int) -> Array:
        if len(v) != groups:
            raise ValueError(f"GroupNormalization 18 has one scale and bias a group: {groups}, not {len(v)}")
        return v.reshape(groups, 1)

    def standardize(self, x: Array, axes: Sequence[int], epsilon: float, centered: bool = True) -> NormalizedTensor:
        """As `Interpreter.standardize`, to which tests/evaluate/test_norm_functions.py compares it.

        Most of the time of a norm is spent here. Scaling in place by one reciprocal a row saves a fifth of it.
        """
        axes = tuple(axes)
        n = math.prod([x.shape[axis] for axis in axes])
        if centered:
            center = np.add.reduce(x, axis=axes, keepdims=True) / n
        else:
            center = None
        if centered:
            d = x - center
        else:
            d = x
        deviation = np.sqrt(np.add.reduce(d * d, axis=axes, keepdims=True) / n + epsilon)
        inverse = 1.0 / deviation
        value = np.multiply(d, inverse, out=d if centered else None)
        return NormalizedTensor(value, center, deviation)


def _make_evaluator(definition: Definition) -> Function:
    def evaluate_op(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
        made: Result = definition(ArrayInterpreter(opset, outputs), *inputs, **attrs)
        return made

    return evaluate_op


def _has_evaluator(row: NormOp) -> bool:
    """Whether values are looked at through a node of the op: the standard's, and onnxruntime's layer norms of X. Its
    other ops, and TensorRT's, are only read back into standard ones (`normdeploy.contrib`)."""
    if row.definition is None:
        return False
    return row.owner is OpOwner.ONNX or (
        row.owner is OpOwner.ONNXRUNTIME and row.kind != "GroupNorm" and "X" in row.inputs
    )


TABLE: Table = {
    (domain, row.op): _make_evaluator(row.definition)
    for row in ROWS
    if row.definition is not None and _has_evaluator(row)
    for domain in row.domains
}
