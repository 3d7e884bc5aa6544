"""The standard's norms, by their definitions (https://onnx.ai/onnx/operators)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from ..evaluate.core import float32, optional
from .errors import NotProved, Why
from .machine import Machine
from .ops import Attrs, Inputs, Op, axes_of, by_channel, expanded, lifted
from .sizes import Size
from .value import NOT_NEGATIVE, POSITIVE, Value

EPSILON = float32(1e-5)
_MVN_EPSILON = float32(1e-9)


def _affine(m: Machine, y: Value, scale: Any, bias: Any) -> Value:
    y = m.mul(y, lifted(m, scale))
    return y if bias is None else m.add(y, lifted(m, bias))


def _from(x: Value, axis: int) -> list[int]:
    return list(range(axis % len(x.axes), len(x.axes)))


def _layer_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    x = lifted(m, inputs[0])
    y, mean, inverse = m.standardized(x, _from(x, int(attrs.get("axis", -1))), attrs.get("epsilon", EPSILON))
    return _affine(m, y, inputs[1], optional(inputs, 2)), mean, inverse


def _rms_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    x = lifted(m, inputs[0])
    y, _, inverse = m.standardized(
        x, _from(x, int(attrs.get("axis", -1))), attrs.get("epsilon", EPSILON), centered=False
    )
    return m.mul(y, lifted(m, inputs[1])), inverse


def _instance_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    x = lifted(m, inputs[0])
    y, _, _ = m.standardized(x, list(range(2, len(x.axes))), attrs.get("epsilon", EPSILON))
    return m.add(m.mul(y, by_channel(m, inputs[1], x)), by_channel(m, inputs[2], x))


def _group_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    x, groups = lifted(m, inputs[0]), Size.of(int(attrs["num_groups"]))
    scale, bias = lifted(m, inputs[1]), lifted(m, inputs[2])
    if opset < 21:  # one number a group
        scale, bias = (_by_group(m, v, groups, x) for v in (scale, bias))
    grouped = x.moved(m.plan.regrouped(x.atoms, [x.shape[0], groups, None]))
    y, _, _ = m.standardized(grouped, [2], attrs.get("epsilon", EPSILON))
    y = y.moved(m.plan.regrouped(y.atoms, list(x.shape)))
    return m.add(m.mul(y, by_channel(m, scale, x)), by_channel(m, bias, x))


def _by_group(m: Machine, v: Value, groups: Size, x: Value) -> Value:
    each = x.shape[1].over(groups)
    if each is None or v.shape != (groups,):
        raise NotProved(
            Why.SIZE, f"GroupNormalization of {x.shape[1]} channels in {groups} groups with a scale of {v.shape}"
        )
    spread = expanded(m, v.moved((*v.axes, ())), [groups, each])
    return spread.moved((spread.atoms,))


def _batch_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    training = (
        attrs.get("training_mode", 0) if opset >= 14 else outputs > 1 or (opset < 7 and not attrs.get("is_test", 0))
    )
    if training or not attrs.get("spatial", 1):
        raise NotProved(Why.OP, "BatchNormalization in training mode")
    x = lifted(m, inputs[0])
    scale, bias, mean, variance = (by_channel(m, p, x) for p in inputs[1:5])
    radicand = m.add(variance, m.number(Fraction(float(attrs.get("epsilon", EPSILON)))))
    return m.add(m.mul(m.div(m.sub(x, mean), m.root(radicand)), scale), bias)


def _mean_variance_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Value:
    """(x − E[x]) / (√(E[x²] − E[x]²) + 1e-9), as the standard's function body computes it."""
    x = lifted(m, inputs[0])
    axes = axes_of(x, attrs.get("axes", (0, 2, 3)))
    mean = m.mean(x, axes)
    d = m.sub(x, mean)
    variance = m.sub(m.mean(m.mul(x, x), axes), m.mul(mean, mean))
    variance.sign = NOT_NEGATIVE  # it is E[(x − E[x])²]
    below = m.add(m.root(variance), m.number(Fraction(_MVN_EPSILON)))
    below.sign = POSITIVE
    return m.div(d, below)


TABLE: dict[str, Op] = {
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "SimplifiedLayerNormalization": _rms_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "BatchNormalization": _batch_norm,
    "MeanVarianceNormalization": _mean_variance_norm,
}
