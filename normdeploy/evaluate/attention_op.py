"""Evaluate Attention (https://onnx.ai/onnx/operators/onnx__Attention.html) in float64.

The inputs must have rank 4, with an axis for the heads. A scale and an additive mask are supported. A causal or boolean
mask, a soft cap, and past keys and values are not supported.
"""

import numpy as np

from .evaluator_core import Array, Attrs, Inputs, Result, Table, UnsupportedOp, optional_input

_PLAIN = frozenset({"scale", "q_num_heads", "kv_num_heads", "softmax_precision"})


def _attention(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    q, k, v = inputs[:3]
    mask = optional_input(inputs, 3)
    told = any(attrs[name] for name in attrs.keys() - _PLAIN)
    if (
        told
        or outputs > 1
        or q.ndim != 4
        or any(x is not None for x in inputs[4:])
        or (mask is not None and mask.dtype.kind != "f")
    ):
        raise UnsupportedOp(
            "no float64 evaluation of an Attention that is causal or capped, or has flat heads, a past or a "
            "boolean mask"
        )
    if mask is not None and mask.shape[-1] != k.shape[2] and mask.shape[-1] != 1:
        raise UnsupportedOp("no float64 evaluation of an Attention whose mask is shorter than its keys")
    groups = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, groups, axis=1) for x in (k, v))
    scores = attrs.get("scale", q.shape[-1] ** -0.5) * (q @ np.swapaxes(k, -1, -2))
    bias: Array
    if mask is None:
        bias = np.zeros(())
    else:
        bias = mask
    scores = scores + bias
    e = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
    p = e / e.sum(axis=-1, keepdims=True)
    if mask is not None:
        # If the mask hides a whole row, the row's result is zero.
        p = np.where(np.isneginf(bias).all(axis=-1, keepdims=True), 0.0, p)
    made: Array = p @ v
    return made


TABLE: Table = {("", "Attention"): _attention}
