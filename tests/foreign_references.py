"""Float64 references of norm ops that are not standard ONNX, each written from its owner's documentation in numpy.

They know nothing of the definitions in `normdeploy.norms`, which are judged by them.

- onnxruntime's contrib ops: docs/ContribOperators.md (GroupNorm, SkipGroupNorm, EmbedLayerNormalization). Its layer
  norms are in `normdeploy.evaluate.evaluator` already, because a float64 evaluation may meet them anywhere.
- TensorRT's plugins, by the README and the plugin creator (which holds the defaults) in each folder of TensorRT's
  plugin/: groupNormPlugin, groupNormalizationPlugin, layerNormPlugin, instanceNormalizationPlugin, skipLayerNormPlugin.

Functions are as in `normdeploy.evaluate.evaluator_core`. The keys are (owner, op).
"""

from __future__ import annotations

import numpy as np

from normdeploy.evaluate.evaluator_core import Array, Attrs, Inputs, Result, Table, optional_input, round_to_float32

_EPSILON = round_to_float32(1e-5)
GROUPS = 32  # fixed in TensorRT's groupNormPlugin.cpp
SKIP_EPSILON = {0: 2.0**-23, 1: 2.0**-10}  # type_id -> std::numeric_limits<float or half>::epsilon()


def _channels(parameter: Array, x: Array) -> Array:
    return np.asarray(parameter, dtype=np.float64).reshape(-1, *(1,) * (x.ndim - 2))


def _standardized(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    deviation = np.sqrt(x.var(axis=axes, keepdims=True) + epsilon)
    standardized: Array = (x - x.mean(axis=axes, keepdims=True)) / deviation
    return standardized


def _silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def _grouped(x: Array, gamma: Array, beta: Array, groups: int, epsilon: float) -> Array:
    """Group normalization of (N, C, …) with one gamma and beta for each channel."""
    rows = x.reshape(x.shape[0] * groups, -1)
    y = _standardized(rows, (1,), epsilon)
    return y.reshape(x.shape) * _channels(gamma, x) + _channels(beta, x)


def _ort_group_norm(x: Array, gamma: Array, beta: Array, attrs: Attrs) -> Array:
    last = attrs.get("channels_last", 1)
    y = _grouped(np.moveaxis(x, -1, 1) if last else x, gamma, beta, attrs["groups"], attrs.get("epsilon", _EPSILON))
    y = _silu(y) if attrs["activation"] == 1 else y
    return np.moveaxis(y, 1, -1) if last else y


def _group_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    return _ort_group_norm(inputs[0], inputs[1], inputs[2], attrs)


def _skip_group_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """GroupNorm of X + skip + bias, and that sum; skip of X's shape, (N, 1, 1, C) or (N, C), bias of (C,)."""
    x, gamma, beta, skip = inputs[:4]
    bias = optional_input(inputs, 4)
    total = x + (skip.reshape(skip.shape[0], 1, 1, -1) if skip.ndim == 2 else skip)
    total = total if bias is None else total + bias
    return _ort_group_norm(total, gamma, beta, attrs), total


def _embed_layer_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """Layer norm of word + position + segment embeddings; the number of ones in each row of the mask (0 without one);
    the sum."""
    ids, segments, words, positions = inputs[:4]
    mask, place = optional_input(inputs, 7), optional_input(inputs, 8)
    total = words[ids] + (positions[: ids.shape[1]] if place is None else positions[np.broadcast_to(place, ids.shape)])
    if segments is not None:
        total = total + inputs[4][segments]
    y = _standardized(total, (-1,), attrs.get("epsilon", round_to_float32(1e-12)))
    count = np.zeros(len(ids), np.int32) if mask is None else (mask == 1).sum(axis=1).astype(np.int32)
    return y * inputs[5] + inputs[6], count, total


def _gated_rms_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """GatedRMSNorm: RMS norm of each C elements of X, C the length of the scale, times SiLU or sigmoid of the gate."""
    x, scale, gate = inputs
    rows = x.reshape(-1, scale.size)
    y = rows / np.sqrt((rows**2).mean(1, keepdims=True) + attrs.get("epsilon", _EPSILON)) * scale
    gated = 1.0 / (1.0 + np.exp(-gate)) if attrs.get("activation") == "sigmoid" else _silu(gate)
    return y.reshape(x.shape) * gated


def _branchwise_rms_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """BranchwiseRMSNorm: RMS norm of each H elements of X, (…, C, H) or (…, C · H); scale of (C · H), (C, H) or (H)."""
    x, scale = inputs[0], optional_input(inputs, 1)
    branches = attrs.get("num_branches", 0) or x.shape[-2]
    size = x.shape[-1] // (branches if attrs.get("num_branches", 0) else 1)
    rows = x.reshape(-1, branches, size)
    y = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + attrs.get("epsilon", _EPSILON))
    return (y if scale is None else y * scale.reshape(-1, size)).reshape(x.shape)


def _trt_group_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """GroupNorm: x of (N, C, H, W) in 32 groups, followed by SiLU where bSwish."""
    y = _grouped(inputs[0], inputs[1], inputs[2], attrs.get("num_groups", GROUPS), attrs.get("epsilon", _EPSILON))
    return _silu(y) if attrs.get("bSwish", 0) else y


def _trt_group_normalization(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """GroupNormalizationPlugin: x of (N, C, …), scale and bias for each channel; the creator calls epsilon "eps"."""
    epsilon = attrs.get("eps", attrs.get("epsilon", _EPSILON))
    return _grouped(inputs[0], inputs[1], inputs[2], attrs.get("num_groups", 1), epsilon)


def _trt_layer_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """LayerNorm: over ``axis`` (default the last) and all behind it, gamma and beta with one value for each of these
    elements."""
    x, axis = inputs[0], attrs.get("axis", -1)
    axes = tuple(range(axis % x.ndim, x.ndim))
    y = _standardized(x, axes, attrs.get("epsilon", attrs.get("eps", _EPSILON)))
    behind = x.shape[axes[0] :]
    return y * inputs[1].reshape(behind) + inputs[2].reshape(behind)


def _trt_instance_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """InstanceNormalization_TRT: scales and bias as attributes or inputs; val < 0 ? val · alpha : val behind it where
    relu."""
    x = inputs[0]
    scale, bias = inputs[1:3] if len(inputs) > 1 else (attrs["scales"], attrs["bias"])
    y = _standardized(x, tuple(range(2, x.ndim)), attrs["epsilon"])
    y = y * _channels(scale, x) + _channels(bias, x)
    return np.where(y < 0, y * attrs.get("alpha", 0.0), y) if attrs.get("relu", 0) else y


def _trt_skip_layer_norm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """CustomSkipLayerNormPluginDynamic: layer norm of input + skip + bias over the hidden size, the axis before any 1s
    at the end."""
    gamma, beta = (np.asarray(attrs[name], dtype=np.float64).reshape(-1) for name in ("gamma", "beta"))
    total = inputs[0] + inputs[1]
    rows = total.reshape(-1, gamma.size) + (
        np.asarray(attrs["bias"], dtype=np.float64).reshape(-1) if "bias" in attrs else 0.0
    )
    y = _standardized(rows, (1,), SKIP_EPSILON[attrs.get("type_id", 0)])
    return (y * gamma + beta).reshape(total.shape)


TABLE: Table = {
    ("com.microsoft", "GroupNorm"): _group_norm,
    ("com.microsoft", "SkipGroupNorm"): _skip_group_norm,
    ("com.microsoft", "EmbedLayerNormalization"): _embed_layer_norm,
    ("com.microsoft", "GatedRMSNorm"): _gated_rms_norm,
    ("com.microsoft", "BranchwiseRMSNorm"): _branchwise_rms_norm,
    ("TensorRT", "GroupNorm"): _trt_group_norm,
    ("TensorRT", "GroupNormalizationPlugin"): _trt_group_normalization,
    ("TensorRT", "LayerNorm"): _trt_layer_norm,
    ("TensorRT", "LayerNormPlugin"): _trt_layer_norm,
    ("TensorRT", "InstanceNormalization_TRT"): _trt_instance_norm,
    ("TensorRT", "CustomSkipLayerNormPluginDynamic"): _trt_skip_layer_norm,
}
