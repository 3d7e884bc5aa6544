"""Define our kernels on `Value`s. Before a plugin replaces nodes, they are proved to equal the kernel's definition.

Each kernel also has a float64 reference in `normdeploy_plugins`, and the kernel's tests compare it with this reference.
The definitions in this module build on the norm definitions (`normdeploy.norms`).
tests/proof/test_plugin_definitions.py compares them with the references.

A definition is called with (interpreter, inputs, attributes) and returns its outputs. Gamma and beta hold one value per
element of a row, or per channel, in any shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..norms.interpreter import axes_from, scale_and_shift
from ..norms.onnx_norms import group_norm_21, instance_norm
from ..norms.tensorrt_norms import plugin_layer_norm
from .interpreter import ProofInterpreter
from .lemmas import congruence
from .norm_definitions import ValueInterpreter
from .op_definitions import Attrs
from .proof_errors import NotProved, ProofFailure
from .proto_evaluation import leaky_relu
from .value import Value

Definition = Callable[[ProofInterpreter, Sequence[Any], Attrs], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class GroupStatistics:
    """Result of the kernel NormStatistics: mean and sum of squares of each group of ``x``.

    Attributes:
        x: the input.
        axis: first axis of a row, non-negative. A row spans this axis and all axes after it.
        groups: number of groups into which the channels are divided.
        channels_last: True if the channels are the last axis.
    """

    x: Value
    axis: int
    groups: int
    channels_last: bool


class _KernelInterpreter(ValueInterpreter):
    """Interpreter that computes as a kernel does.

    It uses the stored epsilon of its node, accepts parameters of any shape, and divides the sum of squares by n − ddof.
    """

    def __init__(self, m: ProofInterpreter, ddof: int = 0) -> None:
        super().__init__(m, opset=21, outputs=1)
        self._ddof = ddof

    def make_epsilon(self, value: float, like: Value) -> Value:
        """Evaluate the stored epsilon.

        Returns:
            a value without axes.
        """
        return self.make_scalar(value, like)

    def mean_square(self, d: Value, axes: Sequence[int]) -> Value:
        """Divide the sum of squares by n − ddof.

        Returns:
            the quotient, with the reduced axes of size 1.
        """
        m = self._m
        places = [axis % len(d.axes) for axis in axes]
        return m.div(m.sum_over(m.mul(d, d), places), m.sub(m.count(d, places), m.number(self._ddof)))

    def reshape_per_channel(self, v: Value, x: Value) -> Value:
        """Align a parameter of any shape with axis 1 of ``x``.

        Returns:
            ``v`` as one axis, followed by axes of size 1.
        """
        return _channel_parameter(v, x)


def _channel_parameter(v: Value, x: Value, axis: int = 1) -> Value:
    return v.with_axes((v.atoms, *((),) * (len(x.axes) - 1 - axis % len(x.axes))))


def _layer_norm(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Compute LayerNorm(x, gamma, beta) = d/√(variance + ε)·gamma + beta."""
    o = _KernelInterpreter(m, attrs.get("ddof", 0))
    return (plugin_layer_norm(o, *inputs, axis=attrs["axis"], epsilon=attrs["epsilon"]),)


def _std_norm(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Compute StdNorm(x, gamma, beta) = d/(√variance + ε)·gamma + beta."""
    x, gamma, beta = inputs
    o = _KernelInterpreter(m, attrs["ddof"])
    axes = axes_from(o, x, attrs["axis"])
    d = o("Sub", x, o.reduce("ReduceMean", x, axes))
    below = o("Sqrt", o.mean_square(d, axes))
    if attrs["epsilon"]:
        below = m.add(below, m.exact_epsilon(attrs["epsilon"]))
    return (scale_and_shift(o, m.div(d, below), gamma, beta, lambda v: o.reshape_per_element(v, x, axes)),)


def _rms_norm(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Compute RMSNorm(x, gamma) = x/√(mean x² + ε)·(offset + gamma)."""
    x, gamma = inputs
    o = _KernelInterpreter(m)
    axes = axes_from(o, x, attrs["axis"])
    normal = o.standardize(x, axes, attrs["epsilon"], centered=False)
    return (m.mul(normal.value, m.add(m.number(attrs["offset"]), o.reshape_per_element(gamma, x, axes))),)


def _add_layer_norm(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Compute AddLayerNorm(x, residual, gamma, beta): LayerNorm of x + residual over the last axis, and the sum."""
    total = m.add(inputs[0], inputs[1])
    return (*_layer_norm(m, [total, *inputs[2:]], {**attrs, "axis": -1}), total)


def _add_rms_norm(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Compute AddRMSNorm(x, residual, gamma): RMSNorm of x + residual over the last axis, and the sum."""
    total = m.add(inputs[0], inputs[1])
    return (*_rms_norm(m, [total, inputs[2]], {**attrs, "axis": -1}), total)


# Names of the values 0, 1, … of the attribute ``to`` of plugin nodes
_NAMES = ("none", "relu", "silu", "int8", "float8_e4m3fn")


def _with_quantized_result(norm: Definition) -> Definition:
    """Quantize the first result of a norm by its last input, a single scale.

    The attribute ``to`` names the type. If the norm has no attribute ``axis``, it normalizes the last axis.
    """

    def run(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        *given, scale = inputs
        y, *others = norm(m, given, {"axis": -1, "offset": 0.0, **attrs})
        if scale.shape and scale.varying_atoms():
            raise NotProved(ProofFailure.OP, "several scales")
        return (congruence.quantize_value(m, y, scale.with_axes(((),) * len(y.axes)), _NAMES[attrs["to"]]), *others)

    return run


_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def _with_quantized_rows(norm: Definition) -> Definition:
    """Quantize the first result of a norm over the last axis, with one scale per row as the second result."""

    def run(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        if attrs.get("axis", -1) != -1:
            raise NotProved(ProofFailure.OP, "rows over several axes")
        y, *others = norm(m, inputs, {"axis": -1, "offset": 0.0, **attrs})
        kind = _NAMES[attrs["to"]]
        return (*congruence.quantize_rows(m, y, kind, float(attrs["least"]), _LARGEST[kind]), *others)

    return run


def _modulated_layer_norm(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Compute ModulatedLayerNorm(x, scale, shift) = d/√(variance + ε)·(1 + scale) + shift over the last axis."""
    x, scale, shift = inputs
    normal = _KernelInterpreter(m).standardize(x, [-1], attrs["epsilon"])
    return (m.add(m.mul(normal.value, m.add(m.number(1), scale)), shift),)


def _gated_rms_norm(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Compute GatedRMSNorm(x, gamma, gate) = RMSNorm(x, gamma)·gate·sigmoid(gate) over the last axis."""
    x, gamma, gate = inputs
    (normal,) = _rms_norm(m, [x, gamma], {**attrs, "axis": -1, "offset": 0.0})
    return (m.mul(normal, apply_activation(m, gate, SILU)),)


def _sigmoid_gated_rms_norm(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Compute SigmoidGatedRMSNorm(x, gamma, gate) = RMSNorm(x, gamma)·sigmoid(gate) over the last axis."""
    x, gamma, gate = inputs
    (normal,) = _rms_norm(m, [x, gamma], {**attrs, "axis": -1, "offset": 0.0})
    return (m.mul(normal, congruence.TABLE["Sigmoid"](m, [gate], {}, 13, 1)),)


def _instance_norm(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    return (instance_norm(_KernelInterpreter(m), *inputs, epsilon=attrs["epsilon"]),)


def _channel_layer_norm(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Compute ChannelLayerNorm(x, gamma, beta) over axis 1."""
    x, gamma, beta = inputs
    o = _KernelInterpreter(m)
    normal = o.standardize(x, [1], attrs["epsilon"])
    return (scale_and_shift(o, normal.value, gamma, beta, lambda v: o.reshape_per_channel(v, x)),)


# Values of the attribute ``activation`` of plugin nodes
NONE, RELU, SILU = range(3)


def apply_activation(m: ProofInterpreter, y: Value, activation: int) -> Value:
    """Apply an activation to ``y``.

    Args:
        activation: NONE, RELU or SILU.

    Returns:
        the result.

    Raises:
        NotProved: the number is unknown.
    """
    if activation not in (NONE, RELU, SILU):
        raise NotProved(ProofFailure.OP, f"a plugin with the unknown activation {activation}")
    if activation == SILU:
        return m.mul(y, congruence.TABLE["Sigmoid"](m, [y], {}, 13, 1))
    if activation == RELU:
        return leaky_relu(m, y, 0.0)
    return y


def _grouped_norm(activation: int = NONE) -> Definition:
    """Define GroupNorm(x, gamma, beta) followed by an activation; x is (N, C, …), or (N, …, C) if channels_last."""

    def run(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        x, gamma, beta = inputs
        rank = len(x.axes)
        last = attrs["channels_last"]
        o = _KernelInterpreter(m)
        if last:
            x = o("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)])
        y = group_norm_21(o, x, gamma, beta, attrs["num_groups"], attrs["epsilon"])
        y = apply_activation(m, y, activation or attrs.get("activation", NONE))
        return (o("Transpose", y, perm=[0, *range(2, rank), 1]) if last else y,)

    return run


def _ada_group_norm(activation: int = NONE) -> Definition:
    """Define AdaGroupNorm(x, scale, shift) = d/√(variance + ε)·scale + shift, followed by an activation."""

    def run(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        x, scale, shift = inputs
        for parameter in (scale, shift):
            _require_layout(parameter, x, spatial=bool(attrs["spatial"]))
        o = _KernelInterpreter(m)
        rows = o.split_into_groups(x, attrs["num_groups"])
        normal = o.standardize(rows, [-1], attrs["epsilon"])
        y = m.add(m.mul(o.reshape_like(normal.value, x), scale), shift)
        return (apply_activation(m, y, activation or attrs.get("activation", NONE)),)

    return run


def _require_layout(parameter: Value, x: Value, *, spatial: bool) -> None:
    """Refuse a parameter of another shape than the kernel reads: x's shape if ``spatial``, else (N, C, 1, …)."""
    if len(parameter.axes) != len(x.axes):
        raise NotProved(
            ProofFailure.DIFFERS, f"a parameter has {len(parameter.axes)} axes, but x has {len(x.axes)} axes"
        )
    for axis in range(2, len(x.axes)):
        if x.axes[axis] and bool(parameter.axes[axis]) != spatial:
            raise NotProved(
                ProofFailure.DIFFERS,
                f"the kernel reads parameters with spatial = {int(spatial)}, but axis {axis} differs",
            )


def _scale_shift(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Compute ScaleShift(x, scale, shift) = x·scale + shift along ``axis``, followed by an activation."""
    x, scale, shift = inputs
    y = m.add(m.mul(x, _channel_parameter(scale, x, attrs["axis"])), _channel_parameter(shift, x, attrs["axis"]))
    return (apply_activation(m, y, attrs["activation"]),)


def _norm_statistics(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x = inputs[0]
    return (GroupStatistics(x, attrs["axis"] % len(x.axes), attrs["groups"], bool(attrs["channels_last"])),)


def _layer_norm_apply(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Compute LayerNorm from statistics that were computed from the rows of the same input."""
    x, statistics = inputs[:2]
    _require_same_statistics(statistics, GroupStatistics(x, attrs["axis"] % len(x.axes), 1, False))
    return _layer_norm(m, [x, *inputs[2:]], attrs)


def _group_norm_apply(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Compute GroupNorm from statistics of the groups of the same input, followed by an activation."""
    x, statistics = inputs[:2]
    _require_same_statistics(statistics, GroupStatistics(x, 1, attrs["num_groups"], bool(attrs["channels_last"])))
    return _grouped_norm()(m, [x, *inputs[2:]], attrs)


def _ada_group_norm_apply(m: ProofInterpreter, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Compute AdaGroupNorm from statistics of the groups of the same input, followed by an activation."""
    x, statistics = inputs[:2]
    _require_same_statistics(statistics, GroupStatistics(x, 1, attrs["num_groups"], False))
    return _ada_group_norm()(m, [x, *inputs[2:]], attrs)


def _require_same_statistics(stated: GroupStatistics, own: GroupStatistics) -> None:
    told = [(s.axis, s.groups, s.channels_last) for s in (stated, own)]
    if stated.x is not own.x or told[0] != told[1]:
        raise NotProved(
            ProofFailure.DIFFERS,
            f"statistics for (axis, groups, channels_last) = {told[0]} are used for {told[1]}",
        )


TABLE: dict[str, Definition] = {
    "LayerNorm": _layer_norm,
    "RMSNorm": _rms_norm,
    "AddLayerNorm": _add_layer_norm,
    "AddRMSNorm": _add_rms_norm,
    "ModulatedLayerNorm": _modulated_layer_norm,
    "GatedRMSNorm": _gated_rms_norm,
    "SigmoidGatedRMSNorm": _sigmoid_gated_rms_norm,
    "StdNorm": _std_norm,
    "ChannelLayerNorm": _channel_layer_norm,
    "InstanceNorm": _instance_norm,
    "GroupNorm": _grouped_norm(),
    "GroupNormSiLU": _grouped_norm(SILU),
    "AdaGroupNorm": _ada_group_norm(),
    "AdaGroupNormSiLU": _ada_group_norm(SILU),
    "AdaGroupNormApply": _ada_group_norm_apply,
    "ScaleShift": _scale_shift,
    "NormStatistics": _norm_statistics,
    "LayerNormApply": _layer_norm_apply,
    "GroupNormApply": _group_norm_apply,
    "LayerNormQuantize": _with_quantized_result(_layer_norm),
    "RMSNormQuantize": _with_quantized_result(_rms_norm),
    "AddLayerNormQuantize": _with_quantized_result(_add_layer_norm),
    "AddRMSNormQuantize": _with_quantized_result(_add_rms_norm),
    "LayerNormDynamicQuantize": _with_quantized_rows(_layer_norm),
    "RMSNormDynamicQuantize": _with_quantized_rows(_rms_norm),
    "AddLayerNormDynamicQuantize": _with_quantized_rows(_add_layer_norm),
    "AddRMSNormDynamicQuantize": _with_quantized_rows(_add_rms_norm),
}
