"""This project's kernels, each by what it computes, on `Value`s: the file's nodes are proved to be that before a plugin
takes their place.

The meaning of a kernel is its float64 reference in `normdeploy_plugins`, which its tests judge it by; here it is said
once more for the field, and tests/proof/test_plugins.py compares the two. A definition gets (machine, inputs,
attributes) and gives its outputs. Gamma and beta hold one value for each element of a row, or of a channel, in any
shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import NotProved, Why
from .lemmas import congruence
from .machine import Machine
from .nodes import leaky
from .ops import Attrs
from .sizes import Size
from .value import Value

Definition = Callable[[Machine, Sequence[Any], Attrs], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Statistics:
    """Of what NormStatistics takes the mean and the sum of squares: each of ``groups`` of the axes of ``x`` from
    ``axis`` on."""

    x: Value
    axis: int
    groups: int
    channels_last: bool


def _rows(m: Machine, v: Value, x: Value, axis: int) -> Value:
    """A parameter over the axes of ``x`` from ``axis`` on."""
    return v.moved(m.plan.regrouped(v.atoms, list(x.shape[axis % len(x.axes) :])))


def _channels(v: Value, x: Value, axis: int = 1) -> Value:
    return v.moved((v.atoms, *((),) * (len(x.axes) - 1 - axis % len(x.axes))))


def _centered(m: Machine, x: Value, axes: Sequence[int], ddof: int) -> tuple[Value, Value]:
    """x − mean, and the variance: the sum of squares by n − ddof."""
    d = m.sub(x, m.mean(x, axes))
    return d, m.div(m.total(m.mul(d, d), axes), m.sub(m.count(x, axes), m.number(ddof)))


def _from(x: Value, axis: int) -> list[int]:
    return list(range(axis % len(x.axes), len(x.axes)))


def _by_root(m: Machine, d: Value, variance: Value, epsilon: float) -> Value:
    return m.div(d, m.root(m.add(variance, m.number(epsilon))))


def _layer_norm(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """LayerNorm(x, gamma, beta) = d/√(variance + ε)·gamma + beta."""
    x, gamma, beta = inputs
    d, variance = _centered(m, x, _from(x, attrs["axis"]), attrs.get("ddof", 0))
    y = _by_root(m, d, variance, attrs["epsilon"])
    return (m.add(m.mul(y, _rows(m, gamma, x, attrs["axis"])), _rows(m, beta, x, attrs["axis"])),)


def _std_norm(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """StdNorm(x, gamma, beta) = d/(√variance + ε)·gamma + beta."""
    x, gamma, beta = inputs
    d, variance = _centered(m, x, _from(x, attrs["axis"]), attrs["ddof"])
    below = m.root(variance)
    below = m.add(below, m.epsilon(attrs["epsilon"])) if attrs["epsilon"] else below
    y = m.div(d, below)
    return (m.add(m.mul(y, _rows(m, gamma, x, attrs["axis"])), _rows(m, beta, x, attrs["axis"])),)


def _rms_norm(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """RMSNorm(x, gamma) = x/√(mean x² + ε)·(offset + gamma)."""
    x, gamma = inputs
    y = _by_root(m, x, m.mean(m.mul(x, x), _from(x, attrs["axis"])), attrs["epsilon"])
    return (m.mul(y, m.add(m.number(attrs["offset"]), _rows(m, gamma, x, attrs["axis"]))),)


def _add_layer_norm(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """AddLayerNorm(x, residual, gamma, beta): LayerNorm of their sum over the last axis, and the sum."""
    total = m.add(inputs[0], inputs[1])
    return (*_layer_norm(m, [total, *inputs[2:]], {**attrs, "axis": -1}), total)


def _add_rms_norm(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    total = m.add(inputs[0], inputs[1])
    return (*_rms_norm(m, [total, inputs[2]], {**attrs, "axis": -1}), total)


_NAMES = ("none", "relu", "silu", "int8", "float8_e4m3fn")  # what plugin nodes hold by its place


def _then_quantized(norm: Definition) -> Definition:
    """A norm whose first result is quantized by its last input, one scale, to the type that ``to`` says; over the last
    axis where it has no ``axis``."""

    def run(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        *given, scale = inputs
        y, *others = norm(m, given, {"axis": -1, "offset": 0.0, **attrs})
        if scale.shape and scale.varying_atoms():
            raise NotProved(Why.OP, "several scales")
        return (congruence.quantized(m, y, scale.moved(((),) * len(y.axes)), _NAMES[attrs["to"]]), *others)

    return run


_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def _then_quantized_by_row(norm: Definition) -> Definition:
    """A norm over the last axis whose first result is quantized by a scale of each row, which is the second."""

    def run(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        if attrs.get("axis", -1) != -1:
            raise NotProved(Why.OP, "rows of several axes")
        y, *others = norm(m, inputs, {"axis": -1, "offset": 0.0, **attrs})
        kind = _NAMES[attrs["to"]]
        return (*congruence.quantized_by_row(m, y, kind, float(attrs["least"]), _LARGEST[kind]), *others)

    return run


def _modulated(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """ModulatedLayerNorm(x, scale, shift) = d/√(variance + ε)·(1 + scale) + shift over the last axis."""
    x, scale, shift = inputs
    y = _by_root(m, *_centered(m, x, _from(x, -1), 0), attrs["epsilon"])
    return (m.add(m.mul(y, m.add(m.number(1), scale)), shift),)


def _over(axes: Callable[[int], Sequence[int]]) -> Definition:
    """Over these axes of an input of some rank, gamma and beta of the channels: InstanceNorm and ChannelLayerNorm."""

    def run(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        x, gamma, beta = inputs
        y = _by_root(m, *_centered(m, x, axes(len(x.axes)), 0), attrs["epsilon"])
        return (m.add(m.mul(y, _channels(gamma, x)), _channels(beta, x)),)

    return run


NONE, RELU, SILU = range(3)  # an activation as plugin nodes hold it


def activated(m: Machine, y: Value, activation: int) -> Value:
    """An activation of ``y``, by its number. Raises NotProved for one that there is not."""
    if activation not in (NONE, RELU, SILU):
        raise NotProved(Why.OP, f"activation {activation} of a plugin")
    if activation == SILU:
        return m.mul(y, congruence.TABLE["Sigmoid"](m, [y], {}, 13, 1))
    return leaky(m, y, 0.0) if activation == RELU else y


def _grouped(activation: int = NONE) -> Definition:
    """GroupNorm(x, gamma, beta), x of (N, C, …), or (N, …, C) where channels_last; an activation behind it."""

    def run(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        x, gamma, beta = inputs
        rank, last = len(x.axes), attrs["channels_last"]
        if last:
            x = _transposed(x, [0, rank - 1, *range(1, rank - 1)])
        groups = x.moved(m.plan.regrouped(x.atoms, [x.shape[0], Size.of(attrs["num_groups"]), None]))
        y = _by_root(m, *_centered(m, groups, [2], 0), attrs["epsilon"])
        y = y.moved(m.plan.regrouped(y.atoms, list(x.shape)))
        y = m.add(m.mul(y, _channels(gamma, x)), _channels(beta, x))
        y = activated(m, y, activation or attrs.get("activation", NONE))
        return (_transposed(y, [0, *range(2, rank), 1]) if last else y,)

    return run


def _transposed(x: Value, perm: Sequence[int]) -> Value:
    return x.moved(tuple(x.axes[i] for i in perm), [0] + [s for i in perm for s in x.slots(i)])


def _scale_shift(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """ScaleShift(x, scale, shift) = x·scale + shift along ``axis``, and an activation."""
    x, scale, shift = inputs
    y = m.add(m.mul(x, _channels(scale, x, attrs["axis"])), _channels(shift, x, attrs["axis"]))
    return (activated(m, y, attrs["activation"]),)


def _statistics(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x = inputs[0]
    return (Statistics(x, attrs["axis"] % len(x.axes), attrs["groups"], bool(attrs["channels_last"])),)


def _layer_norm_apply(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """LayerNorm with the statistics of its own rows."""
    x, statistics = inputs[:2]
    _require(statistics, Statistics(x, attrs["axis"] % len(x.axes), 1, False))
    return _layer_norm(m, [x, *inputs[2:]], attrs)


def _group_norm_apply(m: Machine, inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """GroupNorm with the statistics of its own groups, and an activation."""
    x, statistics = inputs[:2]
    _require(statistics, Statistics(x, 1, attrs["num_groups"], bool(attrs["channels_last"])))
    return _grouped()(m, [x, *inputs[2:]], attrs)


def _require(stated: Statistics, own: Statistics) -> None:
    told = [(s.axis, s.groups, s.channels_last) for s in (stated, own)]
    if stated.x is not own.x or told[0] != told[1]:
        raise NotProved(
            Why.DIFFERS, f"statistics of (axis, groups, channels_last) {told[0]} are taken for those of {told[1]}"
        )


TABLE: dict[str, Definition] = {
    "LayerNorm": _layer_norm,
    "RMSNorm": _rms_norm,
    "AddLayerNorm": _add_layer_norm,
    "AddRMSNorm": _add_rms_norm,
    "ModulatedLayerNorm": _modulated,
    "StdNorm": _std_norm,
    "ChannelLayerNorm": _over(lambda rank: [1]),
    "InstanceNorm": _over(lambda rank: range(2, rank)),
    "GroupNorm": _grouped(),
    "GroupNormSiLU": _grouped(SILU),
    "ScaleShift": _scale_shift,
    "NormStatistics": _statistics,
    "LayerNormApply": _layer_norm_apply,
    "GroupNormApply": _group_norm_apply,
    "LayerNormQuantize": _then_quantized(_layer_norm),
    "RMSNormQuantize": _then_quantized(_rms_norm),
    "AddLayerNormQuantize": _then_quantized(_add_layer_norm),
    "AddRMSNormQuantize": _then_quantized(_add_rms_norm),
    "LayerNormDynamicQuantize": _then_quantized_by_row(_layer_norm),
    "RMSNormDynamicQuantize": _then_quantized_by_row(_rms_norm),
    "AddLayerNormDynamicQuantize": _then_quantized_by_row(_add_layer_norm),
    "AddRMSNormDynamicQuantize": _then_quantized_by_row(_add_rms_norm),
}
