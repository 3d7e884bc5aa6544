"""Recognize ONNX files that contain an engine compiled from a model instead of the model itself.

Such a file contains onnxruntime's EPContext nodes. It is for one execution provider of onnxruntime, one kind of GPU and
one version of a library (onnxruntime's "EP Context Cache Feature Design"). It contains no norms to rewrite and no model
to compare, so it is refused with an error that describes the engine.
"""

from __future__ import annotations

import onnx

from ..errors import GraphError

OP = "EPContext"
DOMAIN = "com.microsoft"
PROVIDER = "NvTensorRTRTXExecutionProvider"
# Wheel of onnxruntime's TensorRT-RTX provider for CUDA 13. The wheel for CUDA 12 ends in cu12.
PACKAGE = "onnxruntime-ep-nv-tensorrt-rtx-cu13"
# Maximum number of characters that a message quotes from a file.
_SHOWN = 80


def require_model(proto: onnx.ModelProto, name: str) -> None:
    """Refuse a file that contains a compiled model.

    Raises:
        GraphError: the file contains a compiled model.
    """
    node = next((n for n in proto.graph.node if n.op_type == OP and n.domain == DOMAIN), None)
    if node is not None:
        raise GraphError(
            f"{name} {describe_context_node(node)}; pass the ONNX file that it was made "
            f"from{_original_model_clause(node)}"
        )


def describe_context_node(node: onnx.NodeProto) -> str:
    """Describe the engine of an EPContext node from its attributes.

    Returns:
        the predicate of a message, "holds, …". It names the provider, the GPU and the version if the node states them.
    """
    provider = attribute_text(node, "source") or "an unnamed execution provider"
    built = [
        f"for compute capability {architecture}"
        if (architecture := attribute_text(node, "hardware_architecture"))
        else "",
        f"by version {version}" if (version := attribute_text(node, "ep_sdk_version")) else "",
    ]
    if provider == PROVIDER:
        need = f" (pip install {PACKAGE}) on such a GPU"
    else:
        need = ""
    title = " ".join(part for part in ("compiled", *built) if part)
    return (
        f"holds, instead of nodes, an engine for onnxruntime's {provider}, {title}: only onnxruntime with that "
        f"provider{need} runs it"
    )


def attribute_text(node: onnx.NodeProto, name: str) -> str:
    """Read a string attribute of a node as untrusted input.

    Returns:
        at most 80 printable characters; "" if the attribute is missing.
    """
    value = next((a.s for a in node.attribute if a.name == name), b"")
    text = value[: 4 * _SHOWN].decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)[:_SHOWN]


def _original_model_clause(node: onnx.NodeProto) -> str:
    source = attribute_text(node, "onnx_model_filename")
    if source:
        return f", {source!r}"
    return ""
