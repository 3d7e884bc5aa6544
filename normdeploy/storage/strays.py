"""Norms in ONNX's own domain that ONNX does not know there, or not any more: what other tools leave behind, and is read all the same.

onnxruntime's optimizer leaves LayerNormalization below opset 17 and SimplifiedLayerNormalization, TensorRT's converters leave plugins, and
opset 18 had a GroupNormalization that was deprecated at birth. What they mean, `normdeploy.foreign.ops` says.
"""

from __future__ import annotations

_AT_ANY_OPSET = frozenset(
    {
        "SimplifiedLayerNormalization",
        "GroupNorm",
        "GroupNormalizationPlugin",
        "LayerNorm",
        "LayerNormPlugin",
        "InstanceNormalization_TRT",
        "CustomSkipLayerNormPluginDynamic",
    }
)


def is_stray(op: str, opset: int) -> bool:
    """Whether a node of ONNX's own domain is such a norm.

    Args:
        op: its op type.
        opset: of ONNX's domain, where the node stands.
    """
    if op == "GroupNormalization":
        return 18 <= opset < 21
    return opset < 17 if op == "LayerNormalization" else op in _AT_ANY_OPSET
