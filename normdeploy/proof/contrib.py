"""Norm ops that are not standard ONNX, each by its owner's definition on `Value`s: what an expansion of one is proved
against.

- onnxruntime's contrib ops: its docs/ContribOperators.md. LayerNormalization and SimplifiedLayerNormalization are
  registered in the default domain, too, where the standard has none of that name yet; they mean what the standard's
  LayerNormalization (17) and RMSNormalization (23) mean.
- GroupNormalization 18: https://onnx.ai/onnx/operators, one scale and bias for each group.
- TensorRT's plugins, by the README and the plugin creator (which holds the defaults) in each folder of TensorRT's
  plugin/: groupNormPlugin, groupNormalizationPlugin, layerNormPlugin, instanceNormalizationPlugin, skipLayerNormPlugin.

A definition gets (machine, inputs, attributes, opset, how many outputs), inputs as `Value`, `Indices` or `Table`, None
where left out, and gives its outputs. It is written from the op's meaning, not from the nodes that `normdeploy.contrib`
writes; where two ops have one meaning it is said once. Shapes are in the docstrings, C is the number of channels, H the
hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..evaluate.core import float32
from . import norms, ops
from .lemmas import congruence
from .machine import Machine
from .nodes import Indices, Table, leaky, met
from .ops import Attrs, Inputs, Op, by_channel, expanded
from .sizes import Size
from .value import Value

_EPSILON = float32(1e-5)
_SKIP_EPSILON = float32(1e-12)  # onnxruntime's default for its Skip… ops and EmbedLayerNormalization
GROUPS = 32  # fixed in TensorRT's groupNormPlugin.cpp
SKIP_EPSILON = {0: 2.0**-23, 1: 2.0**-10}  # type_id -> std::numeric_limits<float or half>::epsilon()


def _optional(inputs: Inputs, index: int) -> Any:
    return inputs[index] if index < len(inputs) else None


def _last(x: Value) -> list[int]:
    return [len(x.axes) - 1]


def _from(x: Value, axis: int) -> list[int]:
    rank = len(x.axes)
    if not -rank <= axis < rank:
        raise ValueError(f"its axis {axis} is none of an input of rank {rank}")
    return list(range(axis % rank, rank))


def _vector(m: Machine, values: Any, behind: int = 0) -> Value:
    """A vector that stands in an attribute, with ``behind`` axes of one place behind it."""
    v = m.constant(np.asarray(values, dtype=np.float64).reshape(-1))
    return v.moved((*v.axes, *((),) * behind))


def _silu(m: Machine, y: Value) -> Value:
    return m.mul(y, congruence.TABLE["Sigmoid"](m, [y], {}, 13, 1))


def _transposed(m: Machine, x: Value, perm: Sequence[int]) -> Value:
    moved: Value = ops.TABLE["Transpose"](m, [x], {"perm": list(perm)}, 13, 1)
    return moved


# ------------------------------------------------------------------ onnxruntime


def _layer_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    """LayerNormalization(X, Scale, B) → Y, Mean, InvStdDev, over ``axis`` (−1) and all behind it; Scale and B broadcast
    to X."""
    x, scale, bias = inputs[0], inputs[1], _optional(inputs, 2)
    y, mean, inverse = m.standardized(x, _from(x, int(attrs.get("axis", -1))), attrs.get("epsilon", _EPSILON))
    y = m.mul(y, scale)
    return (y if bias is None else m.add(y, bias)), mean, inverse


def _simplified_layer_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    """SimplifiedLayerNormalization(X, scale) → Y, inv_std_var: X/√(mean(X²) + ε)·scale."""
    x = inputs[0]
    y, _, inverse = m.standardized(
        x, _from(x, int(attrs.get("axis", -1))), attrs.get("epsilon", _EPSILON), centered=False
    )
    return m.mul(y, inputs[1]), inverse


def _skip_layer_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    """SkipLayerNormalization(input, skip, gamma, beta, bias) → output, mean, inv_std_var, input + skip + bias: the
    layer norm of that sum over H. input of (B, S, H) or (T, H); skip of the same shape, or broadcast to it; gamma, beta
    and bias of (H).
    """
    total = _summed(m, inputs[0], inputs[1], _optional(inputs, 4))
    beta = _optional(inputs, 3)
    y, mean, inverse = m.standardized(total, _last(total), attrs.get("epsilon", _SKIP_EPSILON))
    y = m.mul(y, inputs[2])
    return (y if beta is None else m.add(y, beta)), mean, inverse, total


def _skip_simplified_layer_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    """SkipSimplifiedLayerNormalization(input, skip, gamma, bias) → output, –, inv_std_var, input + skip + bias: without
    a mean."""
    total = _summed(m, inputs[0], inputs[1], _optional(inputs, 3))
    y, _, inverse = m.standardized(total, _last(total), attrs.get("epsilon", _SKIP_EPSILON), centered=False)
    return m.mul(y, inputs[2]), None, inverse, total


def _summed(m: Machine, x: Value, skip: Value, bias: Value | None) -> Value:
    total = m.add(x, skip)
    return total if bias is None else m.add(total, bias)


def _embed_layer_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    """EmbedLayerNormalization(ids, segments, word, position and segment table, gamma, beta, mask, position ids) →
    output, mask_index,
    embedding_sum: layer norm over H of the sum of the rows that the ids pick (positions: the first S rows where there
    are no ids); the number of ones in each row of the mask, zeros without one; the sum. ids of (B, S), tables of (·,
    H)."""
    ids, segments, words, positions = inputs[:4]
    assert isinstance(ids, Indices)
    assert isinstance(words, Table)
    assert isinstance(positions, Table)
    mask, place = _optional(inputs, 7), _optional(inputs, 8)
    total = m.add(words.rows(ids), positions.rows(ids.shape[1] if place is None else place))
    total = total if segments is None else m.add(total, inputs[4].rows(segments))
    y, _, _ = m.standardized(total, _last(total), attrs.get("epsilon", _SKIP_EPSILON))
    count = None
    if outputs > 1:
        count = expanded(m, m.number(0), ids.shape[:1])
        if mask is not None:
            each = m.total(met(m, mask, 1), [1])
            count = each.moved(each.axes[:1])
    return m.add(m.mul(y, inputs[5]), inputs[6]), count, total


def _channels_first(m: Machine, x: Value, gamma: Value, beta: Value, groups: int, epsilon: float) -> Value:
    """Each of the groups of (N, C, …) with all its places is centered and scaled; gamma and beta of (C)."""
    grouped = x.moved(m.plan.regrouped(x.atoms, [x.shape[0], Size.of(groups), None]))
    y, _, _ = m.standardized(grouped, [2], epsilon)
    y = y.moved(m.plan.regrouped(y.atoms, list(x.shape)))
    return m.add(m.mul(y, by_channel(m, gamma, x)), by_channel(m, beta, x))


def _group_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    """GroupNorm(X, gamma, beta): X of (N, H, W, C), of (N, C, H, W) where channels_last is 0; activation 1 is SiLU."""
    x, last = inputs[0], attrs.get("channels_last", 1)
    if last:
        x = _transposed(m, x, [0, len(x.axes) - 1, *range(1, len(x.axes) - 1)])
    y = _channels_first(m, x, inputs[1], inputs[2], attrs["groups"], attrs.get("epsilon", _EPSILON))
    y = _silu(m, y) if attrs["activation"] == 1 else y
    return _transposed(m, y, [0, *range(2, len(x.axes)), 1]) if last else y


def _skip_group_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    """SkipGroupNorm(X, gamma, beta, skip, bias): GroupNorm of X + skip + bias, and that sum; skip of X's shape, (N, 1,
    1, C) or (N, C), bias of (C)."""
    x, gamma, beta, skip = inputs[:4]
    skip = skip.moved((skip.axes[0], (), (), skip.axes[1])) if len(skip.axes) == 2 else skip
    total = _summed(m, x, skip, _optional(inputs, 4))
    return _group_norm(m, [total, gamma, beta], attrs, opset, 1), total


# ------------------------------------------------------------------ TensorRT


def _trt_group_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    """GroupNorm: x of (N, C, H, W) in 32 groups, followed by SiLU where bSwish."""
    groups = attrs.get("num_groups", GROUPS)
    y = _channels_first(m, inputs[0], inputs[1], inputs[2], groups, attrs.get("epsilon", _EPSILON))
    return _silu(m, y) if attrs.get("bSwish", 0) else y


def _trt_group_normalization(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    """GroupNormalizationPlugin: x of (N, C, …), scale and bias of (C); the creator calls epsilon "eps"."""
    epsilon = attrs.get("eps", attrs.get("epsilon", _EPSILON))
    return _channels_first(m, inputs[0], inputs[1], inputs[2], attrs.get("num_groups", 1), epsilon)


def _trt_layer_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    """LayerNorm: over ``axis`` (−1) and all behind it, gamma and beta with one value for each of these elements."""
    x = inputs[0]
    axes = _from(x, int(attrs.get("axis", -1)))
    y, _, _ = m.standardized(x, axes, attrs.get("epsilon", attrs.get("eps", _EPSILON)))
    gamma, beta = (v.moved(m.plan.regrouped(v.atoms, list(x.shape[axes[0] :]))) for v in inputs[1:3])
    return m.add(m.mul(y, gamma), beta)


def _trt_instance_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    """InstanceNormalization_TRT: x of (N, C, …), scales and bias of (C) as attributes or inputs; where relu, behind it
    a leaky Relu of slope alpha, by default 0."""
    x = inputs[0]
    scale, bias = inputs[1:3] if len(inputs) > 1 else (_vector(m, attrs[name]) for name in ("scales", "bias"))
    y, _, _ = m.standardized(x, range(2, len(x.axes)), attrs["epsilon"])
    y = m.add(m.mul(y, by_channel(m, scale, x)), by_channel(m, bias, x))
    return leaky(m, y, float(attrs.get("alpha", 0.0))) if attrs.get("relu", 0) else y


def _trt_skip_layer_norm(m: Machine, inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Any:
    """CustomSkipLayerNormPluginDynamic: layer norm of input + skip + bias over H; input and skip of (S, B, H, 1, 1), or
    with H last; beta, gamma and bias of (H) are attributes."""
    total = m.add(inputs[0], inputs[1])
    behind = 2 if len(total.axes) == 5 else 0
    total = m.add(total, _vector(m, attrs["bias"], behind)) if "bias" in attrs else total
    y, _, _ = m.standardized(total, [len(total.axes) - 1 - behind], SKIP_EPSILON[attrs.get("type_id", 0)])
    return m.add(m.mul(y, _vector(m, attrs["gamma"], behind)), _vector(m, attrs["beta"], behind))


TABLE: Mapping[tuple[str, str], Op] = {  # by the owner and the op's name
    ("onnxruntime", "LayerNormalization"): _layer_norm,
    ("onnxruntime", "SimplifiedLayerNormalization"): _simplified_layer_norm,
    ("onnxruntime", "SkipLayerNormalization"): _skip_layer_norm,
    ("onnxruntime", "SkipSimplifiedLayerNormalization"): _skip_simplified_layer_norm,
    ("onnxruntime", "EmbedLayerNormalization"): _embed_layer_norm,
    ("onnxruntime", "GroupNorm"): _group_norm,
    ("onnxruntime", "SkipGroupNorm"): _skip_group_norm,
    ("ONNX 18", "GroupNormalization"): norms.TABLE["GroupNormalization"],
    ("TensorRT", "GroupNorm"): _trt_group_norm,
    ("TensorRT", "GroupNormalizationPlugin"): _trt_group_normalization,
    ("TensorRT", "LayerNorm"): _trt_layer_norm,
    ("TensorRT", "LayerNormPlugin"): _trt_layer_norm,
    ("TensorRT", "InstanceNormalization_TRT"): _trt_instance_norm,
    ("TensorRT", "CustomSkipLayerNormPluginDynamic"): _trt_skip_layer_norm,
}
