"""Define the interface through which each norm op is defined once, as a Python function of standard ops.

A definition gets an interpreter, the op's inputs in order (None for an omitted input) and the op's attributes by name.
It returns the only output, or a tuple of all outputs, with None for an output that the node does not have.
`normdeploy.norms.onnx_norms`, `onnxruntime_norms` and `tensorrt_norms` contain the definitions. Their docstrings use
these letters for sizes: N batches, C channels, S positions of a sequence, H the hidden size. normdeploy's own ops are
defined by the text of their function bodies instead, because files contain these bodies
(`normdeploy.norms.normdeploy_ops`).

Three modules run the definitions: the float64 evaluation (`normdeploy.evaluate.norm_functions`), the prover
(`normdeploy.proof.norm_definitions`), and the writer that expands contrib and plugin ops
(`normdeploy.contrib.expansion_writer`). Each of them has an `Interpreter` for its kind of tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np


def round_to_float32(value: float) -> float:
    """Round to the float32 number that an attribute stores.

    Returns:
        the rounded number as a Python float.
    """
    return float(np.float32(value))


EPSILON = round_to_float32(1e-5)

Tensor = Any
Definition = Callable[..., Any]


class NormalizedTensor(NamedTuple):
    """Normalized tensor with its statistics, which keep the reduced axes with size 1.

    Attributes:
        mean: the mean; None if the norm subtracts no mean.
        deviation: sqrt(variance + epsilon).
    """

    value: Tensor
    mean: Tensor
    deviation: Tensor


class Interpreter(ABC):
    """Compute with tensors of one kind: arrays, the prover's values, or names of tensors in a file.

    Attributes:
        opset: opset of the standard ops.
        outputs: number of outputs of the node.
    """

    opset: int
    outputs: int

    @abstractmethod
    def __call__(self, op: str, *inputs: Tensor, **attributes: Any) -> Tensor:
        """Apply a standard op with one output.

        Returns:
            the output.
        """

    @abstractmethod
    def reduce(self, op: str, x: Tensor, axes: Sequence[int], **attributes: Any) -> Tensor:
        """Apply a reduction over ``axes``.

        Returns:
            the result; reduced axes keep size 1 unless ``attributes`` say otherwise.
        """

    @abstractmethod
    def refuse(self, reason: str) -> NoReturn:
        """Raise the interpreter's error, for attributes or inputs of an op that can't be computed."""

    @abstractmethod
    def rank_of(self, x: Tensor) -> int:
        """Return the number of axes."""

    @abstractmethod
    def make_scalar(self, value: float, like: Tensor) -> Tensor:
        """Make a scalar in the dtype of ``like``."""

    @abstractmethod
    def split_into_groups(self, x: Tensor, groups: int) -> Tensor:
        """Reshape (N, C, …) to groups.

        Returns:
            a tensor of shape (N, groups, elements of a group).
        """

    @abstractmethod
    def reshape_like(self, y: Tensor, x: Tensor) -> Tensor:
        """Reshape ``y`` to the shape of ``x``, which has the same number of elements.

        Returns:
            a tensor of the shape of ``x``.
        """

    @abstractmethod
    def last_size_of(self, x: Tensor) -> int:
        """Return the size of the last axis; refuse a dynamic one."""

    @abstractmethod
    def split_last_axis(self, x: Tensor, size: int) -> Tensor:
        """Reshape (…, n) to (…, n / size, size).

        Returns:
            ``x`` itself if n is ``size``.
        """

    def join_last_axes(self, y: Tensor, x: Tensor) -> Tensor:
        """Reshape ``y`` back to the shape of ``x``, whose last axis `split_last_axis` split.

        Returns:
            a tensor of the shape of ``x``.
        """
        return self.reshape_like(y, x)

    @abstractmethod
    def reshape_per_channel(self, v: Tensor, x: Tensor) -> Tensor:
        """Reshape (C,) so that it broadcasts to ``x`` of shape (N, C, …)."""

    @abstractmethod
    def reshape_per_group(self, v: Tensor, groups: int) -> Tensor:
        """Reshape (groups,) so that it broadcasts to (N, groups, elements of a group)."""

    def reshape_per_element(self, v: Tensor, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Reshape a vector to the sizes of ``x`` along ``axes``, which are the last axes of ``x``.

        Returns:
            a tensor that broadcasts to ``x``.
        """
        raise NotImplementedError

    def make_int64_vector(self, values: Sequence[int], name: str) -> Tensor:
        """Make a vector of int64. A written file uses ``name`` in the tensor's name.

        Returns:
            a tensor of shape (len(values),).
        """
        return np.array(values, dtype=np.int64)

    def make_int32_scalar(self, value: int, name: str) -> Tensor:
        """Make a scalar of int32. A written file uses ``name`` in the tensor's name.

        Returns:
            a tensor of shape ().
        """
        return np.array(value, dtype=np.int32)

    def make_vector(self, values: Any, like: Tensor, name: str, trailing: int = 0) -> Tensor:
        """Make a vector from an attribute, in the dtype of the statistics of ``like``.

        Returns:
            a tensor of shape (n, 1, …) with ``trailing`` axes of size 1.
        """
        raise NotImplementedError

    def wants_output(self, output: int) -> bool:
        """Return True if the node has the output with this index."""
        return output < self.outputs

    def make_epsilon(self, value: float, like: Tensor) -> Tensor:
        """Make a scalar as `make_scalar` does.

        The prover may replace it by the exact number that was rounded to ``value``.

        Returns:
            a tensor of shape ().
        """
        return self.make_scalar(value, like)

    def widen_for_statistics(self, x: Tensor) -> Tensor:
        """Cast to the dtype in which statistics are computed.

        Returns:
            the tensor; by default ``x`` unchanged.
        """
        return x

    def cast_like(self, x: Tensor, like: Tensor) -> Tensor:
        """Cast to the dtype of ``like``.

        Returns:
            the tensor; by default ``x`` unchanged.
        """
        return x

    def mean_square(self, d: Tensor, axes: Sequence[int]) -> Tensor:
        """Compute mean(d²) over ``axes``, which is the variance if d is centered.

        Returns:
            a tensor in which the reduced axes have size 1.
        """
        return self.reduce("ReduceMean", self("Mul", d, d), axes)

    def standardize(self, x: Tensor, axes: Sequence[int], epsilon: float, centered: bool = True) -> NormalizedTensor:
        """Compute (x − mean) / sqrt(variance + epsilon) over ``axes``.

        If not ``centered``, compute x / sqrt(mean(x²) + epsilon).

        Returns:
            the normalized tensor with its statistics.
        """
        x = self.widen_for_statistics(x)
        if centered:
            mean = self.reduce("ReduceMean", x, axes)
        else:
            mean = None
        if centered:
            d = self("Sub", x, mean)
        else:
            d = x
        variance = self.mean_square(d, axes)
        deviation = self("Sqrt", self("Add", variance, self.make_epsilon(epsilon, variance)))
        return NormalizedTensor(self("Div", d, deviation), mean, deviation)


def scale_and_shift(
    o: Interpreter, y: Tensor, scale: Tensor, bias: Tensor, lay: Callable[[Tensor], Tensor] = lambda v: v
) -> Tensor:
    """Compute y · scale + bias in the dtype of ``scale``.

    Args:
        bias: the bias; None to add nothing.
        lay: function that reshapes scale and bias so that they broadcast to y.

    Returns:
        a tensor of the shape of y.
    """
    y = o("Mul", o.cast_like(y, scale), lay(scale))
    if bias is None:
        return y
    return o("Add", y, lay(o.cast_like(bias, scale)))


def axes_from(o: Interpreter, x: Tensor, axis: int) -> range:
    """List the axes from ``axis`` to the last axis.

    Returns:
        negative axes, counted from the end: range(−k, 0).

    Raises:
        ValueError: x has no such axis.
    """
    if axis < 0:
        first = axis
    else:
        first = axis - o.rank_of(x)
    if first >= 0:
        rank = axis - first
        raise ValueError(
            f"axis {axis} is out of range for a tensor of rank {rank}: it must be between {-rank} and {rank - 1}"
        )
    return range(first, 0)


def inverse_deviation(o: Interpreter, output: int, deviation: Tensor) -> Tensor:
    """Compute 1 / deviation if the node has the output with this index.

    Returns:
        the tensor, or None if the node does not have it.
    """
    if o.wants_output(output):
        return o("Reciprocal", deviation)
    return None


def silu(o: Interpreter, y: Tensor) -> Tensor:
    """Compute y · sigmoid(y).

    Returns:
        a tensor of the shape of y.
    """
    return o("Mul", y, o("Sigmoid", y))
