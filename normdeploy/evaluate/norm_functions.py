"""Evaluate norm ops on float64 arrays, by their definitions (`normdeploy.norms.interpreter`)."""

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
    """Interpreter of norm definitions on float64 arrays. A Cast that would round returns its input."""

    def __init__(self, opset: int, outputs: int) -> None:
        self.opset = opset
        self.outputs = outputs

    def __call__(self, op: str, *inputs: Any, **attributes: Any) -> Array:
        made: Array = FUNCTIONS[op](*inputs)
        return made

    def reduce(self, op: str, x: Array, axes: Sequence[int], **attributes: Any) -> Array:
        """Compute the mean over ``axes``, the only reduction that definitions use.

        Returns: float64 with the reduced dims kept at size 1.
        """
        assert op == "ReduceMean"
        return mean(x, tuple(axes))

    def refuse(self, reason: str) -> NoReturn:
        """Raise UnsupportedOp with this reason."""
        raise UnsupportedOp(reason)

    def rank_of(self, x: Array) -> int:
        """Return the number of dims."""
        return x.ndim

    def make_scalar(self, value: float, like: Array) -> float:
        """Return ``value`` itself; numpy broadcasts Python numbers."""
        return value

    def split_into_groups(self, x: Array, groups: int) -> Array:
        """Reshape (N, C, …) to (N, groups, elements of a group).

        Returns: a view if possible.

        Raises:
            ValueError: ``groups`` does not divide C.
        """
        channels = x.shape[1]
        if channels % groups:
            raise ValueError(
                f"GroupNormalization of {channels} channels in {groups} groups: the number of channels "
                "must be divisible by the number of groups"
            )
        return x.reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)

    def reshape_like(self, y: Array, x: Array) -> Array:
        """Reshape ``y`` to the shape of ``x``.

        Returns: a view if possible.
        """
        return y.reshape(x.shape)

    def last_size_of(self, x: Array) -> int:
        """Return the size of the last dim."""
        return int(x.shape[-1])

    def split_last_axis(self, x: Array, size: int) -> Array:
        """Reshape (…, n) to (…, n / size, size).

        Returns: a view if possible; ``x`` itself if n is ``size``.

        Raises:
            ValueError: ``size`` does not divide n.
        """
        n = x.shape[-1]
        if n == size:
            return x
        if size < 1 or n % size:
            raise ValueError(f"a last dim of {n} elements is not divisible into parts of {size}")
        return x.reshape(*x.shape[:-1], n // size, size)

    def reshape_per_channel(self, v: Array, x: Array) -> Array:
        """Reshape ``v`` so that it broadcasts over the channels of ``x``.

        An x of rank 1 has one channel (https://onnx.ai/onnx/operators/onnx__BatchNormalization.html, Inputs).

        Returns: shape (1, C, 1, …) with the rank of x; (1,) for an x of rank 1.

        Raises:
            ValueError: ``v`` does not have C elements.
        """
        if x.ndim == 1:
            return v.reshape(1)
        return v.reshape((1, x.shape[1]) + (1,) * (x.ndim - 2))

    def reshape_per_group(self, v: Array, groups: int) -> Array:
        """Reshape a vector with one element per group.

        Returns: (groups, 1).

        Raises:
            ValueError: ``v`` has another length.
        """
        if len(v) != groups:
            raise ValueError(
                f"GroupNormalization 18 has one scale and bias per group: expected {groups}, found {len(v)}"
            )
        return v.reshape(groups, 1)

    def standardize(self, x: Array, axes: Sequence[int], epsilon: float, centered: bool = True) -> NormalizedTensor:
        """Standardize ``x`` over ``axes``, as `Interpreter.standardize` does but faster.

        tests/evaluate/test_norm_functions.py compares the two. Most of the time of a norm is spent here. Scaling in
        place by one reciprocal per row saves a fifth of this time.

        Returns: the standardized x, its mean (None unless ``centered``) and its deviation, both with the axes kept at
            size 1.
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
        """Evaluate the definition on arrays.

        Returns: one array, or a tuple of outputs.
        """
        made: Result = definition(ArrayInterpreter(opset, outputs), *inputs, **attrs)
        return made

    return evaluate_op


def _has_evaluator(row: NormOp) -> bool:
    """Return whether values may be computed through nodes of this op.

    This holds for the standard ops, and for onnxruntime's layer norms with an input X. Other ops of onnxruntime, and
    ops of TensorRT, are only rewritten as standard ops (`normdeploy.contrib`).
    """
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
