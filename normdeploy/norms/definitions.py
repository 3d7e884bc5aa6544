"""Defines each norm op once: a function of its inputs and attributes, made of standard ops.

The float64 evaluation (`normdeploy.evaluate.norm_functions`), the prover (`normdeploy.proof.norm_definitions`) and the
writer of foreign norms as standard nodes (`normdeploy.contrib.expansion_writer`) all run these functions; each brings
an `Interpreter` for its own kind of tensor. The bodies of our own ops travel in files, so they are text
(`normdeploy.norms.normdeploy_ops`).

A definition gets an interpreter, the op's inputs in order (None where left out) and its attributes by name. It returns
one output, or a tuple of all of them, None for one that is not wanted. Shapes are in the docstrings: N batches,
C channels, S places of a sequence, H the hidden size.

The definitions follow the text of their owners:

- ONNX: https://onnx.ai/onnx/operators. Variances are means of centered squares, as in that text. The function bodies in
  onnx's schemas compute E[x²] − E[x]²: the same function, but it cancels in float64 at a large mean, and its sign does
  not follow from its structure. tests/norms/test_definitions.py compares the definitions with these bodies.
- onnxruntime: docs/ContribOperators.md.
- TensorRT: README and plugin creator, which holds the defaults, in each folder of its plugin/: groupNormPlugin,
  groupNormalizationPlugin, layerNormPlugin, instanceNormalizationPlugin, skipLayerNormPlugin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from onnx import TensorProto


def _round_to_float32(value: float) -> float:
    """The number that an attribute with this default holds."""
    return float(np.float32(value))


EPSILON = _round_to_float32(1e-5)
# of onnxruntime's Skip… ops and EmbedLayerNormalization
SKIP_EPSILON = _round_to_float32(1e-12)
MEAN_VARIANCE_EPSILON = _round_to_float32(1e-9)
# fixed in TensorRT's groupNormPlugin.cpp
PLUGIN_GROUPS = 32
# type_id -> std::numeric_limits<float or half>::epsilon(), compiled into TensorRT's skipLayerNormPlugin
PLUGIN_SKIP_EPSILONS = {0: 2.0**-23, 1: 2.0**-10}

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
        mean = self.reduce("ReduceMean", x, axes) if centered else None
        d = self("Sub", x, mean) if centered else x
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
    first = axis if axis < 0 else axis - o.rank_of(x)
    if first >= 0:
        rank = axis - first
        raise ValueError(f"axis {axis} of a tensor of rank {rank}: it must lie between {-rank} and {rank - 1}")
    return range(first, 0)


def _inverse_deviation(o: Interpreter, output: int, deviation: Tensor) -> Tensor:
    if o.wants_output(output):
        return o("Reciprocal", deviation)
    return None


def _silu(o: Interpreter, y: Tensor) -> Tensor:
    return o("Mul", y, o("Sigmoid", y))


# ------------------------------------------------------------------ ONNX


def layer_norm(
    o: Interpreter, x: Tensor, scale: Tensor, bias: Tensor = None, *, axis: int = -1, epsilon: float = EPSILON, **_: Any
) -> Any:
    """LayerNormalization → Y, Mean, InvStdDev, over ``axis`` and all behind it; scale and bias broadcast to x."""
    normal = o.standardize(x, axes_from(o, x, axis), epsilon)
    return scale_and_shift(o, normal.value, scale, bias), normal.mean, _inverse_deviation(o, 2, normal.deviation)


def rms_norm(o: Interpreter, x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = EPSILON, **_: Any) -> Any:
    """RMSNormalization, and onnxruntime's SimplifiedLayerNormalization with its second output 1 / rms."""
    normal = o.standardize(x, axes_from(o, x, axis), epsilon, centered=False)
    return scale_and_shift(o, normal.value, scale, None), _inverse_deviation(o, 1, normal.deviation)


def instance_norm(
    o: Interpreter, x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = EPSILON, **_: Any
) -> Tensor:
    """InstanceNormalization of (N, C, …) over all but the first two axes; scale and bias of (C,)."""
    normal = o.standardize(x, range(2 - o.rank_of(x), 0), epsilon)
    return scale_and_shift(o, normal.value, scale, bias, lambda v: o.reshape_per_channel(v, x))


def group_norm(
    o: Interpreter, x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = EPSILON, **_: Any
) -> Tensor:
    """GroupNormalization of (N, C, …); scale and bias of (C,), of (num_groups,) before opset 21."""
    if o.opset >= 21:
        return group_norm_21(o, x, scale, bias, num_groups, epsilon)
    normal = o.standardize(o.split_into_groups(x, num_groups), [-1], epsilon)
    return o.reshape_like(
        scale_and_shift(o, normal.value, scale, bias, lambda v: o.reshape_per_group(v, num_groups)), x
    )


def group_norm_21(o: Interpreter, x: Tensor, scale: Tensor, bias: Tensor, groups: int, epsilon: float) -> Tensor:
    """GroupNormalization of (N, C, …) with scale and bias of (C,), at any opset."""
    normal = o.standardize(o.split_into_groups(x, groups), [-1], epsilon)
    return scale_and_shift(o, o.reshape_like(normal.value, x), scale, bias, lambda v: o.reshape_per_channel(v, x))


def batch_norm(
    o: Interpreter,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = EPSILON,
    training_mode: int = 0,
    is_test: int = 0,
    spatial: int = 1,
    **_: Any,
) -> Tensor:
    """BatchNormalization of inference: (x − mean) / sqrt(variance + epsilon) · scale + bias, all four of (C,)."""
    training = bool(training_mode)
    if o.opset < 14:
        training = o.wants_output(1) or (o.opset < 7 and not is_test)
    if training:
        o.refuse("BatchNormalization in training mode")
    if not spatial:
        o.refuse("BatchNormalization with spatial = 0")
    scale, bias, mean, variance = (o.reshape_per_channel(v, x) for v in (scale, bias, mean, variance))
    deviation = o("Sqrt", o("Add", variance, o.make_scalar(epsilon, variance)))
    return scale_and_shift(o, o("Div", o("Sub", x, mean), deviation), scale, bias)


def mean_variance_norm(o: Interpreter, x: Tensor, *, axes: Sequence[int] = (0, 2, 3), **_: Any) -> Tensor:
    """MeanVarianceNormalization: (x − mean) / (sqrt(variance) + 1e-9)."""
    d = o("Sub", x, o.reduce("ReduceMean", x, axes))
    deviation = o("Sqrt", o.mean_square(d, axes))
    return o("Div", d, o("Add", deviation, o.make_scalar(MEAN_VARIANCE_EPSILON, deviation)))


# ------------------------------------------------------------------ onnxruntime


def _residual_sum(o: Interpreter, x: Tensor, residual: Tensor, added: Tensor) -> Tensor:
    total = o("Add", x, residual)
    if added is None:
        return total
    return o("Add", total, added)


def skip_layer_norm(
    o: Interpreter,
    x: Tensor,
    residual: Tensor,
    scale: Tensor,
    bias: Tensor = None,
    added: Tensor = None,
    *,
    epsilon: float = SKIP_EPSILON,
    **_: Any,
) -> Any:
    """SkipLayerNormalization → Y, mean, 1 / deviation, sum: the layer norm over H of sum = x + residual + added.

    x of (B, S, H) or (T, H), residual of its shape or broadcast to it, the others of (H,).
    """
    total = _residual_sum(o, x, residual, added)
    normal = o.standardize(total, [-1], epsilon)
    return scale_and_shift(o, normal.value, scale, bias), normal.mean, _inverse_deviation(o, 2, normal.deviation), total


def skip_rms_norm(
    o: Interpreter,
    x: Tensor,
    residual: Tensor,
    scale: Tensor,
    added: Tensor = None,
    *,
    epsilon: float = SKIP_EPSILON,
    **_: Any,
) -> Any:
    """SkipSimplifiedLayerNormalization → Y, none, 1 / rms, sum: as `skip_layer_norm`, without a mean."""
    total = _residual_sum(o, x, residual, added)
    normal = o.standardize(total, [-1], epsilon, centered=False)
    return scale_and_shift(o, normal.value, scale, None), None, _inverse_deviation(o, 2, normal.deviation), total


def embed_layer_norm(
    o: Interpreter,
    ids: Tensor,
    segments: Tensor,
    words: Tensor,
    positions: Tensor,
    segment_words: Tensor,
    scale: Tensor,
    bias: Tensor,
    mask: Tensor = None,
    position_ids: Tensor = None,
    *,
    epsilon: float = SKIP_EPSILON,
    **_: Any,
) -> Any:
    """EmbedLayerNormalization → Y, mask_index, sum: the layer norm over H of the sum of the rows that the ids pick.

    ids, segments, mask and position_ids of (B, S), the three tables of (rows, H). Without position_ids the first S rows
    of ``positions`` are taken. mask_index is the number of ones in each row of the mask, 0 without one.
    """
    if position_ids is None:
        length = o("Slice", o("Shape", ids), o.make_int64_vector([1], "start"), o.make_int64_vector([2], "end"))
        place = o("Slice", positions, o.make_int64_vector([0], "start"), length, o.make_int64_vector([0], "axes"))
    else:
        place = o("Gather", positions, position_ids, axis=0)
    total = o("Add", o("Gather", words, ids, axis=0), place)
    if segments is not None:
        total = o("Add", total, o("Gather", segment_words, segments, axis=0))
    normal = o.standardize(total, [-1], epsilon)
    y = scale_and_shift(o, normal.value, scale, bias)
    return y, _count_mask_ones(o, ids, mask) if o.wants_output(1) else None, total


def _count_mask_ones(o: Interpreter, ids: Tensor, mask: Tensor) -> Tensor:
    """The number of ones in each row of an int32 mask; zeros without one."""
    if mask is None:
        return o.reduce("ReduceSum", o("Sub", ids, ids), [1], keepdims=0)
    ones = o("Cast", o("Equal", mask, o.make_int32_scalar(1, "one")), to=TensorProto.INT32)
    return o.reduce("ReduceSum", ones, [1], keepdims=0)


def ort_group_norm(
    o: Interpreter,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    groups: int,
    activation: int,
    channels_last: int = 1,
    epsilon: float = EPSILON,
    **_: Any,
) -> Tensor:
    """GroupNorm of (N, …, C), of (N, C, …) where channels_last is 0; activation 1 is SiLU."""
    rank = o.rank_of(x)
    if channels_last:
        first = o("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)])
    else:
        first = x
    y = o.cast_like(group_norm_21(o, first, scale, bias, groups, epsilon), x)
    if channels_last:
        y = o("Transpose", y, perm=[0, *range(2, rank), 1])
    if activation == 1:
        return _silu(o, y)
    return y


def skip_group_norm(
    o: Interpreter, x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor, added: Tensor = None, **attributes: Any
) -> Any:
    """SkipGroupNorm → Y, sum: `ort_group_norm` of sum = x + residual + added.

    residual of the shape of x, (N, 1, 1, C) or (N, C); added of (C,).
    """
    if o.rank_of(residual) == 2:
        residual = o("Reshape", residual, o.make_int64_vector([0, 1, 1, -1], "shape"))
    total = _residual_sum(o, x, residual, added)
    return ort_group_norm(o, total, scale, bias, **attributes), total


# ------------------------------------------------------------------ TensorRT


def plugin_group_norm(
    o: Interpreter,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    num_groups: int = PLUGIN_GROUPS,
    epsilon: float = EPSILON,
    bSwish: int = 0,
    **_: Any,
) -> Tensor:
    """GroupNorm of (N, C, H, W), followed by SiLU where bSwish."""
    y = o.cast_like(group_norm_21(o, x, scale, bias, num_groups, epsilon), x)
    if bSwish:
        return _silu(o, y)
    return y


def plugin_group_normalization(
    o: Interpreter,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    num_groups: int = 1,
    eps: float | None = None,
    epsilon: float = EPSILON,
    **_: Any,
) -> Tensor:
    """GroupNormalizationPlugin of (N, C, …); its creator calls epsilon "eps"."""
    epsilon = epsilon if eps is None else eps
    return o.cast_like(group_norm_21(o, x, scale, bias, num_groups, epsilon), x)


def plugin_layer_norm(
    o: Interpreter,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    axis: int = -1,
    eps: float = EPSILON,
    epsilon: float | None = None,
    **_: Any,
) -> Tensor:
    """LayerNorm over ``axis`` and all behind it, scale and bias with one value for each of these elements."""
    axes = axes_from(o, x, axis)
    normal = o.standardize(x, axes, eps if epsilon is None else epsilon)
    return o.cast_like(scale_and_shift(o, normal.value, scale, bias, lambda v: o.reshape_per_element(v, x, axes)), x)


def plugin_instance_norm(
    o: Interpreter,
    x: Tensor,
    scale: Tensor = None,
    shift: Tensor = None,
    /,
    *,
    epsilon: float,
    scales: Any = None,
    bias: Any = None,
    relu: int = 0,
    alpha: float = 0.0,
    **_: Any,
) -> Tensor:
    """InstanceNormalization_TRT of (N, C, …), scale and shift of (C,) as inputs or as the attributes scales and bias;
    where relu, followed by a leaky Relu of slope alpha."""
    normal = o.standardize(x, range(2 - o.rank_of(x), 0), epsilon)
    if scale is None:
        scale = o.make_vector(scales, x, "scales")
        shift = o.make_vector(bias, x, "bias")
    y = o.cast_like(scale_and_shift(o, normal.value, scale, shift, lambda v: o.reshape_per_channel(v, x)), x)
    if not relu:
        return y
    if alpha:
        return o("LeakyRelu", y, alpha=float(alpha))
    return o("Relu", y)


def plugin_skip_layer_norm(
    o: Interpreter,
    x: Tensor,
    residual: Tensor,
    *,
    gamma: Any,
    beta: Any,
    bias: Any = None,
    type_id: int = 0,
    **_: Any,
) -> Tensor:
    """CustomSkipLayerNormPluginDynamic: the layer norm over H of x + residual + bias.

    x and residual of (S, B, H, 1, 1), or with H last. The plugin holds its vectors in float32, whatever the type of
    its data.
    """
    trailing = 2 if o.rank_of(x) == 5 else 0
    total = o("Add", x, residual)
    if bias is not None:
        total = o.widen_for_statistics(total)
        total = o("Add", total, o.make_vector(bias, total, "bias", trailing))
    normal = o.standardize(total, range(-1 - trailing, 0), PLUGIN_SKIP_EPSILONS[type_id])
    scale, shift = (o.make_vector(v, x, name, trailing) for v, name in ((gamma, "gamma"), (beta, "beta")))
    return o.cast_like(scale_and_shift(o, normal.value, scale, shift), x)
