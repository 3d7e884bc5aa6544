"""What a norm op computes is a function of its inputs and attributes, made of standard ops and written once.

Such a definition gets an interpreter, the op's inputs in order (None where left out) and its attributes by name. It
returns one output, or a tuple of all of them, None for one that is not wanted. `normdeploy.norms.onnx_norms`,
`onnxruntime_norms` and `tensorrt_norms` hold them; shapes are in their docstrings: N batches, C channels, S places of a
sequence, H the hidden size. The bodies of our own ops travel in files, so they are text
(`normdeploy.norms.normdeploy_ops`).

The float64 evaluation (`normdeploy.evaluate.norm_functions`), the prover (`normdeploy.proof.norm_definitions`) and the
writer of foreign norms as standard nodes (`normdeploy.contrib.expansion_writer`) all run these functions; each brings
an `Interpreter` for its own kind of tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np


def round_to_float32(value: float) -> float:
    """Return the number that an attribute with this default holds."""
    return float(np.float32(value))


EPSILON = round_to_float32(1e-5)

Tensor = Any
Definition = Callable[..., Any]


class NormalizedTensor(NamedTuple):
    """A standardized tensor with its statistics, which keep the reduced axes with size 1."""

    value: Tensor
    # None where none is subtracted
    mean: Tensor
    # sqrt(variance + epsilon)
    deviation: Tensor


class Interpreter(ABC):
    """Computes with tensors of one kind: arrays, the prover's values, or names of tensors in a file."""

    # of the standard ops
    opset: int
    # how many the node has
    outputs: int

    @abstractmethod
    def __call__(self, op: str, *inputs: Tensor, **attributes: Any) -> Tensor:
        """Apply a standard op with one output."""

    @abstractmethod
    def reduce(self, op: str, x: Tensor, axes: Sequence[int], **attributes: Any) -> Tensor:
        """Apply a reduction over ``axes``."""

    @abstractmethod
    def refuse(self, reason: str) -> NoReturn:
        """Raise the interpreter's error for a form of an op that it can't compute."""

    @abstractmethod
    def rank_of(self, x: Tensor) -> int:
        """Return the number of axes."""

    @abstractmethod
    def make_scalar(self, value: float, like: Tensor) -> Tensor:
        """Return a scalar of the type of ``like``."""

    @abstractmethod
    def split_into_groups(self, x: Tensor, groups: int) -> Tensor:
        """Reshape (N, C, …) to (N, groups, elements of a group)."""

    @abstractmethod
    def reshape_like(self, y: Tensor, x: Tensor) -> Tensor:
        """Reshape ``y`` to the shape of ``x``, which has as many elements."""

    @abstractmethod
    def reshape_per_channel(self, v: Tensor, x: Tensor) -> Tensor:
        """Reshape (C,) so that it broadcasts to ``x`` of shape (N, C, …)."""

    @abstractmethod
    def reshape_per_group(self, v: Tensor, groups: int) -> Tensor:
        """Reshape (groups,) so that it broadcasts to (N, groups, elements of a group)."""

    def reshape_per_element(self, v: Tensor, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Reshape a vector to the sizes of ``x`` along ``axes``, its last ones."""
        raise NotImplementedError

    def make_int64_vector(self, values: Sequence[int], name: str) -> Tensor:
        """Return a vector of int64. ``name`` says what it is for."""
        return np.array(values, dtype=np.int64)

    def make_int32_scalar(self, value: int, name: str) -> Tensor:
        """Return a scalar of int32."""
        return np.array(value, dtype=np.int32)

    def make_vector(self, values: Any, like: Tensor, name: str, trailing: int = 0) -> Tensor:
        """Return values of an attribute as a vector in the type of the statistics of ``like``, followed by ``trailing``
        axes of size 1."""
        raise NotImplementedError

    def wants_output(self, output: int) -> bool:
        """Return whether the node has the output with this index."""
        return output < self.outputs

    def make_epsilon(self, value: float, like: Tensor) -> Tensor:
        """As `make_scalar`; the prover may put in the exact number of which ``value`` is the rounding."""
        return self.make_scalar(value, like)

    def widen_for_statistics(self, x: Tensor) -> Tensor:
        """Cast to the type in which statistics are computed."""
        return x

    def cast_like(self, x: Tensor, like: Tensor) -> Tensor:
        """Cast to the type of ``like``."""
        return x

    def mean_square(self, d: Tensor, axes: Sequence[int]) -> Tensor:
        """Compute mean(d²) over ``axes``: the variance where d is centered."""
        return self.reduce("ReduceMean", self("Mul", d, d), axes)

    def standardize(self, x: Tensor, axes: Sequence[int], epsilon: float, centered: bool = True) -> NormalizedTensor:
        """Compute (x − mean) / sqrt(variance + epsilon) over ``axes``; without ``centered`` x / sqrt(mean(x²) +
        epsilon)."""
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
    """Compute y · scale + bias in the type of ``scale``. ``lay`` makes the two broadcast to y."""
    y = o("Mul", o.cast_like(y, scale), lay(scale))
    if bias is None:
        return y
    return o("Add", y, lay(o.cast_like(bias, scale)))


def axes_from(o: Interpreter, x: Tensor, axis: int) -> range:
    """Return the axes from ``axis`` to the last, counted from the end.

    Raises:
        ValueError: x has no such axis.
    """
    if axis < 0:
        first = axis
    else:
        first = axis - o.rank_of(x)
    if first >= 0:
        rank = axis - first
        raise ValueError(f"axis {axis} of a tensor of rank {rank}: it must lie between {-rank} and {rank - 1}")
    return range(first, 0)


def inverse_deviation(o: Interpreter, output: int, deviation: Tensor) -> Tensor:
    """Compute 1 / deviation where the node has the output with this index, else None."""
    if o.wants_output(output):
        return o("Reciprocal", deviation)
    return None


def silu(o: Interpreter, y: Tensor) -> Tensor:
    """Compute y · sigmoid(y)."""
    return o("Mul", y, o("Sigmoid", y))
